"""Where do settings come from? From arguments, then a file, then the environment: the first one that has it wins.

Each source may use vllm-omni's spellings. Unknown names are refused in all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core import aliases
from ..core.errors import SettingError
from ..core.files import brief, check_names, parse_settings, read_mapping

PREFIX = "SAMOVAR_"
NOT_SETTINGS = frozenset({"SAMOVAR_API_KEY"})
"""Variables with our prefix that the engine does not read: the server's key."""

_SET_BY_KUBERNETES = re.compile(
    r"SAMOVAR_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables in every container where a Service is named samovar or samovar-something."""

Reader = Callable[[str], Any]
"""Turns the text of a variable into a value; raises ValueError."""


def gather(arguments: Mapping[str, Any], file: str | Path | None, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """All settings by name. `readers` has every known name."""
    all_readers = {**readers, **{name: _READERS[alias.kind] for name, alias in aliases.ALIASES.items()}}
    in_file = {} if file is None else read_mapping(file, "config")
    in_file.pop("server", None)  # What `samovar serve` alone reads.
    check_names(arguments, all_readers, "a setting of Omni")
    check_names(in_file, all_readers, f"a setting of Omni, in {str(file)!r}")
    settings: dict[str, Any] = {}
    for layer in (from_environment(all_readers), in_file, arguments):
        settings = {**_kept(settings, layer), **_completed(layer, settings)}
    return aliases.resolve(settings)


def _completed(higher: Mapping[str, Any], lower: Mapping[str, Any]) -> dict[str, Any]:
    """What a higher source says, with `defaults` that only a lower one has."""
    both = [layer.get("defaults") for layer in (lower, higher)]
    is_merged = all(isinstance(defaults, Mapping) for defaults in both)
    return {**higher, "defaults": both[0] | both[1]} if is_merged else dict(higher)  # type: ignore[operator]


def _kept(lower: Mapping[str, Any], higher: Mapping[str, Any]) -> dict[str, Any]:
    """What a lower source still says: nothing on a setting that a higher one decides, unless the higher one completes
    it: a cache by its settings, or one degree by another."""
    kept = dict(lower)
    for name in lower:
        setting = aliases.SETTINGS.get(name, name)
        others = {other for other in higher if aliases.SETTINGS.get(other, other) == setting}
        is_completed = {name, *others} <= aliases.DEGREES or (name == "cache_backend" and others == {"cache_config"})
        if name == "cache_config" and others == {"cache_backend"}:
            is_completed = higher["cache_backend"] == lower.get("cache_backend")
        if others and not is_completed:
            del kept[name]
    return kept


def from_environment(readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The settings in variables such as SAMOVAR_CACHE."""
    variables = {f"{PREFIX}{name.upper()}": name for name in readers}
    settings = {}
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS or _is_set_by_kubernetes(variable, text):
            continue
        check_names([variable], variables, "a setting of Omni, in the environment")
        try:
            settings[variables[variable]] = readers[variables[variable]](text)
        except ValueError as error:
            message = f"The variable {variable}={brief(text)} cannot be read: {error}"
            raise SettingError(message, param=variable) from error
    return settings


def _is_set_by_kubernetes(variable: str, text: str) -> bool:
    """SAMOVAR_PORT is an address there; a plain number is the user's mistake and is reported."""
    is_address = variable.endswith("_PORT") and "://" in text
    return is_address or _SET_BY_KUBERNETES.fullmatch(variable) is not None


def read_bool(text: str) -> bool:
    """A yes or no, as people write it in variables."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.strip().lower() not in words:
        raise ValueError("expected 1 or 0, true or false, yes or no, on or off")
    return words[text.strip().lower()]


def read_bool_or_name(text: str) -> bool | str:
    """A yes or no, or else a name."""
    try:
        return read_bool(text)
    except ValueError:
        return text


def read_name_or_json(text: str) -> Any:
    """A name or a file as it is, or settings as JSON."""
    if not text.lstrip().startswith(("{", "[", '"')):
        return text
    try:
        value = parse_settings(text)
    except ValueError as error:
        raise ValueError(f'{error}; expected JSON such as {{"name": value}}, a name or a file') from error
    if not isinstance(value, dict):
        raise ValueError('expected a JSON object, such as {"name": value}, a name or a file')
    return value


_READERS: Mapping[str, Reader] = {"name": str, "bool": read_bool, "int": int, "mapping or file": read_name_or_json}
"""By the kind of an alias."""
