"""Samovar makes diffusion transformers fast and small without touching their code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arch import BlockDeclaration, ModuleDiscovery, SupportsModuleOffload, find_anatomy, register_declaration
    from .cache import (
        EXTRACTOR_REGISTRY,
        AutoConfig,
        CacheContext,
        TeaCacheConfig,
        TeaCacheHook,
        apply_teacache_hook,
        make_cache_backend,
        register_extractor,
    )
    from .compose import AttachConfig, Attached, attach, detach
    from .core.errors import SamovarError
    from .engine import GenerationResult, OmniDiffusionConfig, OmniDiffusionSamplingParams
    from .hooks import BaseState, HookRegistry, ModelHook, StateManager
    from .offload import OffloadConfig, apply_offload
    from .omni import AsyncOmni, Omni
    from .parallel import (
        SequenceParallelConfig,
        SequenceParallelGatherHook,
        SequenceParallelInput,
        SequenceParallelOutput,
        SequenceParallelPartialInput,
        SequenceParallelSplitHook,
        apply_sequence_parallel,
        disable_sequence_parallel_for_model,
        enable_sequence_parallel_for_model,
        remove_sequence_parallel,
    )
    from .trace import probe_anatomy, survey_pipeline
    from .trace.reports import survey

__version__ = "0.1.0"

__all__ = [
    "EXTRACTOR_REGISTRY",
    "AsyncOmni",
    "AttachConfig",
    "Attached",
    "AutoConfig",
    "BaseState",
    "BlockDeclaration",
    "CacheContext",
    "GenerationResult",
    "HookRegistry",
    "ModelHook",
    "ModuleDiscovery",
    "OffloadConfig",
    "Omni",
    "OmniDiffusionConfig",
    "OmniDiffusionSamplingParams",
    "SamovarError",
    "SequenceParallelConfig",
    "SequenceParallelGatherHook",
    "SequenceParallelInput",
    "SequenceParallelOutput",
    "SequenceParallelPartialInput",
    "SequenceParallelSplitHook",
    "StateManager",
    "SupportsModuleOffload",
    "TeaCacheConfig",
    "TeaCacheHook",
    "apply_offload",
    "apply_sequence_parallel",
    "apply_teacache_hook",
    "attach",
    "detach",
    "disable_sequence_parallel_for_model",
    "enable_sequence_parallel_for_model",
    "find_anatomy",
    "make_cache_backend",
    "probe_anatomy",
    "register_declaration",
    "register_extractor",
    "remove_sequence_parallel",
    "survey",
    "survey_pipeline",
]

# Names are looked up when they are first used: importing Samovar loads neither torch nor diffusers.
_ROOMS = ("core.errors", "hooks", "arch", "trace", "cache", "offload", "parallel", "compose", "engine", "omni")


def __getattr__(name: str) -> Any:
    from .core.aliases import CLASSES

    name = CLASSES.get(name, name)
    if name in __all__:
        for room in _ROOMS:
            module = importlib.import_module(f".{room}", __name__)
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
