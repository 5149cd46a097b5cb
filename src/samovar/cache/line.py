"""At which step is a run, and what was decided for it?

A denoiser is called once a step for each branch. Where a pipeline is hooked, its scheduler says which
step it is. In a loop of the user's own a step begins when a branch is called that was already called
in it, and a run begins when time turns back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch

from ..hooks import Run
from .config import TeaCacheConfig
from .inputs import on_host
from .schedule import Step, Verdict


class Line:
    """The calls of one run."""

    def __init__(self, announced: int | None) -> None:
        self._announced = announced
        self.plan: TeaCacheConfig | None = None
        """What it goes by instead of the usual settings, once its pictures are known to be hard."""
        self.verdict: Verdict | None = None
        """What the leader decided for the running step."""
        self.index = -1
        self.place = 0.0
        """Where the running step is among others, in terms of noise where that is known."""
        self.is_told = False
        """Whether a scheduler says which step it is."""
        self.leader: Hashable = None
        """The branch that decides for all that are called after it in a step: the first of the run."""
        self.recent: OrderedDict[Hashable, None] = OrderedDict()
        """Its branches, in the order in which they were last called."""
        self._loop: Any = None
        self._time: torch.Tensor | float | None = None
        self._is_misled = False
        self._step = Step(0, None, None)
        self._branches: set[Hashable] = set()
        self._times: list[float] = []

    def begin_call(self, branch: Hashable, run: Run | None, time: torch.Tensor | float | None = None) -> bool:
        """Go to the step that this call belongs to. False if that is an earlier one: a run has begun anew."""
        position = None if run is None or self._is_misled else run.position()
        is_again = branch in self._branches
        if position is not None and position.step == self.index and is_again and self._is_later(time):
            self._is_misled, position = True, None  # Time goes on, but not by this scheduler: a copy of it is used.
        self.is_told = position is not None
        is_next = self.index < 0 or is_again or (position is None and self._is_later(time))
        index = self.index + is_next if position is None else position.step
        loop = None if run is None else run.loop()
        if index < self.index or (self._loop is not None and loop is not self._loop):
            return False
        self._loop = loop
        self.leader = branch if self.leader is None else self.leader
        self.recent[branch] = None
        self.recent.move_to_end(branch)
        if index > self.index:
            self.index, self.verdict = index, None
            self.place = float(index) if position is None or position.sigma is None else -position.sigma
            length = self._announced if run is None else run.total()
            self._step = Step(index, length if position is None else position.total, length)
            self._branches.clear()
            self._time = time
        self._branches.add(branch)
        return True

    def _is_later(self, time: torch.Tensor | float | None) -> bool:
        """Whether the time is not that of the running step, as far as that can be told without waiting."""
        now, before = on_host(time), on_host(self._time)
        return now is not None and before is not None and now != before

    @property
    def step(self) -> Step:
        """The running step."""
        return self._step

    def goes_back(self, time: float) -> bool:
        """Told the time of a step: whether it is that of an earlier one, against the direction so far."""
        times = self._times
        if not times or time != times[-1]:
            times.append(time)
            del times[:-3]
        return len(times) == 3 and (times[2] - times[1]) * (times[1] - times[0]) < 0
