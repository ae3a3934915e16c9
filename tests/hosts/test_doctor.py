"""``ds_hybrid doctor`` over real ssh: every host is asked, not only the first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.lab import BIN, Lab, hosts_up

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def lab(can_have_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Hosts of this file's own: it breaks them."""
    with hosts_up(tmp_path_factory.mktemp("hosts")) as lab:
        yield lab


def test_the_second_host_is_asked_and_missed_when_it_is_off(lab: Lab, tmp_path: Path) -> None:
    hostfile = lab.hostfile(tmp_path, slots=2)
    (tmp_path / ".deepspeed_env").write_text(f"TORCH_EXTENSIONS_DIR={lab.extensions}\n")
    command = [str(BIN / "ds_hybrid"), "doctor", "--hostfile", str(hostfile), "--json"]
    healthy = lab.run(command, tmp_path)
    assert healthy.code in (0, 1), healthy.output
    report = _report(healthy.output)
    assert [(host["name"], host["num_ranks"], host["facts"] is not None) for host in report["hosts"]] == [
        ("w0", 2, True),
        ("w1", 2, True),
    ]
    assert [finding for finding in report["findings"] if finding["severity"] == "error"] == []

    lab.call("off", "w1")
    broken = lab.run(command, tmp_path)
    assert broken.code == 2, broken.output
    errors = [finding for finding in _report(broken.output)["findings"] if finding["severity"] == "error"]
    assert [(finding["check"], finding["message"].split(":")[0]) for finding in errors] == [("reachable", "w1 (host)")]
    assert "not reachable" in errors[0]["message"]


def _report(output: str) -> dict:  # type: ignore[type-arg]
    """The JSON among the lines of progress."""
    return json.loads(output[output.index("{\n") : output.rindex("}") + 1])
