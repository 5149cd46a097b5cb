"""Models that nobody here wrote, as far as tests share them: what they are made of, and a loop that drives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from driving import masks

import zoo

WIDTH = 16


class Net(torch.nn.Module):
    """What these models have in common; each has a way of its own from the sample to the output."""

    def __init__(self, **lists: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inp, self.out, self.time = (torch.nn.Linear(*size) for size in ((8, WIDTH), (WIDTH, 8), (1, WIDTH)))
            for name, make in lists.items():
                setattr(self, name, torch.nn.ModuleList(make() for _ in range(4)))


TEXT, VECTOR = zoo.cond("text", 1, 5, WIDTH), zoo.cond("vector", 1, WIDTH)


@torch.no_grad()
def denoise(model: torch.nn.Module, conditioning: torch.Tensor, steps: int = 12, frames: int = 1) -> list[torch.Tensor]:
    """A user's own loop, in which each sample is made of the last output."""
    sample, outputs = zoo.noise(0, frames, 6, 8), []
    for step in range(steps):
        outputs.append(model(sample, torch.tensor(1 - step / steps), conditioning))
        sample = sample - outputs[-1] / steps
    return outputs


def mask_of(attached: Any) -> str:
    (mask,) = masks(attached.stats().cache)
    return mask
