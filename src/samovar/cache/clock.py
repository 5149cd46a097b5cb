"""At which step is a run, and is this call one of its steps?

A denoiser is called once a step for each branch. Where a pipeline runs, its scheduler says which step it is. In a loop
of the user's own, a step begins when a branch is called that was already called in it, and a run begins when time
turns back. There, a second call at the same time is no step; nor is one with the same sample, unless the sample never
changes at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ..hooks import Run
from .config import TeaCacheConfig
from .inputs import Inputs, Sample, on_host
from .schedule import Step, Verdict


class Last(NamedTuple):
    """What is known of a branch's last call."""

    step: int
    time: float | None
    """None where it is on a device, or was not needed."""
    given_time: torch.Tensor | float | None
    sample: Sample | None
    was_same: bool
    """Whether its sample was that of the call before."""


class Clock:
    """The calls of one run."""

    def __init__(self, announced: int | None) -> None:
        self._announced = announced
        self.plan: TeaCacheConfig | None = None
        """What it goes by instead of the usual settings, once its images are known to be outliers."""
        self.verdict: Verdict | None = None
        """What the leader decided for the running step."""
        self.index = -1
        self.place = 0.0
        """Where the running step is among others, in terms of noise where that is known."""
        self.is_scheduled = False
        """Whether a scheduler says which step it is."""
        self.step = Step(0, None, None)
        self.leader: Hashable = None
        """The branch that decides for all that are called after it in a step: the first of the run."""
        self.recent: OrderedDict[Hashable, Last] = OrderedDict()
        """Its branches, in the order in which they were last called."""
        self.is_again = False
        """Whether the running call is another one of a step that its branch has had."""
        self.last_time: torch.Tensor | float | None = None
        """That of the branch's last call, as it was given."""
        self.is_unclear = False
        """Whether it may be that: it has the sample of the call before, at another time."""
        self.has_gap = False
        """Whether its branch was not called in the step before."""
        self._loop: Any = None
        self._is_misled = False
        self._branches: set[Hashable] = set()
        self._step_time: torch.Tensor | float | None = None
        self._times: list[float] = []

    def advance(self, branch: Hashable, run: Run | None, inputs: Inputs) -> bool:
        """Go to the step that this call belongs to. False if a run has begun anew."""
        position = None if run is None or self._is_misled else run.position()
        was_called = branch in self._branches
        is_repeated = position is not None and position.step == self.index and was_called
        time = inputs.host_time if position is None or is_repeated else None  # A scheduler counts without it.
        before = on_host(self._step_time) if time is not None else None
        is_later = before is not None and time != before
        if is_repeated and is_later:
            self._is_misled, position = True, None  # Time goes on, but not by this scheduler: a copy of it is used.
        self.is_scheduled = position is not None
        if run is None and time is not None and self.turns_back(time):
            return False
        last = self.recent.get(branch)
        self.last_time = None if last is None else last.given_time
        same = last is not None and last.sample is not None and last.sample.is_that_of(inputs.sample)
        self.is_again = position is None and last is not None and time is not None and time == last.time
        if position is None and last is not None and last.was_same and not same:
            self.is_again = True  # Samples are the same at times and at others not: a step has several calls.
        self.is_unclear = position is None and last is not None and same and not last.was_same
        is_next = self.index < 0 or (not self.is_again and (was_called or (position is None and is_later)))
        index = self.index + is_next if position is None else position.step
        loop = None if run is None else run.loop()
        if index < self.index or (self._loop is not None and loop is not self._loop):
            return False
        self._loop = loop
        self.leader = branch if self.leader is None else self.leader
        if index > self.index:
            self.index, self.verdict, self._step_time = index, None, inputs.time
            self.place = float(index) if position is None or position.sigma is None else -position.sigma
            length = self._announced if run is None else run.total()
            self.step = Step(index, length if position is None else position.total, length)
            self._branches.clear()
        self.is_again = self.is_again or (position is not None and last is not None and last.step == index)
        self.has_gap = last is not None and index > last.step + 1
        self._branches.add(branch)
        sample = None if inputs.sample is None else Sample(inputs.sample)
        self.recent[branch] = Last(index, time, inputs.time, sample, same)
        self.recent.move_to_end(branch)
        return True

    def turns_back(self, time: float) -> bool:
        """Whether the time of a step is that of an earlier one, against the direction so far."""
        times = self._times
        if not times or time != times[-1]:
            times.append(time)
            del times[:-3]
        return len(times) == 3 and (times[2] - times[1]) * (times[1] - times[0]) < 0

    @property
    def is_last(self) -> bool:
        """Whether no step follows, as far as that is known."""
        return self.step.total is not None and self.index >= self.step.total - 1
