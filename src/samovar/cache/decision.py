"""Has the signal changed too much for this step to be skipped?

One number is waited for a step: the relative change of the signal, with those of whatever else changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import inputs as change
from .forecast import Outlook
from .memo import Memo
from .schedule import Mode

Agree = Callable[[torch.Tensor], torch.Tensor]
"""Makes of this rank's pairs of change and size, as sums, the group's, so that all ranks decide alike. Every rank calls
it once in a step that is left to the signal, with as many numbers."""


class Signal:
    """What a branch was judged by at one step."""

    def __init__(self, value: torch.Tensor, source: str | None = None) -> None:
        self.value = value.detach()
        self.size = change.size(self.value)
        self.source = source
        """Where it was taken."""

    def change(self, now: Signal) -> change.Pair | None:
        """How much a later one differs, and how large this one is; None if they cannot be compared."""
        if (self.source, self.value.shape, self.value.device) != (now.source, now.value.shape, now.value.device):
            return None
        return [change.size(now.value - self.value), self.size]


class Measured(NamedTuple):
    """What was read from the device."""

    signal: float
    """The relative change of the signal."""
    others: float
    """The largest relative change of anything else."""
    time: float | None


def measure(
    signal: change.Pair | None,
    others: Sequence[change.Pair],
    time: torch.Tensor | float | None,
    agree: Agree | None,
    device: torch.device | None = None,
) -> Measured:
    """Relative changes from pairs of change and size, in one wait for the device. No signal is an infinite change."""
    if signal is None:
        signal = torch.tensor([torch.inf, 1.0], device=device).unbind()
    pairs = torch.stack([part.to(signal[0].device) for pair in (signal, *others) for part in pair])
    if agree is not None:
        pairs = agree(_in_four(pairs))
    read_time = time if not isinstance(time, torch.Tensor) else None
    if isinstance(time, torch.Tensor):
        *numbers, read_time = torch.cat([pairs, time.reshape(-1)[:1].to(pairs)]).tolist()
    else:
        numbers = pairs.tolist()
    distances = [_distance(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
    return Measured(distances[0], max(distances[1:], default=0.0), read_time)


def _distance(changed: float, size: float) -> float:
    relative = change.relative(changed, size)
    return float("inf") if math.isnan(relative) else relative  # What is no number is never small.


def _in_four(pairs: torch.Tensor) -> torch.Tensor:
    """The signal's pair, and one for the largest of the others: what ranks exchange must be of one size."""
    change_of_others, size_of_others = pairs[2::2], pairs[3::2]
    largest = pairs.new_zeros(1)
    if len(change_of_others):
        largest = (change_of_others / size_of_others.clamp_min(1e-30)).amax().clamp_max(1e30).reshape(1)
    return torch.cat([pairs[:2], largest, pairs.new_ones(1)])


@dataclass
class Attempt:
    """A step on its way: what is wanted of it, and what came of it."""

    mode: Mode
    """For `ask`, `decide` tells."""
    outlook: Outlook | None
    """What a skipped step would give."""
    judges: bool
    """Whether the signal is to be read."""
    of_output: bool
    """Whether the whole output is forecast, so that a skipped step ends where it is decided."""
    decide: Callable[[Signal], bool]
    """Whether a step with this signal is skipped."""
    memo: Memo
    """What is the same at every step."""

    output: Any = None
    computed: bool = True
    parts: list[torch.Tensor | None] | None = None
    """What the blocks added, if the step was computed and that could be told."""
    key: Any = None
    """What must be equal for `parts` of two steps to stand for each other."""
    signal: Signal | None = field(default=None)

    def sees(self, signal: Signal) -> bool:
        """Told the signal: whether the step is skipped."""
        self.signal = signal
        return self.mode == "ask" and self.decide(signal)
