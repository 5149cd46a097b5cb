"""How is the package cache-dit used as one backend among others?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..arch import ModuleDiscovery
from ..errors import SettingError, nearest
from ..other_libraries import has_cache_dit


class CacheDitBackend:
    """cache-dit's DBCache. Its settings are those of its own `DBCacheConfig`."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        try:
            import cache_dit  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError as error:
            raise SettingError(
                "cache_backend='cache_dit' needs the package cache-dit, which is not installed: pip install cache-dit. "
                "Ours needs nothing: cache_backend='tea_cache'."
            ) from error
        if settings is not None and not isinstance(settings, Mapping):
            raise SettingError(f"cache_config={settings!r}; a mapping such as {{'Fn_compute_blocks': 8}} was expected.")
        known = [field.name for field in dataclasses.fields(cache_dit.DBCacheConfig)]
        for name in settings or {}:
            if name not in known:
                raise SettingError(f"cache_dit has no setting {name!r}. {nearest(str(name), known)}")
        self._package: Any = cache_dit
        self._config: Any = cache_dit.DBCacheConfig(**(settings or {}))
        self._enabled: list[Any] = []

    def enable(self, pipeline: Any) -> None:
        denoisers = [] if isinstance(pipeline, torch.nn.Module) else ModuleDiscovery.discover(pipeline).dits
        if any(map(has_cache_dit, (pipeline, *denoisers))):
            raise SettingError(
                f"cache-dit is on this {type(pipeline).__name__} already, or on another of its class, on which the "
                "package writes. Disable that first."
            )
        self._package.enable_cache(pipeline, cache_config=dataclasses.replace(self._config))
        self._enabled.append(pipeline)

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        denoisers = [pipeline] if isinstance(pipeline, torch.nn.Module) else ModuleDiscovery.discover(pipeline).dits
        for denoiser in denoisers:
            self._package.refresh_context(denoiser, num_inference_steps=num_inference_steps)

    def disable(self, pipeline: Any) -> None:
        if any(pipeline is other for other in self._enabled):
            self._package.disable_cache(pipeline)
            self._enabled = [other for other in self._enabled if other is not pipeline]

    def stats(self) -> Any:
        return [stats for pipeline in self._enabled for stats in self._package.summary(pipeline, logging=False)]
