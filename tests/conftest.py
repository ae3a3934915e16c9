"""Fixtures for every room."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.ranks import RankPool

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
