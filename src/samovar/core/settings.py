"""The table of settings: each is declared once, with its type, default, check and help.

A class of settings is a frozen dataclass whose fields are declared by `setting`:

    @dataclass(frozen=True)
    class GraphsConfig(Settings, param="compile"):
        max_graphs: int = setting(16, count(1), "Most graphs that are kept of each denoiser.")

Making one checks every field, and then what `check` says of several fields together. `GraphsConfig.read` takes an
object, a mapping or a file. Options of the shell, environment variables and the tables of the documentation are made
from `table(GraphsConfig)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, get_args

from .errors import SettingError, nearest
from .files import brief, check_names, is_file_name, is_folder, naming, parse_settings, read_settings

MAX_NUMBER = sys.float_info.max


class Kind(NamedTuple):
    """The values that a setting takes."""

    expected: str
    """In words, for messages."""
    read: Callable[[Any], Any]
    """Returns the value as it is kept. Raises ValueError, whose text may add a remedy, or a SettingError."""
    parse: Callable[[str], Any] = str
    """Returns the value that text from a shell or a variable stands for, before it is read. Raises ValueError."""
    metavar: str | None = "VALUE"
    """How the help of an option shows it; None for a switch."""


def read_as(kind: Kind, value: Any, param: str, name: str = "") -> Any:
    """The value as this kind keeps it; SettingError for another one, which is called `name`, or else as the setting."""
    try:
        return kind.read(value)
    except SettingError:
        raise
    except ValueError as error:
        message = f"{name or param}={brief(value)}; expected {kind.expected}. {error}"
        raise SettingError(message.rstrip(), param=param) from None


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    default: Any
    kind: Kind
    help: str
    """Sentences. The first one alone is the help of the option."""
    is_optional: bool
    """Whether None is accepted."""
    option: str | None
    """The option of the shell; None if there is none."""

    def read(self, value: Any, name: str = "") -> Any:
        """The value as it is kept."""
        return None if value is None and self.is_optional else read_as(self.kind, value, self.name, name)

    def parse(self, text: str, name: str = "") -> Any:
        """The same from text, as a shell or a variable has it."""
        try:
            value = self.kind.parse(text)
        except ValueError as error:
            message = f"{name or self.name}={brief(text)} cannot be read: {error}"
            raise SettingError(message, param=self.name) from error
        return self.read(value, name)


def setting(
    default: Any, kind: Kind, help: str, *, optional: bool = False, option: str | None = "", **field: Any
) -> Any:
    """Declare a field of a class of settings. None is accepted if it is the default, or with `optional`. A default that
    is a type is called for each object. The option is `--` and the name unless `option` says otherwise; None is no
    option. `field` is for `dataclasses.field`, such as repr=False."""
    kept = {"default_factory": default} if isinstance(default, type) else {"default": default}
    row = Setting("", None, kind, help, optional or default is None, option)
    return dataclasses.field(**kept, **field, metadata={"setting": row})


class Settings:
    """Base of all classes of settings."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    param: ClassVar[str] = "settings"
    """What these settings are called together in messages, and the key under which a file may have them."""

    def __init_subclass__(cls, param: str = "") -> None:
        cls.param = param or cls.__name__

    def __post_init__(self) -> None:
        for row in table(type(self)).values():
            object.__setattr__(self, row.name, row.read(getattr(self, row.name)))
        self.check()

    def check(self) -> None:
        """Refuse settings that contradict each other. Each alone has been read."""

    @classmethod
    def read(cls, value: Any) -> Self:
        """Settings from an object of the class, a mapping, or a JSON or YAML file; None means the defaults."""
        if isinstance(value, cls):
            return value
        if is_file_name(value):
            with naming(value):
                return cls.read(read_settings(value, cls.param))
        if isinstance(value, str):
            return cls.from_name(value)
        if value is not None and not isinstance(value, Mapping):
            raise cls.refusal(value)
        check_names(value or (), table(cls), f"a setting of {cls.param}")
        return cls(**(value or {}))

    @classmethod
    def from_name(cls, name: str) -> Self:
        """Settings that have a name of their own. By default there are none."""
        raise cls.refusal(name)

    @classmethod
    def refusal(cls, value: Any) -> SettingError:
        """The error for what are no such settings."""
        return SettingError(f"{cls.param}={brief(value)}; expected {settings_of(cls).expected}.", param=cls.param)


def table(cls: type[Settings]) -> Mapping[str, Setting]:
    """The settings of a class by name, in the order of their declaration."""
    rows: dict[str, Setting] = {}
    for field in dataclasses.fields(cls):
        if "setting" in field.metadata:
            row, usual = field.metadata["setting"], f"--{field.name.replace('_', '-')}"
            default = None if field.default is dataclasses.MISSING else field.default
            option = usual if row.option == "" else row.option
            rows[field.name] = row._replace(name=field.name, default=default, option=option)
    return rows


# ------------------------------------------------------------------------------------------------ kinds


def kind(expected: str, is_fit: Callable[[Any], bool], **more: Any) -> Kind:
    """Values that pass a test. They are kept as they are. `more` are other fields of `Kind`."""

    def read(value: Any) -> Any:
        if not is_fit(value):
            raise ValueError
        return value

    return Kind(expected, read, **more)


def is_number(value: Any) -> bool:
    """Whether this is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parse_number(text: Any) -> Any:
    """The number that text stands for; anything else as it is."""
    for number_type in (int, float) if isinstance(text, str) else ():
        with contextlib.suppress(ValueError):
            return number_type(text)
    return text


def count(least: int = 0, most: int | None = None) -> Kind:
    """Whole numbers between two bounds, which are included."""
    expected = f"a whole number, {least} or more" if most is None else f"a whole number from {least} to {most}"
    top = math.inf if most is None else most
    return kind(expected, lambda value: type(value) is int and least <= value <= top, parse=parse_number, metavar="N")


def number(least: float = 0, most: float = MAX_NUMBER, *, above: bool = False, below: bool = False) -> Kind:
    """Numbers between two bounds. `above` and `below` leave out the lower and the upper one. NaN is refused."""
    expected = f"a number above {least:g}" if above else f"a number, {least:g} or more"
    if most < MAX_NUMBER:
        expected = f"a number {'above' if above else 'from'} {least:g} to {'below ' * below}{most:g}"

    def is_fit(value: Any) -> bool:
        return is_number(value) and least <= value <= most and value not in [least] * above + [most] * below

    return kind(expected, is_fit, parse=parse_number, metavar="X")


def choice(names: Any) -> Kind:
    """One of some names, or of those of a Literal type."""
    known: Sequence[str] = get_args(names) or tuple(names)

    def read(value: Any) -> Any:
        if isinstance(value, str) and value in known:
            return value
        raise ValueError(similar(value, known))

    return Kind(f"one of {', '.join(map(repr, known))}", read, metavar="|".join(known))


def similar(value: Any, known: Iterable[str]) -> str:
    """A hint for a misspelt name; empty if none is like it."""
    hint = nearest(str(value), known)
    return hint if hint.startswith("Did") else ""


def settings_of(cls: type[Settings]) -> Kind:
    """The settings of another class."""
    expected = f"the settings of {cls.__name__}: an object of it, a mapping, or a file"
    return Kind(expected, cls.read, parse_name_or_json, "SETTING")


def parse_flag(text: str) -> bool | str:
    """A yes or no, as people write it in variables; other text as it is."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return words.get(text.strip().lower(), text)


def parse_name_or_json(text: str) -> Any:
    """A name or a file as it is, or settings as a JSON object."""
    if not text.lstrip().startswith(("{", "[", '"')):
        return text
    expected = 'expected a JSON object, such as {"name": value}, a name or a file'
    try:
        value = parse_settings(text)
    except ValueError as error:
        raise ValueError(f"{error}; {expected}") from error
    if not isinstance(value, dict):
        raise ValueError(expected)
    return value


def _read_names(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError
    return tuple(name.strip() for name in names)


FLAG = kind("True or False", lambda value: isinstance(value, bool), parse=parse_flag, metavar=None)
TEXT = kind("text", lambda value: isinstance(value, str), metavar="TEXT")
NAMES = Kind("names, as a list or with commas", _read_names, metavar="NAMES")
FOLDER = kind("a folder that exists", is_folder, metavar="FOLDER")
SETTING = Kind("a name, settings, or a file", lambda value: value, parse_name_or_json, "SETTING")
"""Anything: the class that has the setting checks it."""


# ------------------------------------------------------------------------------------------------ sizes and tolerances

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_MAX_WITHOUT_UNIT = 1024
"""A whole number from 1 to this is a size whose unit was forgotten."""
TOLERANCES: Mapping[str, float] = {"exact": 0.0, "high": 0.02, "fast": 0.06}
"""Maximum relative error of the sample by the skipped steps of one gap."""


def _read_size(value: Any) -> int:
    size = parse_number(value)
    if type(size) is int and (size == 0 or size > _MAX_WITHOUT_UNIT):
        return size
    match = _SIZE.fullmatch(brief(value).strip("' "))
    if match is None:
        raise ValueError
    figure, prefix, binary, unit = match.groups()
    if unit and (prefix or not binary):
        return int(float(figure) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    is_near = not binary and float(figure) <= _MAX_WITHOUT_UNIT
    raise ValueError(f"Did you mean '{figure}{(prefix or 'g').upper()}iB'?" if is_near else "")


def _read_tolerance(value: Any) -> float:
    if isinstance(value, str) and value in TOLERANCES:
        return TOLERANCES[value]
    found = parse_number(value)
    if is_number(found) and 0 <= found < math.inf:
        return float(found)
    raise ValueError(similar(value, TOLERANCES))


_BYTES = Kind("a size such as '12GiB', or a number of bytes", _read_size, metavar="SIZE")
_NUMBER = Kind(f"a number, 0 or more, or one of {', '.join(map(repr, TOLERANCES))}", _read_tolerance, metavar="X")
SIZE = _BYTES._replace(read=lambda value: (_read_size(value), value)[1])
TOLERANCE = _NUMBER._replace(read=lambda value: (_read_tolerance(value), value)[1])


def parse_bytes(value: str | int | None, param: str) -> int | None:
    """Bytes from a number, or from text such as "12GiB" or "11.5 GB"; None stays None."""
    found: int | None = None if value is None else read_as(_BYTES, value, param)
    return found


def read_tolerance(value: Any, param: str = "tolerance") -> float:
    """The number that a tolerance stands for; it may be written out, as on a command line."""
    found: float = read_as(_NUMBER, value, param)
    return found
