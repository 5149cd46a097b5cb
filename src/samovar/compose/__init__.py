"""A cache, offload, several ranks and a compiler on one pipeline: `attach(pipe, ...)`."""

from ..cache import CacheSetting
from .attached import Attached, AttachedStats, attach, detach
from .config import AttachConfig, CompileSetting, OffloadSetting, ParallelSetting
from .explain import Explanation
from .vae import tiled_if_needed

__all__ = [
    "AttachConfig",
    "Attached",
    "AttachedStats",
    "CacheSetting",
    "CompileSetting",
    "Explanation",
    "OffloadSetting",
    "ParallelSetting",
    "attach",
    "detach",
    "tiled_if_needed",
]
