"""Splits a sequence, or the branches of guidance, over ranks."""

from ..core.errors import ShardingError, StrategyError
from .cfg import CfgParallelHook, apply_cfg_parallel
from .mesh import Agreement, ParallelMesh, SequenceParallelConfig, join_world, make_mesh
from .plan import SequenceParallelInput, SequenceParallelModelPlan, SequenceParallelOutput, SequenceParallelPartialInput
from .shard import SequenceParallelGatherHook, SequenceParallelSplitHook
from .sharding import (
    Sharding,
    apply_sequence_parallel,
    disable_sequence_parallel_for_model,
    enable_sequence_parallel_for_model,
    remove_sequence_parallel,
    sharding_of,
)

__all__ = [
    "Agreement",
    "CfgParallelHook",
    "ParallelMesh",
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
    "apply_cfg_parallel",
    "apply_sequence_parallel",
    "disable_sequence_parallel_for_model",
    "enable_sequence_parallel_for_model",
    "join_world",
    "make_mesh",
    "remove_sequence_parallel",
    "sharding_of",
]
