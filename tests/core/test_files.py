"""Files of a model: read, or refused by name."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from samovar.core.errors import ModelError, SettingError
from samovar.core.files import read_json, read_settings, reading
from samovar.core.settings import Settings, count, setting


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


@dataclass(frozen=True)
class Point(Settings, param="point"):
    x: int = setting(0, count(), "A number.")


def test_a_config_is_an_object_a_mapping_or_a_file(tmp_path: Path) -> None:
    files = {"a.json": '{"point": {"x": 3}, "other": 1}', "b.yaml": "point: {x: 3}", "c.yml": "x: 3"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert Point.read(tmp_path / name) == Point.read(str(tmp_path / name)) == Point(3)
    assert Point.read(Point(3)) == Point.read({"x": 3}) == Point(3)
    (tmp_path / "empty.yaml").write_text("")
    assert Point.read(tmp_path / "empty.yaml") == Point()


@pytest.mark.parametrize("value", [3, "three", [1]])
def test_no_other_value_is_a_config(value: Any) -> None:
    with pytest.raises(SettingError, match="expected the settings of Point") as caught:
        Point.read(value)
    assert caught.value.param == "point"


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
        ("a.yaml", "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(99)), "nested too deeply"),
        ("a.yaml", "[" * 3000, "cannot be read: it is nested too deeply"),
        ("a.yaml", "x: 1\nx: 2", "cannot be read: 'x' is given twice"),
        ("a.yaml", "x: !!bool y", "cannot be read: a value is not what its tag says"),
        ("a.yaml", "x: !!timestamp y", "cannot be read: a value is not what its tag says"),
        ("a.yaml", "x: &x [*x]", "cannot be read: it contains itself"),
    ],
)
def test_a_file_of_settings_with_a_mistake_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SettingError, match=message):
        read_settings(tmp_path / name, "point")


def bomb(item: str) -> str:
    """Lists, or merged mappings, of nine of the one before: a short text that stands for 9**9 values."""
    lines = ["a: &a [x, x, x]" if item == "[{}]" else "a: &a {x: 1}"]
    for before, name in itertools.pairwise("abcdefghij"):
        lines.append(f"{name}: &{name} {item.format(', '.join([f'*{before}'] * 9))}")
    return "\n".join(lines)


@pytest.mark.parametrize("item", ["[{}]", "{{<<: [{}]}}"])
def test_aliases_are_not_expanded_to_be_refused(tmp_path: Path, item: str) -> None:
    (tmp_path / "bomb.yaml").write_text(bomb(item))
    with pytest.raises(SettingError, match="with what its aliases repeat it holds more than 1000000 values") as caught:
        read_settings(tmp_path / "bomb.yaml", "point")
    assert len(str(caught.value)) < 1000


def test_aliases_are_understood(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: &base {x: 3}\npoint: {<<: *base}")
    assert Point.read(tmp_path / "a.yaml") == Point(3)


def test_a_wrong_value_of_any_size_gives_a_short_message(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"point": ["' + "x" * 100_000 + '"]}')
    (tmp_path / "b.json").write_text('{"' + "x" * 100_000 + '": 3}')
    for name in ("a.json", "b.json"):
        with pytest.raises(SettingError) as caught:
            Point.read(tmp_path / name)
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


def test_unknown_settings_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"'y' is not a setting of point. Known: 'x'"):
        Point.read({"y": 3})
    with pytest.raises(SettingError, match="No such file"):
        Point.read(tmp_path / "missing.json")
