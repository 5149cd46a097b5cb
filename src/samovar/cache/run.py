"""A run of a denoiser: the step of it that a call belongs to, and the history of each guidance branch.

A denoiser is called once per step for each branch. In a pipeline, the scheduler knows the step. In a user's own loop, a
step begins when a branch is called again, at another time and with another sample, and a run begins when time turns
back. The history of a branch is what it computed, from which inputs, and weighted sums of that: a sum costs one pass
over each stored tensor, and no synchronisation.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..core import nested
from ..hooks import BaseState, Position, Run
from ..hooks.roles import Snapshot, moved
from ..trace.forward import Tensors
from ..trace.skip_pass import Mode
from .call import Call, Step
from .error_control import ErrorControl
from .signal import Pair, Signal, size
from .stats import StepRecord

NOTHING_STORED = "nothing stored"
CHANGED_WEIGHTS = "weights or adapters changed"
CHANGED_CONDITIONING = "conditioning changed"
CHANGED_INPUT = "another input changed"
_MAX_COMPARED = 16384
"""Number of elements compared to see how much a tensor has changed."""
Time = torch.Tensor | float | None


# ------------------------------------------------------------------------------------------------ a branch


class Output:
    """What a computed step returned."""

    def __init__(self, place: float, value: Any) -> None:
        """`value`: with copies of its tensors, which their owner may change."""
        self.place, self.value, self.form = place, value, nested.signature(value)
        self.tensors = list(nested.tensors(value))
        self.numbers = [tensor for tensor in self.tensors if tensor.is_floating_point() and tensor.dim()]
        """The tensors that can be forecast."""


class TeaCacheState(BaseState):
    """One branch of one run."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the steps so far: they do not predict those that follow."""
        self.residuals: Tensors | None = None
        """What the blocks added at the last computed step."""
        self.outputs: dict[int, Output] = {}
        """By step, what the model returned, where whole outputs are forecast."""
        self.signal: Signal | None = None
        self.accumulated_rel_l1_distance = 0.0
        self.skipped_in_a_row = 0
        self._made_of: tuple[int, Hashable] | None = None
        """The generation of the model, and the form of inputs."""
        self._conditioning: dict[str, Snapshot] = {}
        self._residuals: list[tuple[weakref.ref[torch.Tensor], int | None, torch.Tensor]] = []
        """Those among the inputs, as they were: version, and some elements."""

    def obstacle(self, call: Call) -> str | None:
        """Why what is stored cannot stand for a step with these inputs, if it cannot. Then it is forgotten. This waits
        for the device where conditioning is in other tensors."""
        why = None
        if self._made_of is None or (self.residuals is None and not self.outputs):
            why = NOTHING_STORED
        elif call.generation != self._made_of[0]:
            why = CHANGED_WEIGHTS
        elif call.signature != self._made_of[1]:
            why = "the shapes, dtypes or set of arguments changed"
        elif moved(self._conditioning, call.conditioning, self._conditioning):
            why = CHANGED_CONDITIONING
        if why is not None:
            self.reset()
        return why

    def changes(self, call: Call) -> list[Pair]:
        """How much each residual has changed that is not what it was."""
        return [
            [size(_some(now) - some), size(some)]
            for now, (ref, version, some) in zip(call.residuals, self._residuals, strict=True)
            if ref() is not now or version is None or version != nested.version(now)
        ]

    def note_computed(self, call: Call, signal: Signal | None = None) -> None:
        """A step was computed; its result is stored by others."""
        if self._made_of is None:
            self._conditioning = {path: Snapshot(value) for path, value in call.conditioning.items()}
        self._made_of = call.generation, call.signature
        self.skipped_in_a_row, self.accumulated_rel_l1_distance = 0, 0.0
        self.signal = signal or self.signal
        self.watch(call)

    def note_skipped(self, signal: Signal | None = None, total: float = 0.0) -> None:
        """A step was skipped."""
        self.signal, self.accumulated_rel_l1_distance = signal or self.signal, total
        self.skipped_in_a_row += 1

    def watch(self, call: Call) -> None:
        """Compare residuals with these from now on."""
        self._residuals = [(weakref.ref(one), nested.version(one), _some(one)) for one in call.residuals]

    def combined(self, weights: Mapping[int, float]) -> Any:
        """A weighted sum of outputs, by step; None if one of them is not stored."""
        factors = {step: weights[step] for step in sorted(weights, reverse=True) if weights[step]}
        if not factors or not factors.keys() <= self.outputs.keys():
            return None
        known = [self.outputs[step] for step in factors]
        parts = zip(*[output.tensors for output in known], strict=True)
        return nested.map_tensors(lambda _: _sum(next(parts), list(factors.values())), known[0].value)


def _sum(tensors: Sequence[torch.Tensor], weights: list[float]) -> torch.Tensor:
    newest, *older = tensors
    if not (newest.is_floating_point() or newest.is_complex()):  # Integers cannot be interpolated.
        return newest.clone()
    # Large weights that nearly cancel need 32 bits.
    total = newest.to(torch.promote_types(newest.dtype, torch.float32)) * weights[0]
    for tensor, weight in zip(older, weights[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total.to(newest.dtype)


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of elements spread over a tensor: few enough to keep, and enough to show how much it has changed."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return nested.spread(real, _MAX_COMPARED).to(torch.float32, copy=True)


# ------------------------------------------------------------------------------------------------ a run


class Verdict(NamedTuple):
    """What to do with a step, and why. `ask` leaves it to the signal."""

    action: Mode
    reason: str


class _Last(NamedTuple):
    """A branch's last call."""

    step: int
    time: float | None
    sample: Snapshot


class CachedRun:
    """One run: its steps, and what belongs to all of its branches."""

    def __init__(self, announced: int | None = None, waits: bool = True) -> None:
        """`announced`: number of steps, where no pipeline says it. `waits`: also reads times that are on a device."""
        self.step = Step(-1)
        self.branches: dict[Hashable, TeaCacheState] = {}
        self.records: dict[str, list[StepRecord]] = {}
        self.control: ErrorControl | None = None
        """That of `auto`."""
        self.verdict: Verdict | None = None
        """What the first branch of the running step has decided for those called after it."""
        self.is_over = False
        self._calls: dict[Hashable, _Last] = {}
        """The last of each branch."""
        self._announced, self._waits = announced, waits
        self._loop: Any = None
        self._is_misled = False
        """Whether the pipeline steps a copy of its scheduler."""
        self._step_time: Time = None
        self._times: list[float] = []

    def end(self) -> None:
        """Keep the records alone."""
        vars(self).update(vars(CachedRun()), records=self.records, is_over=True)

    def advance(self, call: Call, run: Run | None) -> bool:
        """Go to the step that a call belongs to; False if it begins a new run."""
        branch = call.branch
        last = self._calls.get(branch)
        position = self._position(last, run, call)
        if position is not None:
            time, index, loop = None, position.step, position.loop
            call.is_again = last is not None and last.step == position.step
        else:  # By time and sample, where no scheduler counts.
            time, loop = self._read(call.time), None if run is None else run.loop()
            if run is None and time is not None and self._turns_back(time):
                return False
            call.is_again = last is not None and self._is_same(last, time, call)
            index = self.step.index + (not call.is_again and self._is_next(last, time))
        if index < self.step.index or (self._loop is not None and loop is not self._loop):
            return False
        self._loop = loop
        if index > self.step.index:
            self._step_time, self.step, self.verdict = call.time, self._step(index, position, run), None
        self._calls[branch] = _Last(index, time, Snapshot(call.samples[0] if call.samples else None))
        call.has_gap = last is not None and index > last.step + 1
        call.run, call.step = self, self.step
        return True

    def _step(self, index: int, position: Position | None, run: Run | None) -> Step:
        if position is None:
            total = self._announced if run is None else run.total()
            return Step(index, float(index), 1.0, total, total)
        sigma, total = position.sigma, position.total
        if sigma is None:
            return Step(index, float(index), 1.0, total, position.length)
        return Step(index, -sigma, abs(sigma - position.next_sigma), total, position.length)

    def _position(self, last: _Last | None, run: Run | None, call: Call) -> Position | None:
        """What the scheduler says, unless the pipeline steps another one: then times go on at the same step."""
        position = None if run is None or self._is_misled else run.position()
        if position is not None and last is not None and last.step == position.step == self.step.index:
            time, before = self._read(call.time), self._read(self._step_time)
            self._is_misled = time is not None and before is not None and time != before
        return None if self._is_misled else position

    @staticmethod
    def _is_same(last: _Last, time: float | None, call: Call) -> bool:
        """Whether a call is at the time of its branch's last one, or has its sample: a step may have several calls."""
        if time is not None and time == last.time:
            return True
        sample = next(iter(call.samples), None)
        return sample is not None and last.sample.held is sample and last.sample.is_same(sample)

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
