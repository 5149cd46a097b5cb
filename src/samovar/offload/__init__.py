"""Weights on the device, taking turns, or streaming block by block, within a budget."""

from ..core.settings import parse_bytes
from .config import OffloadConfig
from .device import Stage
from .host_device import HostStage
from .host_tiers import TierPlan, WeightUse, plan_tiers, uses_of
from .offload import Offloaded, apply_offload, prepare_offload
from .planner import ComponentPlan, OffloadPlan, plan_offload
from .sizes import BlockSize, ComponentSize, format_bytes, read_parts, read_sizes
from .stats import OffloadStats
from .streaming import Timing

__all__ = [
    "BlockSize",
    "ComponentPlan",
    "ComponentSize",
    "HostStage",
    "OffloadConfig",
    "OffloadPlan",
    "OffloadStats",
    "Offloaded",
    "Stage",
    "TierPlan",
    "Timing",
    "WeightUse",
    "apply_offload",
    "format_bytes",
    "parse_bytes",
    "plan_offload",
    "plan_tiers",
    "prepare_offload",
    "read_parts",
    "read_sizes",
    "uses_of",
]
