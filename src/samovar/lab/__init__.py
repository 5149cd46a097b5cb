"""Measures what settings cost the images, and chooses one: `compare`, `calibrate` and `tune`, on any model."""

from .journal import Journal
from .methods import Method, cached, plain
from .runner import Runner
from .session import Session
from .tasks import Task, make_tasks, read_prompts

__all__ = ["Journal", "Method", "Runner", "Session", "Task", "cached", "make_tasks", "plain", "read_prompts"]
