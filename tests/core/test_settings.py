"""The table of settings: what is declared once is checked, read, described and refused everywhere alike."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from samovar.core.errors import SettingError
from samovar.core.settings import (
    FLAG,
    FOLDER,
    NAMES,
    SIZE,
    TEXT,
    TOLERANCE,
    TOLERANCES,
    Kind,
    Settings,
    choice,
    count,
    kind,
    number,
    parse_bytes,
    read_tolerance,
    setting,
    settings_of,
    table,
)

GIB = 2**30
NAN, INF = math.nan, math.inf
Colour = Literal["red", "green"]


@dataclass(frozen=True)
class Inner(Settings, param="inner"):
    depth: int = setting(1, count(1), "How deep. At least one.")

    @classmethod
    def from_name(cls, name: str) -> Inner:
        return cls(depth={"flat": 1, "deep": 9}[name]) if name in ("flat", "deep") else super().from_name(name)


@dataclass(frozen=True)
class Outer(Settings, param="outer"):
    """Settings with a field of every kind."""

    number_of_steps: int = setting(4, count(1, 9), "Number of steps.", option="--steps")
    share: float = setting(0.5, number(0, 1, below=True), "A share.")
    colour: Colour = setting("red", choice(Colour), "A colour.")
    is_loud: bool = setting(False, FLAG, "Whether it is loud.", option=None)
    limit: int | None = setting(3, count(1), "A limit; None for none.", optional=True)
    budget: str | int | None = setting(None, SIZE, "A budget.")
    names: tuple[str, ...] = setting((), NAMES, "Names.")
    inner: Inner | None = setting(None, settings_of(Inner), "More settings.")
    values: Mapping[str, int] = setting(dict, kind("values", lambda value: isinstance(value, Mapping)), "Values.")
    secret: str | None = setting(None, TEXT, "A secret.", repr=False)

    def check(self) -> None:
        if self.colour == "green" and self.is_loud:
            raise SettingError("colour='green' is never loud.", param="colour")


def test_a_class_is_a_dataclass_whose_fields_are_checked() -> None:
    outer = Outer(5, names="a, b", inner={"depth": 2}, budget="12GiB", limit=None)  # type: ignore[arg-type]
    assert outer == dataclasses.replace(outer)
    assert hash(Inner(2)) == hash(outer.inner)
    assert (outer.number_of_steps, outer.names, outer.inner, outer.limit) == (5, ("a", "b"), Inner(2), None)
    assert outer.budget == "12GiB", "as it is written"
    assert Outer().values == {}
    assert pickle.loads(pickle.dumps(outer)) == outer
    assert "hush" not in repr(Outer(secret="hush"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        outer.limit = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "message", "param"),
    [
        ({"number_of_steps": 0}, "number_of_steps=0; expected a whole number from 1 to 9.", "number_of_steps"),
        ({"number_of_steps": None}, "number_of_steps=None; expected a whole number", "number_of_steps"),
        ({"number_of_steps": True}, "number_of_steps=True; expected a whole number", "number_of_steps"),
        ({"number_of_steps": 10**9000}, "number_of_steps=a number of 29898 bits; expected", "number_of_steps"),
        ({"share": 1.0}, "share=1.0; expected a number from 0 to below 1.", "share"),
        ({"share": NAN}, "share=nan; expected a number from 0 to below 1.", "share"),
        ({"colour": "gren"}, "colour='gren'; expected one of 'red', 'green'. Did you mean 'green'?", "colour"),
        ({"colour": ["red"]}, "colour=['red']; expected one of", "colour"),
        ({"is_loud": 1}, "is_loud=1; expected True or False.", "is_loud"),
        ({"is_loud": None}, "is_loud=None; expected True or False.", "is_loud"),
        ({"limit": 0}, "limit=0; expected a whole number, 1 or more.", "limit"),
        ({"budget": "12"}, "budget='12'; expected a size such as '12GiB', or a number of bytes. Did you mean '12GiB'?",
         "budget"),
        ({"names": [3]}, "names=[3]; expected names, as a list or with commas.", "names"),
        ({"inner": {"depht": 2}}, "'depht' is not a setting of inner. Did you mean 'depth'?", "depht"),
        ({"inner": {"depth": 0}}, "depth=0; expected a whole number, 1 or more.", "depth"),
        ({"inner": "flt"}, "inner='flt'; expected the settings of Inner: an object of it, a mapping, or a file.",
         "inner"),
        ({"inner": 3}, "inner=3; expected the settings of Inner: an object of it, a mapping, or a file.", "inner"),
        ({"colour": "green", "is_loud": True}, "colour='green' is never loud.", "colour"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_value_what_was_expected_and_the_parameter(
    settings: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(SettingError) as caught:
        Outer(**settings)
    assert str(caught.value).startswith(message)
    assert caught.value.param == param


def test_settings_are_read_from_an_object_a_mapping_a_name_or_a_file(tmp_path: Path) -> None:
    files = {"a.json": '{"inner": {"depth": 3}, "other": 1}', "b.yaml": "inner: {depth: 3}", "c.yml": "depth: 3"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert Inner.read(tmp_path / name) == Inner.read(str(tmp_path / name)) == Inner(3)
    assert Inner.read({"depth": 3}) == Inner.read(Inner(3)) == Outer(inner=tmp_path / "a.json").inner == Inner(3)  # type: ignore[arg-type]
    assert Inner.read("deep") == Inner(9)
    (tmp_path / "empty.yaml").write_text("")
    assert Inner.read(tmp_path / "empty.yaml") == Inner.read(None) == Inner()
    (tmp_path / "wrong.yaml").write_text("inner: {depth: 0}")
    with pytest.raises(SettingError, match=r"In '.*wrong.yaml': depth=0; expected"):
        Inner.read(tmp_path / "wrong.yaml")


def test_the_table_has_what_options_variables_and_documentation_need() -> None:
    rows = table(Outer)
    assert list(rows) == [field.name for field in dataclasses.fields(Outer)]
    assert {name: row.option for name, row in rows.items() if name in ("number_of_steps", "is_loud", "share")} == {
        "number_of_steps": "--steps", "is_loud": None, "share": "--share",
    }  # fmt: skip
    assert (rows["limit"].default, rows["limit"].is_optional, rows["share"].is_optional) == (3, True, False)
    assert (rows["colour"].help, rows["colour"].kind.metavar) == ("A colour.", "red|green")
    assert rows["is_loud"].kind.metavar is None, "a switch"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("number_of_steps", "7", 7),
        ("share", "2.5e-1", 0.25),
        ("is_loud", " On ", True),
        ("is_loud", "no", False),
        ("budget", "7700", "7700"),
        ("names", "vae,unet", ("vae", "unet")),
        ("inner", '{"depth": 2}', Inner(2)),
        ("inner", "deep", Inner(9)),
        ("secret", "{not json", "{not json"),
    ],
)
def test_text_of_a_shell_is_read_by_the_kind(name: str, text: str, value: Any) -> None:
    assert table(Outer)[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("number_of_steps", "two", "STEPS='two'; expected a whole number from 1 to 9."),
        ("number_of_steps", "2.5", "STEPS=2.5; expected a whole number"),
        ("is_loud", "maybe", "STEPS='maybe'; expected True or False."),
        ("inner", "[1]", "STEPS='[1]' cannot be read: expected a JSON object"),
        ("inner", '{"depth": 1, "depth": 2}', "cannot be read: 'depth' is given twice; expected a JSON object"),
    ],
)
def test_text_that_stands_for_nothing_is_refused_under_the_name_that_it_has_there(
    name: str, text: str, message: str
) -> None:
    with pytest.raises(SettingError) as caught:
        table(Outer)[name].parse(text, "STEPS")
    assert message in str(caught.value)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("values", "good", "bad"),
    [
        (count(0), [0, 5], [-1, 1.0, True, "1", None]),
        (number(0), [0, 0.5, 1e300], [-0.1, NAN, INF, "1", True, 10**400]),
        (number(0, INF), [0, INF], [-0.1, NAN, -INF]),
        (number(0, above=True), [1e-9], [0, 0.0, INF]),
        (number(1, 2), [1, 2], [0.99, 2.01]),
        (FOLDER, ["/", Path("/")], ["/nowhere", "a\0b", "a" * 5000, {}, 3]),
        (TEXT, ["", "a"], [3, None, b"a"]),
        (TOLERANCE, ["high", "0.1", 0, 3], ["fats", -1, True, NAN, INF, "nan", "-1", None]),
    ],
)
def test_kinds(values: Kind, good: list[Any], bad: list[Any]) -> None:
    assert [values.read(value) for value in good] == good
    for value in bad:
        with pytest.raises(ValueError):  # noqa: PT011 - Its text is a remedy, and mostly there is none.
            values.read(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12GiB", 12 * GIB), ("11.5 GB", 11_500_000_000), ("512 mib", 512 * 2**20), (7700, 7700), ("7700", 7700),
     ("0B", 0), (0, 0), (None, None)],
)  # fmt: skip
def test_sizes_in_bytes(text: str | int | None, expected: int | None) -> None:
    assert parse_bytes(text, "gpu_memory") == expected


@pytest.mark.parametrize("text", ["GiB", "12 Gib/s", "-3GiB", -1, True, "", "12 bananas", 2.5e9, [1]])
def test_what_is_no_size_is_refused_with_its_name(text: Any) -> None:
    with pytest.raises(SettingError, match=r"gpu_memory=.*; expected a size such as '12GiB'.*bytes\.$") as caught:
        parse_bytes(text, "gpu_memory")
    assert caught.value.param == "gpu_memory"


@pytest.mark.parametrize(
    ("value", "meant"),
    [("12", "12GiB"), (24, "24GiB"), ("1024", "1024GiB"), (1.5, "1.5GiB"), ("8g", "8GiB"), ("512 M", "512MiB"),
     ("1.5T", "1.5TiB")],
)  # fmt: skip
def test_a_forgotten_unit_is_offered(value: Any, meant: str) -> None:
    with pytest.raises(SettingError, match=rf"gpu_memory=.*; expected a size.* Did you mean '{meant}'"):
        parse_bytes(value, "gpu_memory")


def test_tolerances_by_number_and_by_name() -> None:
    assert read_tolerance(0.03) == read_tolerance("0.03") == 0.03
    assert read_tolerance(0) == TOLERANCES["exact"] == read_tolerance("exact")
    assert 0 < read_tolerance("high") < read_tolerance("fast")
    with pytest.raises(SettingError, match=r"max_tolerance='fats'; expected .* Did you mean 'fast'\?") as caught:
        read_tolerance("fats", "max_tolerance")
    assert caught.value.param == "max_tolerance"
