"""Files of a model: read, or refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samovar.core.errors import ModelError, SettingError
from samovar.core.files import check_names, read_json, read_settings, reading


def test_an_object_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"näme": "é"}', encoding="utf-8")
    assert read_json(file) == {"näme": "é"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "must hold a JSON object, not list"),
        (b"", "is not valid"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_json(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "cannot be read: Expecting property name"),
        ("a.json", "[1]", "must hold settings by name"),
        ("a.yaml", "a: [", "cannot be read: while parsing"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "cannot be read: could not determine a constructor"),
        ("a.yaml", "point: 3", "must hold settings by name under 'point', not 3"),
        ("a.toml", "", "must end in .json, .yaml or .yml"),
        ("a.json", "[" * 100_000, "cannot be read: it is nested too deeply"),
        ("a.json", '{"x": 1, "x": 2}', "cannot be read: 'x' is given twice"),
        ("a.json", '{"x": NaN}', "cannot be read: NaN is not JSON"),
        ("a.json", "[" * 70 + "]" * 70, "cannot be read: it is nested too deeply"),
        ("a.yaml", "[" * 70 + "]" * 70, "cannot be read: it is nested too deeply"),
        ("a.yaml", "[" * 3000, "cannot be read: it is nested too deeply"),
        ("a.yaml", "x: 1\nx: 2", "cannot be read: 'x' is given twice"),
        ("a.yaml", "x: !!bool y", "cannot be read: a value is not what its tag says"),
        ("a.yaml", "x: !!timestamp y", "cannot be read: a value is not what its tag says"),
        ("a.yaml", "x: &a [1]\ny: *a", r"it has the alias \*a; write out what that stands for"),
        ("a.yaml", "x: &x [*x]", r"it has the alias \*x"),
        ("missing.yaml", None, "No such file"),
    ],
)
def test_a_file_of_settings_with_a_mistake_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SettingError, match=message):
        read_settings(tmp_path / name, "point")


def test_a_wrong_value_of_any_size_gives_a_short_message(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"point": ["' + "x" * 100_000 + '"]}')
    (tmp_path / "b.json").write_text('{"' + "x" * 100_000 + '": 3}')
    for name in ("a.json", "b.json"):
        with pytest.raises(SettingError) as caught:
            check_names(read_settings(tmp_path / name, "point"), ["x"], "a setting")
        assert len(str(caught.value)) < 1000


def test_only_files_of_some_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(SettingError, match="it is not a regular file"):
        read_settings(tmp_path / "pipe.json", "point")
    with pytest.raises(ModelError, match="it is not a regular file"):
        read_json(tmp_path / "pipe.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(SettingError, match="it has 1099511627776 bytes, and 4194304 are the most"):
        read_settings(tmp_path / "large.json", "point")
    with pytest.raises(ModelError, match="it has 1099511627776 bytes, and 268435456 are the most"):
        read_json(tmp_path / "large.json")
    with pytest.raises(SettingError, match=r"~nobody-here/a\.json"):
        read_settings("~nobody-here/a.json", "point")


def test_what_another_library_raises_names_what_was_read() -> None:
    with (
        pytest.raises(ModelError, match=r"a\.json cannot be loaded: KeyError: 'x'\. Check its files\."),
        reading("a.json"),
    ):
        {}["x"]  # type: ignore[index]
    with (
        pytest.raises(ModelError, match=r"a\.json needs a package that is not installed: No module"),
        reading("a.json"),
    ):
        raise ImportError("No module named 'x'")
    with pytest.raises(SettingError, match="as it is"), reading("a.json"):
        raise SettingError("as it is")
    with pytest.raises(KeyboardInterrupt), reading("a.json"):
        raise KeyboardInterrupt
