"""Is it as good as it is fast? Tools that measure, calibrate and tune, on any model."""

from .calibrate import Calibration, Fit
from .compare import Comparison
from .journal import Journal
from .methods import EXACT, Method, ours, plain, read_method
from .metrics import Quality
from .planning import FAMILIES, CurveFamily, Family, Planner, SchedulePlan
from .prompts import read_prompts
from .session import Row, Session
from .studio import Studio, StudioConfig, Task, tasks_of
from .trajectory import Trajectory
from .tune import Promise, Tuned

__all__ = [
    "EXACT",
    "FAMILIES",
    "Calibration",
    "Comparison",
    "CurveFamily",
    "Family",
    "Fit",
    "Journal",
    "Method",
    "Planner",
    "Promise",
    "Quality",
    "Row",
    "SchedulePlan",
    "Session",
    "Studio",
    "StudioConfig",
    "Task",
    "Trajectory",
    "Tuned",
    "ours",
    "plain",
    "read_method",
    "read_prompts",
    "tasks_of",
]
