"""Has the signal changed too much for this step to be skipped?

One number is waited for a step: the relative change of the signal, with those of whatever else changed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import torch

from . import inputs as change


class Agree(Protocol):
    """Makes of this rank's pairs of change and size, as sums, the group's, so that all ranks decide alike. Every rank
    calls it once in a step that is left to the signal, with equally many numbers."""

    def __call__(self, figures: torch.Tensor) -> torch.Tensor: ...

    def within_branch(self, figures: torch.Tensor) -> torch.Tensor:
        """The same for a decision that each branch makes for itself."""


class Signal:
    """What a branch was judged by at one step."""

    def __init__(self, value: torch.Tensor, source: Hashable = None) -> None:
        self.value = value.detach()
        self.size = change.size(self.value)
        self.source = source
        """Where it was taken; signals of two sources cannot be compared."""

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
    """The largest relative change of anything else; infinite if conditioning changed."""
    times: tuple[float, ...]


def measure(
    signal: change.Pair | None,
    others: Sequence[change.Pair],
    times: Sequence[torch.Tensor],
    agree: Agree | None,
    device: torch.device | None = None,
    *,
    within_branch: bool = False,
) -> Measured:
    """Relative changes from pairs of change and size, and the largest number of each time, in one wait for the device.
    No signal is an infinite change."""
    if signal is None:
        signal = torch.tensor([torch.inf, 1.0], device=device).unbind()
    pairs = torch.stack([part.to(signal[0].device, torch.float32) for pair in (signal, *others) for part in pair])
    if agree is not None:
        pairs = (agree.within_branch if within_branch else agree)(_in_four(pairs))
    count = len(pairs)
    numbers = torch.cat([pairs, *(time.max().reshape(1).to(pairs) for time in times)]).tolist()
    distances = [_distance(*pair) for pair in zip(numbers[:count:2], numbers[1:count:2], strict=True)]
    return Measured(distances[0], max(distances[1:], default=0.0), tuple(numbers[count:]))


_LARGEST = 1e30
"""What ranks exchange for an infinite change: sums of infinities would be no numbers."""
_HUGE = 1e20
"""What is left of it, at least, when it is shared between ranks."""


def _distance(changed: float, size: float) -> float:
    relative = change.relative(changed, size)
    return float("inf") if math.isnan(relative) or relative >= _HUGE else relative  # NaN is never small.


def _in_four(pairs: torch.Tensor) -> torch.Tensor:
    """The signal's pair, and one for the largest of the others: ranks exchange equally many numbers."""
    change_of_others, size_of_others = pairs[2::2], pairs[3::2]
    largest = pairs.new_zeros(1)
    if len(change_of_others):
        largest = (change_of_others / size_of_others.clamp_min(1 / _LARGEST)).amax().clamp_max(_LARGEST).reshape(1)
    return torch.cat([pairs[:2], largest, pairs.new_ones(1)])
