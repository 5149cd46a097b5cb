"""How are files and settings read? With errors that name the file or the setting."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .errors import ModelError, SettingError, nearest

Config = TypeVar("Config")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file that comes with a model."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content


def read_config(cls: type[Config], value: Any, param: str) -> Config:
    """A settings dataclass from an instance of it, a mapping, or a file that holds one."""
    if isinstance(value, cls):
        return value
    if is_file_name(value):
        with naming(value):
            return read_config(cls, read_settings(value, param), param)
    if not isinstance(value, Mapping):
        raise SettingError(
            f"{param}={value!r}; expected the settings of {cls.__name__}: an object of it, a mapping, or a file.",
            param=param,
        )
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    check_names(value, known, f"a setting of {param}")
    return cls(**value)


@contextlib.contextmanager
def naming(file: Any) -> Iterator[None]:
    """Name the file in errors about settings that were read from it."""
    try:
        yield
    except SettingError as error:
        if str(file) in str(error):
            raise
        raise SettingError(f"In {str(file)!r}: {error}", param=error.param) from error


def check_names(given: Iterable[str], known: Iterable[str], what: str, param: str | None = None) -> None:
    """Refuse the first unknown name, and suggest the nearest known one. The parameter at fault is `param`, or else the
    unknown name itself."""
    names = list(known)
    for name in given:
        if name not in names:
            raise SettingError(f"{name!r} is not {what}. {nearest(str(name), names)}", param=param or str(name))


def is_file_name(value: Any) -> bool:
    """Whether a setting that may be a name or a file is a file."""
    if isinstance(value, Path):
        return True
    return isinstance(value, str) and (value.endswith((".json", ".yaml", ".yml")) or os.sep in value)


def read_settings(file: str | Path, param: str) -> dict[str, Any]:
    """The settings in a JSON or YAML file: those under the name of the parameter if it is there, else all."""
    content = read_mapping(file, param)
    settings = content.get(param, content)
    if not isinstance(settings, dict):
        raise SettingError(f"{str(file)!r} must hold settings by name under {param!r}, not {settings!r}.", param=param)
    return settings


def read_mapping(file: str | Path, param: str) -> dict[str, Any]:
    """The mapping in a JSON or YAML file."""
    path = Path(file).expanduser()
    if path.suffix.lower() not in (".json", ".yaml", ".yml"):
        raise SettingError(f"{param}: {str(path)!r} must end in .json, .yaml or .yml.", param=param)
    try:
        content = _parse(path)
    except (OSError, ValueError) as error:
        raise SettingError(f"{param}: {str(path)!r} cannot be read: {error}", param=param) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingError(f"{str(path)!r} must hold settings by name, such as `model: emoji`.", param=param)
    return content


def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix.lower() == ".json":
        return json.loads(text)
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
