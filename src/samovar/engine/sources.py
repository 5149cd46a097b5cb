"""Settings from arguments, then a file, then the environment: the first one that has it wins.

Each source may use vllm-omni's spellings. Unknown names are refused in all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import aliases
from ..core.errors import SettingError
from ..core.files import brief, check_names, read_mapping
from ..core.settings import Kind, Setting

PREFIX = "SAMOVAR_"
NOT_SETTINGS = frozenset({"SAMOVAR_API_KEY"})
"""Variables with our prefix that the engine does not read: the server's key."""

_SET_BY_KUBERNETES = re.compile(
    r"SAMOVAR_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables in every container where a Service is named samovar or samovar-something."""


def gather(arguments: Mapping[str, Any], file: str | Path | None, rows: Mapping[str, Setting]) -> dict[str, Any]:
    """All settings by name; `rows` are those that there are."""
    kinds = {name: row.kind for name, row in rows.items()} | {
        name: alias.kind for name, alias in aliases.ALIASES.items()
    }
    in_file = {} if file is None else read_mapping(file, "config")
    in_file.pop("server", None)  # What `samovar serve` alone reads.
    check_names(arguments, kinds, "a setting of Omni")
    check_names(in_file, kinds, f"a setting of Omni, in {str(file)!r}")
    settings: dict[str, Any] = {}
    for layer in map(aliases.resolve, (from_environment(kinds), in_file, arguments)):
        before, now = settings.get("defaults"), layer.get("defaults")
        settings |= layer
        if isinstance(before, Mapping) and isinstance(now, Mapping):  # They complete each other.
            settings["defaults"] = {**before, **now}
    return settings


def from_environment(kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The settings in variables such as SAMOVAR_CACHE."""
    variables = {f"{PREFIX}{name.upper()}": name for name in kinds}
    settings = {}
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS or _is_set_by_kubernetes(variable, text):
            continue
        check_names([variable], variables, "a setting of Omni, in the environment")
        try:
            settings[variables[variable]] = kinds[variables[variable]].parse(text)
        except ValueError as error:
            message = f"The variable {variable}={brief(text)} cannot be read: {error}"
            raise SettingError(message, param=variable) from error
    return settings


def _is_set_by_kubernetes(variable: str, text: str) -> bool:
    """SAMOVAR_PORT is an address there; a plain number is the user's mistake and is reported."""
    is_address = variable.endswith("_PORT") and "://" in text
    return is_address or _SET_BY_KUBERNETES.fullmatch(variable) is not None
