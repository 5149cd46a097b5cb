"""How do a cache, offload, several ranks and a compiler go on one pipeline together? `attach(pipe, ...)`."""

from ..cache import CacheSetting
from .attached import Attached, attach, detach
from .config import AttachConfig, OffloadSetting, ParallelSetting
from .explain import Explanation
from .vae import tiled_if_needed

__all__ = [
    "AttachConfig",
    "Attached",
    "CacheSetting",
    "Explanation",
    "OffloadSetting",
    "ParallelSetting",
    "attach",
    "detach",
    "tiled_if_needed",
]
