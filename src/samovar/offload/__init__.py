"""Where do the weights live? On the device, taking turns, or streaming block by block, within a budget."""

from ..core.settings import parse_bytes
from .apply import Offloaded, apply_offload, prepare_offload
from .config import OffloadConfig
from .measure import Measured
from .planner import ComponentPlan, OffloadPlan, plan_offload
from .simulated import HostStage
from .sizes import BlockSize, ComponentSize, format_bytes, read_parts, read_sizes
from .staging import Stage
from .stats import OffloadStats
from .streaming import Timing
from .tiers import TierPlan, WeightUse, plan_tiers, uses_of

__all__ = [
    "BlockSize",
    "ComponentPlan",
    "ComponentSize",
    "HostStage",
    "Measured",
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
