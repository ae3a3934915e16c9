"""``ds_hybrid doctor``: what it prints, and how it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from ds_hybrid.cli.main import main
from tests.doctor.stand_ins import StandIns, made_facts
from tests.doctor.stand_ins import stand_ins as stand_ins

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "ds_hybrid.cli.main", "doctor"]


@pytest.fixture
def no_hostfile() -> list[str]:
    """A machine may have DeepSpeed's default one."""
    return ["--hostfile", os.devnull]


def test_a_healthy_host_as_text(
    stand_ins: StandIns, no_hostfile: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *no_hostfile, "--num_gpus", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("versions\n  python        3.11.7\n")
    assert printed.out.endswith("collective\n  ok  2 ranks on cpu, gloo\n\nfindings\n  none\n")
    assert printed.err.splitlines() == [
        "ds_hybrid doctor: asking this host",
        "ds_hybrid doctor: starting two ranks on this host; DeepSpeed may first compile an op",
    ]


def test_warnings_alone_exit_1(stand_ins: StandIns, no_hostfile: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    packages = {**made_facts().packages, "torch": "2.12.0"}
    stand_ins.tells("here", made_facts("here", packages=packages))
    assert main(["doctor", *no_hostfile]) == 1
    expected = 'findings\n  warning  torch = "2.12.0" (here): untested. Tested: 2.13.0.\n'
    assert capsys.readouterr().out.endswith(expected)


def test_errors_exit_2_and_json_has_them(stand_ins: StandIns, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--hostfile", "missing", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["exit_status"] == 2
    assert report["findings"] == [
        {
            "severity": "error",
            "check": "hostfile",
            "message": "missing: no such file, and DeepSpeed would go on with this host alone. Check the path.",
        }
    ]


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["doctor", "--num_gpus", "0"])
    assert leaving.value.code == 2
    expected = "ds_hybrid doctor: error: argument --num_gpus: '0' must be an integer >= 1"
    assert capsys.readouterr().err.splitlines()[-1] == expected


def test_help_imports_neither_torch_nor_deepspeed() -> None:
    code = """
import sys
from ds_hybrid.cli.main import main
try:
    main(["doctor", "--help"])
except SystemExit as leaving:
    print(leaving.code, sorted({"torch", "deepspeed", "transformers"} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "examples:\n  ds_hybrid doctor\n" in done.stdout
    assert done.stdout.endswith("\n0 []\n")


def on_this_machine(extensions: Path, home: Path) -> dict[str, str]:
    """The environment of a user, with nothing in the place of anything."""
    return {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(extensions),
    }


@pytest.mark.launch
def test_this_machine(no_hostfile: list[str], tmp_path: Path) -> None:
    options = ["--num_gpus", "4", "--config", str(ROOT / "ds_configs" / "two_stage_zero1.json"), "--json"]
    done = subprocess.run(
        [*DOCTOR, *no_hostfile, *options],
        cwd=tmp_path,
        env=on_this_machine(ROOT / ".torch_ext", tmp_path),
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    assert report["findings"] == [], done.stderr
    assert done.returncode == 0
    (host,) = report["hosts"]
    assert host["num_ranks"] == 4
    assert host["facts"]["packages"]["torch"] == version("torch")
    assert report["groups"]["ep"] == [[0, 1], [2, 3]]
    assert report["collective"] == {"result": "ok", "detail": "2 ranks on cpu, gloo"}


@pytest.mark.launch
def test_a_signal_while_an_op_is_compiled_leaves_nothing_behind(no_hostfile: list[str], tmp_path: Path) -> None:
    lock = tmp_path / "ext" / "deepspeed_shm_comm" / "lock"
    environment = on_this_machine(tmp_path / "ext", tmp_path)
    with subprocess.Popen([*DOCTOR, *no_hostfile], cwd=tmp_path, env=environment) as doctor:
        while not lock.exists():
            assert doctor.poll() is None
            time.sleep(0.1)
        family = psutil.Process(doctor.pid).children(recursive=True)
        assert len(family) >= 2
        doctor.terminate()
        assert doctor.wait(timeout=60) == 143
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    assert not lock.exists()
