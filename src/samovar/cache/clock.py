"""The step of a run that a call belongs to.

A denoiser is called once per step for each branch. In a pipeline, the scheduler knows the step. In a user's own loop, a
step begins when a branch is called again, and a run begins when the timestep goes backwards. There, a second call at
the same time is not a step; nor is one with the same sample, unless the sample never changes at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..hooks import Position, Run
from .inputs import Inputs, Sample, on_host, read_time


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

    is_again: bool = False
    """Its branch was already called in this step."""
    is_unclear: bool = False
    """Its branch may already have been called in this step: its sample is unchanged, its time is not."""
    has_gap: bool = False
    """Its branch missed the step before."""


class _Last(NamedTuple):
    """A branch's last call."""

    step: int
    time: float | None
    sample: Sample | None
    was_same: bool
    """Whether its sample was that of the call before."""


class Clock:
    """Counts the steps of one run."""

    def __init__(self, announced: int | None = None, waits: bool = True) -> None:
        """`announced`: number of steps, where no pipeline says it. `waits`: also reads times that are on a device."""
        self.step = Step(-1)
        self.recent: OrderedDict[Hashable, _Last] = OrderedDict()
        """Its branches, the one called last at the end."""
        self._announced, self._waits = announced, waits
        self._loop: Any = None
        self._is_misled = False
        """Whether the pipeline steps a copy of its scheduler."""
        self._called: set[Hashable] = set()
        """The branches that were called in the running step."""
        self._step_time: torch.Tensor | float | None = None
        self._times: list[float] = []

    def advance(self, branch: Hashable, run: Run | None, inputs: Inputs) -> Tick | None:
        """Go to the step that this call belongs to; None if a new run has begun."""
        position = self._position(branch, run, inputs)
        time = self._read(inputs.time) if position is None else None  # A scheduler does not need it.
        if run is None and time is not None and self._turns_back(time):
            return None
        last = self.recent.get(branch)
        is_same = last is not None and last.sample is not None and last.sample.is_that_of(inputs.sample)
        tick = Tick() if position is not None or last is None else self._counted(last, time, is_same)
        index = position.step if position is not None else self.step.index + self._is_next(branch, tick, time)
        loop = None if run is None else run.loop()
        if index < self.step.index or (self._loop is not None and loop is not self._loop):
            return None
        self._loop = loop
        if index > self.step.index:
            length = self._announced if run is None else run.total()
            self._begin(index, position, length, inputs.time)
        self._called.add(branch)
        if position is not None and last is not None:
            tick = tick._replace(is_again=last.step == index)
        sample = None if inputs.sample is None else Sample(inputs.sample)
        self.recent[branch] = _Last(index, time, sample, is_same)
        self.recent.move_to_end(branch)
        return tick._replace(has_gap=last is not None and index > last.step + 1)

    def _position(self, branch: Hashable, run: Run | None, inputs: Inputs) -> Position | None:
        """What the scheduler says, unless the pipeline steps another one: then times go on at the same step."""
        position = None if run is None or self._is_misled else run.position()
        if position is not None and position.step == self.step.index and branch in self._called:
            time, before = self._read(inputs.time), self._read(self._step_time)
            self._is_misled = time is not None and before is not None and time != before
        return None if self._is_misled else position

    @staticmethod
    def _counted(last: _Last, time: float | None, is_same: bool) -> Tick:
        """By time and sample, where no scheduler counts."""
        # If only some calls repeat the sample, a step has several calls.
        is_again = (time is not None and time == last.time) or (last.was_same and not is_same)
        return Tick(is_again, is_unclear=is_same and not last.was_same)

    def _is_next(self, branch: Hashable, tick: Tick, time: float | None) -> bool:
        """Whether a call begins a step."""
        before = None if time is None else self._read(self._step_time)
        is_later = before is not None and time != before
        return self.step.index < 0 or (not tick.is_again and (branch in self._called or is_later))

    def _begin(
        self, index: int, position: Position | None, length: int | None, time: torch.Tensor | float | None
    ) -> None:
        place, way = float(index), 1.0
        if position is not None and position.sigma is not None:
            place, way = -position.sigma, abs(position.sigma - position.next_sigma)
        self.step = Step(index, place, way, length if position is None else position.total, length)
        self._step_time = time
        self._called.clear()

    def _read(self, time: torch.Tensor | float | None) -> float | None:
        return read_time(time) if self._waits else on_host(time)

    def _turns_back(self, time: float) -> bool:
        """Whether the timestep went backwards."""
        times = self._times
        if not times or time != times[-1]:
            times.append(time)
            del times[:-3]
        return len(times) == 3 and (times[2] - times[1]) * (times[1] - times[0]) < 0
