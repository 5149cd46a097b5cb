"""The tasks of the lab's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samovar.lab.image_runner import ImageRunner, Task
from samovar.lab.session import Session

PARAMS: dict[str, Any] = {
    "height": 16, "width": 24, "true_cfg_scale": 2.0, "negative_prompt": "a dog", "max_sequence_length": 8
}  # fmt: skip
TASKS = [Task("a cat", 0), Task("a cat", 1), Task("a house", 2)]
MakeRunner = Callable[..., ImageRunner]
MakeSession = Callable[..., Session]
