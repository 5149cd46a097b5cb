"""Where do settings come from? From arguments, then from a file, then from the environment: the first that says
something wins. A name that is not known is refused wherever it stands."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingError, nearest

PREFIX = "SAMOVAR_"
OF_OTHERS = frozenset({"SAMOVAR_API_KEY"})
"""Variables that are no settings of the engine: the key of the server."""

_OF_KUBERNETES = re.compile(r"SAMOVAR_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""What it puts into every container where a Service is named samovar, or samovar-something."""


def gather(
    arguments: Mapping[str, Any], file: str | Path | None, readers: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    """All settings by name. `readers` has every known name, with what makes a value of the text of a variable."""
    check_names(arguments, readers, "setting of Omni")
    settings: dict[str, Any] = {}
    for layer in (from_environment(readers), from_file(file, readers), arguments):
        settings = {**_kept(settings, layer), **layer}
    return settings


def _kept(lower: Mapping[str, Any], higher: Mapping[str, Any]) -> dict[str, Any]:
    """What lower settings say that goes with higher ones: nothing about another cache, or another way to offload."""
    kept = dict(lower)
    if "cache_backend" in higher:
        chosen = higher["cache_backend"]
        if chosen in (None, "", "none") or kept.get("cache_backend", chosen) != chosen:
            kept.pop("cache_config", None)
    for name, other in (("cpu", "layerwise"), ("layerwise", "cpu")):
        if higher.get(f"enable_{name}_offload") is True:
            kept.pop(f"enable_{other}_offload", None)
    return kept


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse the first name that is not known, with the nearest one that is."""
    names = list(known)
    for name in given:
        if name not in names:
            raise SettingError(f"{name!r} is no {what}. {nearest(str(name), names)}")


def from_file(file: str | Path | None, known: Iterable[str]) -> dict[str, Any]:
    """The settings in a YAML or JSON file."""
    if file is None:
        return {}
    path = Path(file).expanduser()
    try:
        content = _parsed(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"The settings in {str(path)!r} cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingError(f"{str(path)!r} must hold settings by name, such as `model: emoji`, not {content!r}.")
    check_names(content, known, f"setting of Omni, in {str(path)!r}")
    return content


def _parsed(path: Path, text: str) -> Any:
    if path.suffix.lower() == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise SettingError(f"{str(path)!r} is no JSON: {error}") from error
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise SettingError(f"{str(path)!r} must end in .yaml, .yml or .json, so that it is clear how to read it.")
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingError(f"{str(path)!r} is no YAML: {error}") from error


def from_environment(readers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """The settings in variables such as SAMOVAR_CACHE_BACKEND."""
    variables = {f"{PREFIX}{name.upper()}": name for name in readers}
    settings = {}
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX) or variable in OF_OTHERS or _is_of_kubernetes(variable, text):
            continue
        check_names([variable], variables, "setting of Omni, in the environment")
        try:
            settings[variables[variable]] = readers[variables[variable]](text)
        except ValueError as error:
            raise SettingError(f"The variable {variable}={text!r} cannot be read: {error}") from error
    return settings


def _is_of_kubernetes(variable: str, text: str) -> bool:
    """SAMOVAR_PORT is an address there; a mere number is a mistake of the user's, who is to know."""
    is_address = variable.endswith("_PORT") and "://" in text
    return is_address or _OF_KUBERNETES.fullmatch(variable) is not None


def read_bool(text: str) -> bool:
    """A yes or no, as people write it in variables."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.strip().lower() not in words:
        raise ValueError("expected 1 or 0, true or false, yes or no, on or off")
    return words[text.strip().lower()]


def read_mapping_or_file(text: str) -> dict[str, Any] | str:
    """Settings as JSON, or the name of a file that holds them."""
    if not text.lstrip().startswith(("{", "[", '"')):
        return text
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f'{error}; expected JSON such as {{"name": value}}, or a file') from error
    if not isinstance(value, dict):
        raise ValueError('expected a JSON object, such as {"name": value}, or a file')
    return value
