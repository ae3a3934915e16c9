"""The hosts of these tests; without root or the tools the tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.lab import Lab, hosts_up, what_is_missing


@pytest.fixture(scope="session")
def can_have_hosts() -> None:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture(scope="module")
def lab(can_have_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two hosts, for a whole file."""
    with hosts_up(tmp_path_factory.mktemp("hosts")) as lab:
        yield lab
