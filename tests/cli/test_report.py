"""``ds_hybrid report`` and ``ds_hybrid trace``: what they write, and how they refuse."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_hybrid.cli.main import main
from ds_hybrid.observe.events import ResumeRecord
from tests.observe.runs import BEGAN, run_record, step_record, write_lines, write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "observe")


def test_report_lies_beside_the_records(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'report.html'}\n"
    html = (run_dir / "report.html").read_text()
    assert html.startswith("<!DOCTYPE html>\n")
    assert "<h1>Run observe</h1>" in html
    assert "Step 60 took 151 ms." in html


def test_another_step_and_place(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir), "--step", "20", "--out", str(tmp_path / "mine.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine.html'}\n"
    assert "Step 20 took 151 ms." in (tmp_path / "mine.html").read_text()


def test_pictures(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["report", str(run_dir), "--png", str(tmp_path / "a" / "b")]) == 0
    names = ["training", "expert_load", "timeline", "bytes", "rebalances", "placement"]
    files = [tmp_path / "a" / "b" / f"{name}.png" for name in names]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in [run_dir / "report.html", *files]]
    assert all(file.read_bytes().startswith(b"\x89PNG\r\n") for file in files)


def test_pictures_without_matplotlib(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(run_dir), "--png", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "--png needs matplotlib. Install it: pip install 'ds_hybrid[report]'.\n"


def test_trace(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run_dir)]) == 0
    assert main(["trace", str(run_dir), "--step", "20", "--out", str(tmp_path / "20.json")]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'trace.json'}\n{tmp_path / '20.json'}\n"
    last, chosen = (json.loads(path.read_text()) for path in (run_dir / "trace.json", tmp_path / "20.json"))
    assert (last["otherData"]["step"], chosen["otherData"]["step"]) == ("60", "20")
    dispatch = next(event for event in chosen["traceEvents"] if event["name"] == "dispatch")
    assert dispatch["args"]["layer_bytes_per_step_all_ranks"] == 90_000


@pytest.mark.parametrize("command", ["report", "trace"])
def test_mistakes_are_told(command: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, damaged, newer = (tmp_path / name for name in ("empty", "damaged", "newer"))
    for folder in (empty, damaged, newer):
        folder.mkdir()
    whole = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    (damaged / "events.jsonl").write_text("".join([*whole[:2], "{broken\n", *whole[2:]]))
    write_lines(newer / "events.jsonl", [run_record(version=2)])
    for arguments, message in [
        ([str(tmp_path / "none")], f"{tmp_path}/none/events.jsonl: No such file or directory. Give the directory "),
        ([str(empty)], f"{empty}/events.jsonl: No such file or directory. Give the directory "),
        ([str(damaged)], f"{damaged}/events.jsonl:3: damaged: "),
        ([str(newer)], f"{newer}/events.jsonl:1: schema version 2, this ds_hybrid reads up to 1. "),
        (
            [str(run_dir), "--step", "15"],
            f"{run_dir}/timeline.jsonl: has no timeline of step 15. Steps that have one: 10, 20, 30, 40, 50, 60.",
        ),
    ]:
        assert main([command, *arguments]) == 2
        assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("command", ["report", "trace"])
def test_where_nothing_can_be_written(
    command: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, message in [
        (tmp_path / "none" / "x", f"there is no folder '{tmp_path}/none'. Make it first"),
        (tmp_path, "is a folder. Name a file in it"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main([command, str(run_dir), "--out", str(place)])
        assert message in capsys.readouterr().err
    write_run(tmp_path)
    name = "report.html" if command == "report" else "trace.json"
    (tmp_path / name).mkdir()
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path / name}: Is a directory. Name another file with --out.\n"


def test_pictures_need_a_folder(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "charts").write_text("")
    assert main(["report", str(run_dir), "--png", str(tmp_path / "charts")]) == 2
    assert capsys.readouterr().err == f"--png {tmp_path}/charts: File exists. Name a folder.\n"


def test_a_report_is_whole_or_the_old_one(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.html"
    out.write_text("old")
    write = Path.write_text

    def until_the_disk_is_full(path: Path, text: str, **options: Any) -> None:
        write(path, text[:100], **options)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", until_the_disk_is_full)
        assert main(["report", str(run_dir), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"{out}: No space left on device. Name another file with --out.\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine.html", "old")]
    link = tmp_path / "link.html"
    link.symlink_to(out)
    assert main(["report", str(run_dir), "--out", str(link)]) == 0
    assert link.is_symlink()
    assert out.read_text().startswith("<!DOCTYPE html>")


def test_a_run_without_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "events.jsonl", [run_record()])
    assert main(["report", str(tmp_path)]) == 0
    assert "No step of this run has a timeline." in (tmp_path / "report.html").read_text()
    assert main(["trace", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/timeline.jsonl: no step has a timeline. ")


def test_timelines_of_another_model_are_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of fewer layers resumed from elsewhere in the directory of another one, and has no timeline yet."""
    events = write_run(tmp_path) / "events.jsonl"
    layer = run_record().layers[0]
    other = run_record(layers=(layer,))
    loaded = ResumeRecord(time=BEGAN, step=1000, path="c", placements={layer.name: layer.expert_of_slot})
    before = events.read_text()
    write_lines(events, [other, loaded, step_record(1010)])
    events.write_text(before + events.read_text())
    assert main(["report", str(tmp_path)]) == 0
    assert "No step of this run has a timeline." in (tmp_path / "report.html").read_text()
    assert main(["report", str(tmp_path), "--step", "60"]) == 2
    assert "has no timeline of step 60. Steps that have one: none." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["events.jsonl", "timeline.jsonl"])
def test_torn_lines_are_told(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path) / name
    number = len(path.read_bytes().splitlines())
    path.write_bytes(path.read_bytes()[:-20])
    told = f"{path}:{number}: the last line is not whole and was passed over"
    assert main(["report", str(tmp_path)]) == 0
    assert told in (tmp_path / "report.html").read_text()
    assert main(["trace", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'report.html'}\n{tmp_path / 'trace.json'}\n"
    assert captured.err.startswith(f"warning: {told}")
    assert len(captured.err.splitlines()) == 1


def test_neither_torch_nor_matplotlib_is_imported(run_dir: Path) -> None:
    code = f"""
import sys
from ds_hybrid.cli.main import main
status = main(["report", {str(run_dir)!r}]) + main(["trace", {str(run_dir)!r}])
print(status, sorted({{"torch", "deepspeed", "transformers", "matplotlib"}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n0 []\n")
