"""Files and settings are read with errors that name the file or the setting."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import reprlib
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from .errors import ModelError, SamovarError, SettingError, nearest

INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"
"""The file by which a folder is that of a pipeline, and of a modular one."""
_MAX_BYTES_OF_JSON, _MAX_BYTES_OF_SETTINGS = 256 * 2**20, 4 * 2**20
"""The largest tokenizers are files of some 40 MiB, and tuned settings of some 100 KiB."""
_TOO_DEEP, _MAX_LEVELS = "it is nested too deeply", 64
_MAX_BITS = 400
"""Of a number whose digits are shown."""


class _Brief(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= _MAX_BITS else f"a number of {x.bit_length()} bits"


_brief = _Brief()
_brief.maxstring = _brief.maxother = 200


def brief(value: Any) -> str:
    """A value for a message, cut short: what is wrong may be of any size."""
    return _brief.repr(value)


def index_file(folder: Path) -> Path:
    """Where the index of a pipeline's folder is, or should be."""
    is_modular = (folder / MODULAR_INDEX).is_file() and not (folder / INDEX).is_file()
    return folder / (MODULAR_INDEX if is_modular else INDEX)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file that comes with a model."""
    content = parse_json(file)
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content


def parse_json(file: Path) -> Any:
    """Whatever JSON is in a file that comes with a model. NaN and Infinity are understood: some configurations have
    them, and other libraries read them so."""
    try:
        return json.loads(_read_text(file, _MAX_BYTES_OF_JSON))
    except (ValueError, RecursionError) as error:
        why = _TOO_DEEP if isinstance(error, RecursionError) else error
        raise ModelError(f"{file} is not valid JSON: {why}") from error


@contextlib.contextmanager
def reading(what: str, done: str = "loaded", remedy: str = "Check its files.") -> Iterator[None]:
    """Name what was read if another library fails over it: files of a model can be wrong in any way, and each gives
    another error there."""
    try:
        yield
    except SamovarError:
        raise
    except ImportError as error:  # Such as the library by which a part is quantised.
        raise ModelError(f"{what} needs a package that is not installed: {first_line(error)}") from error
    except BaseException as error:
        if not isinstance(error, Exception):
            raise  # Ctrl-C.
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        raise ModelError(f"{what} cannot be {done}: {kind}{first_line(error)} {remedy}") from error


@contextlib.contextmanager
def heard(logger: str) -> Iterator[list[str]]:
    """The warnings of another library inside, which nobody else hears: some of what is wrong, it says there alone."""
    said: list[str] = []
    log, handler = logging.getLogger(logger), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    before = log.level, log.handlers, log.propagate
    log.setLevel(logging.WARNING)
    log.handlers, log.propagate = [handler], False
    try:
        yield said
    finally:
        log.setLevel(before[0])
        log.handlers, log.propagate = before[1:]


def first_line(error: Exception) -> str:
    """What an error of another library says in short, as a sentence."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:1000].rstrip(".") + "."


@contextlib.contextmanager
def naming(file: Any) -> Iterator[None]:
    """Name the file, if there is one, in errors about settings that were read from it."""
    try:
        yield
    except SettingError as error:
        if file is None or str(file) in str(error):
            raise
        raise SettingError(f"In {str(file)!r}: {error}", param=error.param) from error


def check_names(given: Iterable[str], known: Iterable[str], what: str, param: str | None = None) -> None:
    """Refuse the first unknown name, and suggest the nearest known one. The parameter at fault is `param`, or else the
    unknown name itself."""
    names = list(known)
    for name in given:
        if name not in names:
            hint = nearest(str(name), names)
            raise SettingError(f"{brief(name)} is not {what}. {hint}", param=param or str(name)[:100])


def is_file_name(value: Any) -> bool:
    """Whether a setting that may be a name or a file is a file."""
    if isinstance(value, Path):
        return True
    return isinstance(value, str) and (value.endswith((".json", ".yaml", ".yml")) or os.sep in value)


def is_folder(value: Any) -> bool:
    """Whether this is the path of a folder that is there."""
    try:
        return isinstance(value, (str, Path)) and Path(value).is_dir()
    except (OSError, ValueError):  # Too long, or with a NUL.
        return False


def read_settings(file: str | Path, param: str) -> dict[str, Any]:
    """The settings in a JSON or YAML file: those under the name of the parameter if it is there, else all."""
    content = read_mapping(file, param)
    settings = content.get(param, content)
    if not isinstance(settings, dict):
        message = f"{str(file)!r} must hold settings by name under {param!r}, not {brief(settings)}."
        raise SettingError(message, param=param)
    return settings


def read_mapping(file: str | Path, param: str) -> dict[str, Any]:
    """The mapping in a JSON or YAML file."""
    path = Path(file)
    parse = {".json": parse_settings, ".yaml": parse_yaml, ".yml": parse_yaml}.get(path.suffix.lower())
    if parse is None:
        raise SettingError(f"{param}: {str(path)!r} must end in .json, .yaml or .yml.", param=param)
    try:
        content = parse(_read_text(path.expanduser(), _MAX_BYTES_OF_SETTINGS))
    except (OSError, ValueError, RuntimeError) as error:  # The last for the home of an unknown user.
        raise SettingError(f"{param}: {str(path)!r} cannot be read: {error}", param=param) from error
    if not isinstance(content, (dict, type(None))):
        raise SettingError(f"{str(path)!r} must hold settings by name, such as `model: emoji`.", param=param)
    return content or {}


def parse_settings(text: str) -> Any:
    """Settings as JSON: without NaN, and with each name once. Raises ValueError."""
    return _flat(lambda: json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant))


def parse_yaml(text: str) -> Any:
    """Settings as YAML: with each name once, and without aliases, by which a short text stands for more values than
    memory holds. Raises ValueError."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"it has the alias *{self.peek_event().anchor}; write out what that stands for")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _unique([(key.value, None) for key, _ in node.value if isinstance(key.value, str)])
            return super().construct_mapping(node, deep)

    try:
        return _flat(lambda: yaml.load(text, Loader))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (LookupError, AttributeError, TypeError) as error:  # Such as for `!!bool x`.
        raise ValueError(f"a value is not what its tag says ({error})") from error


def _flat(parse: Callable[[], Any]) -> Any:
    """What is parsed, unless it is nested too deeply."""
    try:
        value = parse()
        if _levels(value) > _MAX_LEVELS:
            raise RecursionError
        return value
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _levels(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_levels, children), default=0)


def _read_text(path: Path, most_bytes: int) -> str:
    """The text of a file of limited size. Not of a pipe or a device, which may never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if found.st_size > most_bytes:
        raise ValueError(f"it has {found.st_size} bytes, and {most_bytes} are the most")
    return path.read_text(encoding="utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object with each name once: of two, one would be ignored."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{brief(name)} is given twice")
        found[name] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
