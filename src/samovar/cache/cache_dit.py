"""The package cache-dit as a backend."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..arch import ModuleDiscovery
from ..core.errors import SettingError
from ..core.files import check_names
from ..core.interop import has_cache_dit
from ..hooks import Handle


class CacheDitBackend:
    """cache-dit's DBCache. Its settings are those of its own `DBCacheConfig`."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        try:
            import cache_dit  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError as error:
            raise SettingError(
                "cache='cache_dit' needs the package cache-dit, which is not installed: pip install cache-dit. Or use "
                "cache='tea_cache', which needs nothing.",
                param="cache",
            ) from error
        known = [field.name for field in dataclasses.fields(cache_dit.DBCacheConfig)]
        check_names(settings or {}, known, "a setting of the cache 'cache_dit'")
        self._package: Any = cache_dit
        self._config: Any = cache_dit.DBCacheConfig(**(settings or {}))
        self._enabled: list[Any] = []

    def enable(self, pipeline: Any) -> Handle:
        denoisers = [] if isinstance(pipeline, torch.nn.Module) else ModuleDiscovery.discover(pipeline).dits
        if any(map(has_cache_dit, (pipeline, *denoisers))):
            raise SettingError(
                f"cache-dit is already on this {type(pipeline).__name__}, or on another of its class (it patches the "
                "class). Call cache_dit.disable_cache first.",
                param="cache",
            )
        self._package.enable_cache(pipeline, cache_config=dataclasses.replace(self._config))
        self._enabled.append(pipeline)
        undo = contextlib.ExitStack()
        undo.callback(self._enabled.remove, pipeline)
        undo.callback(self._package.disable_cache, pipeline)
        return Handle(undo)

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        denoisers = [pipeline] if isinstance(pipeline, torch.nn.Module) else ModuleDiscovery.discover(pipeline).dits
        for denoiser in denoisers:
            self._package.refresh_context(denoiser, num_inference_steps=num_inference_steps)

    def stats(self) -> Any:
        return [stats for pipeline in self._enabled for stats in self._package.summary(pipeline, logging=False)]
