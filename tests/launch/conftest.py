"""Fixtures for the launch scripts."""

from pathlib import Path

import pytest

from tests.launch.fakes import FakeCluster


@pytest.fixture
def cluster(tmp_path: Path) -> FakeCluster:
    cluster = FakeCluster(tmp_path)
    cluster.fill()
    return cluster
