"""Which step of a run does this call belong to, and what does its branch remember?

A denoiser is called once per step for each branch. In a pipeline, the scheduler knows the step. In a user's own loop, a
step begins when a branch is called again, and a run begins when the timestep goes backwards. There, a second call at
the same time is not a step; nor is one with the same sample, unless the sample never changes at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..hooks import BaseState, Run
from ..trace.forward import Tensors
from ..trace.passes import Outlook
from .config import CacheConfig, TeaCacheConfig
from .decision import Signal, Step, Verdict
from .forecast import History, OutputForm, take_apart
from .inputs import Inputs, Sample, Watch, on_host, watch
from .pace import Pace
from .rows import RowHistory


class Last(NamedTuple):
    """A branch's last call."""

    step: int
    time: float | None
    """None if it is on a device, or was not needed."""
    given_time: torch.Tensor | float | None
    sample: Sample | None
    was_same: bool
    """Whether its sample was that of the call before."""


class Clock:
    """The calls of one run."""

    def __init__(self, announced: int | None) -> None:
        self._announced = announced
        self.plan: TeaCacheConfig | None = None
        """The settings for outliers, once its images are known to be outliers."""
        self.pace = Pace()
        """The gaps of the cache "auto"."""
        self.verdict: Verdict | None = None
        """The leader's decision for the running step."""
        self.index = -1
        self.place = 0.0
        """Position of the running step, by noise level where that is known."""
        self.length = 1.0
        """How far the running step goes, likewise."""
        self.is_scheduled = False
        """Whether a scheduler counts the steps."""
        self.step = Step(0, None, None)
        self.leader: Hashable = None
        """The branch that decides for those called after it in a step: the first of the run."""
        self.recent: OrderedDict[Hashable, Last] = OrderedDict()
        """Its branches, the one called last at the end."""
        self.is_again = False
        """Whether its branch was already called in this step."""
        self.last_time: torch.Tensor | float | None = None
        """Time of the branch's last call, as given."""
        self.is_unclear = False
        """Whether the branch may already have been called in this step: its sample is unchanged, its time is not."""
        self.has_gap = False
        """Whether its branch missed the step before."""
        self._loop: Any = None
        self._is_misled = False
        self._branches: set[Hashable] = set()
        self._step_time: torch.Tensor | float | None = None
        self._times: list[float] = []

    def advance(self, branch: Hashable, run: Run | None, inputs: Inputs) -> bool:
        """Go to the step that this call belongs to. False if a new run has begun."""
        position = None if run is None or self._is_misled else run.position()
        was_called = branch in self._branches
        is_repeated = position is not None and position.step == self.index and was_called
        time = inputs.host_time if position is None or is_repeated else None  # A scheduler does not need it.
        before = on_host(self._step_time) if time is not None else None
        is_later = before is not None and time != before
        if is_repeated and is_later:
            self._is_misled, position = True, None  # The pipeline steps a copy of its scheduler.
        self.is_scheduled = position is not None
        if run is None and time is not None and self.turns_back(time):
            return False
        last = self.recent.get(branch)
        self.last_time = None if last is None else last.given_time
        same = last is not None and last.sample is not None and last.sample.is_that_of(inputs.sample)
        self.is_again = position is None and last is not None and time is not None and time == last.time
        if position is None and last is not None and last.was_same and not same:
            self.is_again = True  # Only some calls repeat the sample: a step has several calls.
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
            self.place, self.length = float(index), 1.0
            if position is not None and position.sigma is not None:
                self.place, self.length = -position.sigma, abs(position.sigma - position.next_sigma)
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
        """True if the timestep went backwards."""
        times = self._times
        if not times or time != times[-1]:
            times.append(time)
            del times[:-3]
        return len(times) == 3 and (times[2] - times[1]) * (times[1] - times[0]) < 0

    @property
    def is_last(self) -> bool:
        """Whether this is known to be the last step."""
        return self.step.total is not None and self.index >= self.step.total - 1


class TeaCacheState(BaseState):
    """One branch of one run."""

    def __init__(self, config: CacheConfig | None = None) -> None:
        config = config or TeaCacheConfig()
        self.history = History(0, 1.0)
        """The results of the last computed steps."""
        if isinstance(config, TeaCacheConfig):
            self.history = History(config.order, 1.0)
        self.rows = RowHistory()
        """The same by image, for the cache "auto"."""
        self.reset()

    def reset(self) -> None:
        """Forget the steps so far: they do not predict those that follow."""
        self.history.clear()
        self.rows.clear()
        self.generation = 0
        """Generation of the model when the last step was computed."""
        self.signature: Hashable = None
        """Signature of the calls in the history."""
        self.signal: Signal | None = None
        self.accumulated_rel_l1_distance = self._last_distance = 0.0
        self.skipped_in_a_row = 0
        self.early: Tensors | None = None
        """Residuals of blocks before the leader, where the output is forecast."""
        self.form: OutputForm | None = None
        """Form of the model's output, where that is forecast."""
        self.watched: Watch = {}
        self.numbers: tuple[float, ...] = ()
        self.objects: list[Any] = []
        """Tensors, numbers and other inputs that should not change."""

    def is_near(self, threshold: float) -> bool:
        """Whether another change like the last one would reach a threshold, or nothing is known about it."""
        return not self.skipped_in_a_row or self.accumulated_rel_l1_distance + self._last_distance >= threshold

    def obstacle(self, inputs: Inputs, asks: bool) -> str | None:
        """Why a step with these inputs cannot be skipped, if it cannot."""
        if not (len(self.history) or len(self.rows)) or (asks and self.signal is None):
            return "nothing stored"
        if inputs.signature != self.signature:
            return "the shapes, dtypes or set of arguments changed"
        same = inputs.numbers == self.numbers and len(inputs.objects) == len(self.objects)
        return None if same and all(map(_is_same, inputs.objects, self.objects)) else "conditioning changed"

    def computed(self, inputs: Inputs, signal: Signal | None, generation: int = 0) -> None:
        """Note a computed step; `store` keeps its result."""
        if self.signature != inputs.signature or self.numbers != inputs.numbers:
            self.reset()
        self.signature, self.numbers, self.watched = inputs.signature, inputs.numbers, watch(inputs)
        self.generation, self.objects = generation, inputs.objects
        self.signal = signal or self.signal
        self.skipped_in_a_row, self.accumulated_rel_l1_distance = 0, 0.0

    def store(self, place: float, index: int, parts: Tensors | None) -> None:
        """Add the result of a computed step to the history; without one, the history ends."""
        if parts is None:
            self.history.clear()
        else:
            self.history.push(place, parts, index)

    def store_output(self, place: float, index: int, output: Any) -> None:
        """The same for the model's output."""
        self.form, parts = take_apart(output)
        self.store(place, index, parts)

    def skipped(self, inputs: Inputs, signal: Signal | None, accumulated: float, others_changed: bool) -> None:
        """Note a skipped step."""
        self.signal = signal or self.signal
        self.skipped_in_a_row += 1
        self._last_distance = accumulated - self.accumulated_rel_l1_distance
        self.accumulated_rel_l1_distance = accumulated
        if others_changed:  # Changes add up from step to step, like the signal's.
            self.watched = watch(inputs)

    def forecast_output(self, outlook: Outlook) -> Any:
        """The output of a skipped step, where outputs are forecast."""
        assert self.form is not None
        return self.form.rebuild(outlook)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one is other or (isinstance(one, (list, tuple, dict, set)) and type(one) is type(other))
