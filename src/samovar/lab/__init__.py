"""Is it as good as it is fast? Tools that measure, calibrate and tune, on any model."""

from .image_runner import ImageRunner, make_tasks, read_prompts
from .methods import Method, cached, plain
from .session import Journal, Session

__all__ = ["ImageRunner", "Journal", "Method", "Session", "cached", "make_tasks", "plain", "read_prompts"]
