"""One call of the denoiser, with everything that belongs to it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ..trace.passes import Mode
from .clock import Clock, Step, Tick
from .config import TeaCacheConfig
from .error_control import ErrorControl
from .inputs import MAX_COMPARED, Inputs
from .model import Forward
from .state import TeaCacheState

AGAIN = "this branch was called twice at the same step"
"""The reason of a call that may not be a step; nothing of it is stored."""
_MAX_WAYS = 3
"""Steps whose ways a jump is compared with: some solvers go far at every second step only."""


class Verdict(NamedTuple):
    """What to do with a step, and why. `ask` leaves it to the signal."""

    action: Mode
    reason: str


class Path:
    """Where the sample has been: a few of its elements at the last step, and how far the last steps went."""

    def __init__(self) -> None:
        self._last: list[torch.Tensor] = []
        self._ways: list[torch.Tensor] = []

    def move(self, samples: list[torch.Tensor]) -> torch.Tensor | None:
        """How many times as far the sample has gone as in the last steps, for the worst image; None if unknown."""
        now = [_rows(sample) for sample in samples]
        known, self._last = self._last, now
        if [one.shape for one in known] != [other.shape for other in now] or not now:
            self._ways = []
            return None
        way = torch.cat([(one - other).norm(dim=1) for one, other in zip(now, known, strict=True)])
        before, self._ways = self._ways, [way, *self._ways][:_MAX_WAYS]
        if not before:
            return None
        longest = torch.stack(before).amax(0)
        return (way / longest.clamp_min(torch.finfo(way.dtype).tiny)).amax()


def _rows(sample: torch.Tensor) -> torch.Tensor:
    """Some elements of each image."""
    flat = sample.detach().reshape(len(sample) if sample.dim() > 1 else 1, -1)
    apart = -(-flat.shape[1] // MAX_COMPARED) | 1  # Odd: else the same few channels would be compared everywhere.
    return flat[:, ::apart].to(torch.float32, copy=True)


class CachedRun:
    """What belongs to all branches of one run."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.branches: dict[Hashable, TeaCacheState] = {}
        self.plan: TeaCacheConfig | None = None
        """The settings for outliers, once its images are known to be outliers."""
        self.control = ErrorControl()
        self.path = Path()
        self.before: tuple[torch.Tensor, ...] | None = None
        """Rows of the sample at the last computed step, until that step has been judged."""
        self.copies: int | None = None
        """How often its batch repeats the sample, once that is known."""
        self._verdict: tuple[int, Verdict] | None = None

    @property
    def verdict(self) -> Verdict | None:
        """What the first branch of the running step has decided for those called after it."""
        is_now = self._verdict is not None and self._verdict[0] == self.clock.step.index
        return self._verdict[1] if self._verdict is not None and is_now else None

    def decide(self, verdict: Verdict) -> Verdict:
        """Decide for the branches called later in the running step."""
        self._verdict = self.clock.step.index, verdict
        return verdict

    def restart(self) -> None:
        """Its outputs do not predict those that follow."""
        self.control.restart()
        self.before = self.copies = None


class Call(NamedTuple):
    """One call of the denoiser."""

    forward: Forward
    inputs: Inputs
    branch: str
    run: CachedRun
    tick: Tick
    state: TeaCacheState

    @property
    def step(self) -> Step:
        return self.run.clock.step

    def compute(self) -> Any:
        """What the model itself returns."""
        return self.forward(self.inputs.args, self.inputs.kwargs)
