"""Is it as good as it is fast? Tools that measure, calibrate and tune, on any model."""

from .calibrate import Calibration, Fit
from .compare import Comparison
from .journal import Journal
from .methods import EXACT, Method, ours, plain, read_method
from .metrics import Quality
from .prompts import read_prompts
from .schedules import SchedulePlanner
from .session import Row, Session
from .studio import Studio, StudioConfig, Task, tasks_of
from .trajectory import Trajectory
from .tune import Promise, Tuned

__all__ = [
    "EXACT",
    "Calibration",
    "Comparison",
    "Fit",
    "Journal",
    "Method",
    "Promise",
    "Quality",
    "Row",
    "SchedulePlanner",
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
