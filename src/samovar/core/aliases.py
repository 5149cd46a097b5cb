"""vllm-omni's spellings of settings, and what they stand for. Nothing else in the project knows them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

from .errors import SettingError
from .files import check_names, is_file_name, read_settings
from .settings import FLAG, SETTING, TEXT, Kind, count, read_as

Config = TypeVar("Config")


class Alias(NamedTuple):
    """One of vllm-omni's settings."""

    setting: str
    """Our setting that it becomes, or becomes part of."""
    kind: Kind


class AliasArguments(TypedDict, total=False):
    """All of them, for type checkers, each with the setting that it stands for."""

    cache_backend: Annotated[str, "cache"]
    cache_adapter: Annotated[str, "cache"]
    cache_config: Annotated[Any, "cache"]
    enable_cpu_offload: Annotated[bool, "offload"]
    enable_layerwise_offload: Annotated[bool, "offload"]
    parallel_config: Annotated[Any, "parallel"]
    ulysses_degree: Annotated[int, "parallel"]
    ring_degree: Annotated[int, "parallel"]
    allgather_degree: Annotated[int, "parallel"]
    cfg_parallel_size: Annotated[int, "parallel"]
    enforce_eager: Annotated[bool, "compile"]


_KINDS: Mapping[Any, Kind] = {str: TEXT, Any: SETTING, bool: FLAG, int: count()}
ALIASES: Mapping[str, Alias] = {
    name: Alias(hint.__metadata__[0], _KINDS[hint.__origin__])
    for name, hint in get_type_hints(AliasArguments, include_extras=True).items()
}
CLASSES: Mapping[str, str] = {"DiffusionParallelConfig": "SequenceParallelConfig"}
"""Classes of `samovar` that have another name there."""


def resolve(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with every alias replaced by the setting it stands for."""
    resolved, aliases = dict(settings), dict[str, dict[str, Any]]()
    for name in ALIASES.keys() & settings.keys():
        aliases.setdefault(ALIASES[name].setting, {})[name] = resolved.pop(name)
    for setting, given in aliases.items():
        if setting in resolved:
            names = ", ".join(sorted(given))
            raise SettingError(f"{setting} and {names} were both given. Give {setting} only.", param=setting)
        resolved[setting] = _RESOLVERS[setting](given)
    return resolved


def accept_aliases(cls: type[Config]) -> type[Config]:
    """Let a settings dataclass be built with aliases too. Unknown names are refused with the nearest known one."""
    build = cls.__init__

    @functools.wraps(build)
    def __init__(self: Config, *args: Any, **settings: Any) -> None:
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        check_names(settings, [*known, *ALIASES], f"a setting of {cls.__name__}")
        build(self, *args, **resolve(settings))

    cls.__init__ = __init__  # type: ignore[method-assign, assignment]
    return cls


def _cache(given: Mapping[str, Any]) -> Any:
    config, adapter = given.get("cache_config"), given.get("cache_adapter")
    backend = given.get("cache_backend") or adapter
    if adapter not in (None, backend):
        message = f"cache_adapter={adapter!r} and cache_backend={backend!r} contradict each other. Give one of them."
        raise SettingError(message, param="cache_adapter")
    if config is None or backend is None:
        return backend or config
    if is_file_name(config):
        saved = read_settings(config, "cache")
        if saved.get("backend") == backend:
            return config  # As a file, which may also hold the steps that it was tuned for.
        if "backend" in saved:
            raise SettingError(
                f"{str(config)!r} is for the cache {saved['backend']!r}, not {backend!r}. Leave out cache_backend.",
                param="cache_backend",
            )
        config = saved
    if not isinstance(config, Mapping):
        expected = "a mapping such as {'rel_l1_thresh': 0.2}, or a file with one"
        raise SettingError(f"cache_config={config!r}; expected {expected}.", param="cache_config")
    return {**config, "backend": backend}


def _offload(given: Mapping[str, Any]) -> str | None:
    modes = {"enable_cpu_offload": "model", "enable_layerwise_offload": "layerwise"}
    chosen = [modes[name] for name, value in given.items() if read_as(FLAG, value, name)]
    if len(chosen) > 1:
        raise SettingError(
            "enable_cpu_offload and enable_layerwise_offload exclude each other: either whole components take turns, "
            "or their blocks stream. Choose one, or give gpu_memory alone, which chooses for you.",
            param="enable_cpu_offload",
        )
    return next(iter(chosen), None)


def _parallel(given: Mapping[str, Any]) -> Any:
    others = ", ".join(sorted(given.keys() - {"parallel_config"}))
    if "parallel_config" in given and others:
        message = f"parallel_config and {others} were both given. Put {others} into parallel_config."
        raise SettingError(message, param="parallel_config")
    return given.get("parallel_config", given)


_RESOLVERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "cache": _cache,
    "offload": _offload,
    "parallel": _parallel,
    "compile": lambda given: False,  # What is not compiled runs eagerly.
}
