"""Tables by name and by path."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.tables import read_table, table_names


def test_a_name_is_a_table_that_comes_along() -> None:
    for kind, name in (("models", "mixtral_8x7b"), ("machines", "cpu2")):
        assert name in table_names(kind)  # type: ignore[arg-type]
        table, file = read_table(kind, name)  # type: ignore[arg-type]
        assert table
        assert Path(file).name == f"{name}.yaml"


def test_a_path_is_a_file_or_the_folder_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "mine.yaml").write_text("a: 2\n")
    assert read_table("models", str(tmp_path)) == ({"a": 1}, str(tmp_path / "config.json"))
    assert read_table("machines", str(tmp_path / "mine.yaml"))[0] == {"a": 2}


def test_a_file_goes_before_a_table_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cpu2").write_text("a: 3\n")
    assert read_table("machines", "cpu2") == ({"a": 3}, "cpu2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "must hold keys and values, not a list"),
        ("a: 1\nb: [\n", "line 3: .* Write YAML or JSON"),
        ("a: \x00", "not a text of YAML or JSON"),
        ("", "must hold keys and values, not a NoneType"),
    ],
)
def test_what_is_no_table(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_table("machines", str(tmp_path / "mine.yaml"))


def test_json_may_be_indented_with_tabs(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{\n\t"a": 1\n}')
    assert read_table("models", str(file))[0] == {"a": 1}
    file.write_text("{\n")
    with pytest.raises(ConfigError, match=r"line 2: .* Write JSON"):
        read_table("models", str(file))


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"cpu3: neither a file nor one of the machines .* Did you mean"):
        read_table("machines", "cpu3")
