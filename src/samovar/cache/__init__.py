"""Skips denoising steps: `auto`, TeaCache, saved schedules, and other backends by name."""

from .auto import tolerating
from .backend import (
    CACHE_BACKENDS,
    CacheBackend,
    CacheChoice,
    CacheSetting,
    PipelineStats,
    TeaCacheBackend,
    cache_names,
    make_cache_backend,
    register_cache_backend,
)
from .config import AutoConfig, CacheConfig, TeaCacheConfig
from .extractors import EXTRACTOR_REGISTRY, CacheContext, register_extractor
from .hook import TeaCacheHook, apply_teacache_hook
from .run import TeaCacheState
from .stats import BranchStats, CacheStats, StepRecord
from .tuned import TunedFor

__all__ = [
    "CACHE_BACKENDS",
    "EXTRACTOR_REGISTRY",
    "AutoConfig",
    "BranchStats",
    "CacheBackend",
    "CacheChoice",
    "CacheConfig",
    "CacheContext",
    "CacheSetting",
    "CacheStats",
    "PipelineStats",
    "StepRecord",
    "TeaCacheBackend",
    "TeaCacheConfig",
    "TeaCacheHook",
    "TeaCacheState",
    "TunedFor",
    "apply_teacache_hook",
    "cache_names",
    "make_cache_backend",
    "register_cache_backend",
    "register_extractor",
    "tolerating",
]
