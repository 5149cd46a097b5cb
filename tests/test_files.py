"""Files of a model: read, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from samovar.errors import ModelError, SettingError
from samovar.files import read_config, read_json, read_settings


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
class Point:
    x: int = 0


def test_a_config_is_an_object_a_mapping_or_a_file(tmp_path: Path) -> None:
    files = {"a.json": '{"point": {"x": 3}, "other": 1}', "b.yaml": "point: {x: 3}", "c.yml": "x: 3"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert (
            read_config(Point, tmp_path / name, "point")
            == read_config(Point, str(tmp_path / name), "point")
            == Point(3)
        )
    assert read_config(Point, Point(3), "point") == read_config(Point, {"x": 3}, "point") == Point(3)
    (tmp_path / "empty.yaml").write_text("")
    assert read_config(Point, tmp_path / "empty.yaml", "point") == Point()


@pytest.mark.parametrize("value", [3, None, "three", [1]])
def test_no_other_value_is_a_config(value: Any) -> None:
    with pytest.raises(SettingError, match="expected the settings of Point") as caught:
        read_config(Point, value, "point")
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
    ],
)
def test_a_file_of_settings_with_a_mistake_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SettingError, match=message):
        read_settings(tmp_path / name, "point")


def test_unknown_settings_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"'y' is not a setting of point. Known: 'x'"):
        read_config(Point, {"y": 3}, "point")
    with pytest.raises(SettingError, match="No such file"):
        read_config(Point, tmp_path / "missing.json", "point")
