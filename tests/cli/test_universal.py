"""``ds_hybrid universal``: what it says when nothing is there; tests/multirank/test_universal.py converts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_hybrid.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "{folder}/latest: missing. Give the checkpoint's tag."),
        (["--tag", "step5"], "{folder}/step5: no such checkpoint."),
        (["--tag", "plain"], "{folder}/plain: no zero_pp_rank_*_optim_states.pt. Without ZeRO, a checkpoint loads at "
         "other sizes as it is."),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    (tmp_path / "plain").mkdir()
    assert main(["universal", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == message.format(folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"]
