"""Splits a sequence, or the branches of guidance, over ranks."""

from ..core.errors import RankError, ShardingError, StrategyError
from .cfg import CfgParallelHook, apply_cfg_parallel
from .enable import (
    Sharding,
    apply_sequence_parallel,
    disable_sequence_parallel_for_model,
    enable_sequence_parallel_for_model,
    remove_sequence_parallel,
    sharding_of,
)
from .launch import Ranks, join_world, launch
from .mesh import ParallelMesh, SequenceParallelConfig, agreement, make_mesh
from .plan import SequenceParallelInput, SequenceParallelModelPlan, SequenceParallelOutput, SequenceParallelPartialInput
from .shard import SequenceParallelGatherHook, SequenceParallelSplitHook

__all__ = [
    "CfgParallelHook",
    "ParallelMesh",
    "RankError",
    "Ranks",
    "SequenceParallelConfig",
    "SequenceParallelGatherHook",
    "SequenceParallelInput",
    "SequenceParallelModelPlan",
    "SequenceParallelOutput",
    "SequenceParallelPartialInput",
    "SequenceParallelSplitHook",
    "Sharding",
    "ShardingError",
    "StrategyError",
    "agreement",
    "apply_cfg_parallel",
    "apply_sequence_parallel",
    "disable_sequence_parallel_for_model",
    "enable_sequence_parallel_for_model",
    "join_world",
    "launch",
    "make_mesh",
    "remove_sequence_parallel",
    "sharding_of",
]
