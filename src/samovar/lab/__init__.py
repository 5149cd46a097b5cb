"""Is it as good as it is fast? Tools that measure, calibrate and tune, on any model."""

from .image_runner import ImageRunner
from .journal import Journal
from .methods import Method, cached, plain
from .session import Session
from .tasks import make_tasks, read_prompts

__all__ = ["ImageRunner", "Journal", "Method", "Session", "cached", "make_tasks", "plain", "read_prompts"]
