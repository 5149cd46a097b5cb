"""The step of a run that a call belongs to.

A denoiser is called once per step for each branch. In a pipeline, the scheduler knows the step. In a user's own loop, a
step begins when a branch is called again, at another time and with another sample, and a run begins when time turns
back.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..hooks import Position, Run
from ..hooks.snapshot import Snapshot
from .inputs import Inputs

Time = torch.Tensor | float | None


@dataclass(frozen=True)
class Step:
    """A step of a run."""

    index: int
    """From 0."""
    place: float = 0.0
    """Its position by noise level where that is known, else its index."""
    length: float = 1.0
    """How far it goes, likewise."""
    total: int | None = None
    """Number of the scheduler's steps, if known."""
    run_length: int | None = None
    """Number of steps that the run takes: fewer than `total` if it starts half-way."""

    @property
    def first(self) -> int:
        """The index of the run's first step."""
        return 0 if self.total is None or self.run_length is None else max(0, self.total - self.run_length)

    @property
    def is_last(self) -> bool:
        """Whether this is known to be the last step."""
        return self.total is not None and self.index >= self.total - 1


class Tick(NamedTuple):
    """How a call is related to the last one of its branch."""

    is_again: bool
    """Its branch was already called in this step."""
    has_gap: bool
    """Its branch missed the step before."""


class _Last(NamedTuple):
    """A branch's last call."""

    step: int
    time: float | None
    sample: Snapshot


class Clock:
    """Counts the steps of one run."""

    def __init__(self, announced: int | None = None, waits: bool = True) -> None:
        """`announced`: number of steps, where no pipeline says it. `waits`: also reads times that are on a device."""
        self.step = Step(-1)
        self._calls: dict[Hashable, _Last] = {}
        """The last of each branch."""
        self._announced, self._waits = announced, waits
        self._loop: Any = None
        self._is_misled = False
        """Whether the pipeline steps a copy of its scheduler."""
        self._step_time: Time = None
        self._times: list[float] = []

    def advance(self, branch: Hashable, run: Run | None, inputs: Inputs) -> Tick | None:
        """Go to the step that this call belongs to; None if a new run has begun."""
        last = self._calls.get(branch)
        position = self._position(last, run, inputs)
        loop = None if run is None else run.loop()
        if position is not None:
            time, index, is_again = None, position.step, last is not None and last.step == position.step
        else:  # By time and sample, where no scheduler counts.
            time = self._read(inputs.time)
            if run is None and time is not None and self._turns_back(time):
                return None
            is_again = last is not None and self._is_same(last, time, inputs)
            index = self.step.index + (not is_again and self._is_next(last, time))
        if index < self.step.index or (self._loop is not None and loop is not self._loop):
            return None
        self._loop = loop
        if index > self.step.index:
            length = self._announced if run is None else run.total()
            self._step_time, self.step = inputs.time, _step(index, position, length)
        self._calls[branch] = _Last(index, time, Snapshot(next(iter(inputs.samples), None)))
        return Tick(is_again, last is not None and index > last.step + 1)

    def _position(self, last: _Last | None, run: Run | None, inputs: Inputs) -> Position | None:
        """What the scheduler says, unless the pipeline steps another one: then times go on at the same step."""
        position = None if run is None or self._is_misled else run.position()
        if position is not None and last is not None and last.step == position.step == self.step.index:
            time, before = self._read(inputs.time), self._read(self._step_time)
            self._is_misled = time is not None and before is not None and time != before
        return None if self._is_misled else position

    @staticmethod
    def _is_same(last: _Last, time: float | None, inputs: Inputs) -> bool:
        """Whether a call is at the time of its branch's last one, or has its sample: a step may have several calls."""
        if time is not None and time == last.time:
            return True
        sample = next(iter(inputs.samples), None)
        return sample is not None and last.sample.value is sample and last.sample.is_same(sample)

    def _is_next(self, last: _Last | None, time: float | None) -> bool:
        """Whether a call begins a step."""
        if self.step.index < 0 or (last is not None and last.step == self.step.index):
            return True
        before = None if time is None else self._read(self._step_time)
        return before is not None and time != before

    def _read(self, time: Time) -> float | None:
        """A time as a number; of several the largest."""
        if not isinstance(time, torch.Tensor):
            return time
        if not time.numel() or not (self._waits or time.device.type == "cpu"):
            return None
        return float(time.max())

    def _turns_back(self, time: float) -> bool:
        """Whether the timestep went backwards."""
        times = self._times
        if not times or time != times[-1]:
            times.append(time)
            del times[:-3]
        return len(times) == 3 and (times[2] - times[1]) * (times[1] - times[0]) < 0


def _step(index: int, position: Position | None, length: int | None) -> Step:
    total = length if position is None else position.total
    if position is None or position.sigma is None:
        return Step(index, float(index), 1.0, total, length)
    return Step(index, -position.sigma, abs(position.sigma - position.next_sigma), total, length)
