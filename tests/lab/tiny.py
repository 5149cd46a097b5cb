"""The tasks of the lab's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samovar.lab.methods import EXACT, Method
from samovar.lab.metrics import Quality
from samovar.lab.runner import Runner
from samovar.lab.session import Row, Session
from samovar.lab.tasks import Task

PARAMS: dict[str, Any] = {
    "height": 16, "width": 24, "true_cfg_scale": 2.0, "negative_prompt": "a dog", "max_sequence_length": 8
}  # fmt: skip
TASKS = [Task("a cat", 0), Task("a cat", 1), Task("a house", 2)]
MakeRunner = Callable[..., Runner]
MakeSession = Callable[..., Session]
"""The fixtures of the lab's tests."""


def row(
    psnr: list[float], computed: float = 10, lpips: float = 0.01, name: str = "a", family: str = "samovar auto",
    steps: int | None = None, **others: Any
) -> Row:  # fmt: skip
    """The figures of a method, without making an image."""
    images = tuple(Quality(value, 0.9, lpips) for value in psnr)
    return Row(Method(name, family, steps=steps), computed, images, exact_steps=20, **others)


def exact_images(session: Session) -> torch.Tensor:
    session.exact()
    return torch.cat([session.journal.load_images(session._key(EXACT, n)) for n in range(len(session.tasks))])
