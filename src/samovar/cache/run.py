"""A call of the denoiser, the run and step that it belongs to, and the history of its guidance branch.

The sample and the time change at every step. Conditioning stays the same: if it changes, a new history begins. Anything
else that changes from step to step, such as the residuals of a ControlNet, affects the output in a way that the sample
does not show; its change counts in proportion to its size.

A denoiser is called once per step for each branch. In a pipeline, the scheduler knows the step. In a user's own loop, a
step begins when a branch is called again, at another time and with another sample, and a run begins when time turns
back. The history of a branch is what it computed, from which inputs, and weighted sums of that: a sum costs one pass
over each stored tensor, and no synchronisation.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import nested
from ..hooks import BaseState, Position, Roles, Run
from ..hooks.roles import CONSTANTS, Leaves, Snapshot
from ..trace.forward import Tensors
from ..trace.skip_pass import Mode
from .error_control import ErrorControl, Step
from .signal import Pair, Signal, size
from .stats import StepRecord

NOTHING_STORED = "nothing stored"
CHANGED_WEIGHTS = "weights or adapters changed"
CHANGED_INPUT = "another input changed"
_MAX_COMPARED = 16384
"""Number of elements compared to see how much a tensor has changed."""
Time = torch.Tensor | float | None
Forward = Callable[[Any, Any], Any]
"""The model's own forward, of arguments and keyword arguments."""


# ------------------------------------------------------------------------------------------------ a call


class Call:
    """One call of the denoiser."""

    branch: str
    run: CachedRun
    state: TeaCacheState
    step: Step
    is_again: bool
    """Its branch was already called in this step."""
    has_gap: bool
    """Its branch missed the step before."""
    generation: int
    """That of the model."""

    def __init__(self, forward: Forward, args: Any, kwargs: Any, leaves: Leaves, roles: Roles) -> None:
        self.args, self.kwargs = args, kwargs
        self.samples: list[torch.Tensor] = []
        """The sample, or its parts."""
        self.lists_samples = False
        """Whether the samples are in a list: each is an image then."""
        self.time: torch.Tensor | float | None = None
        """As given. Of several numbers the largest counts: frames that are given are at time 0."""
        self.conditioning: dict[str, Any] = {}
        """What must stay the same, by path."""
        self.residuals: list[torch.Tensor] = []
        """Tensors that may change, and are neither sample nor time."""
        self.tensors = [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)]
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.forward, self._leaves, self._learned = forward, leaves, roles
        self._roles = roles.of_each(leaves)
        for path, role in self._roles.items():
            leaf = leaves[path]
            is_tensor = isinstance(leaf, torch.Tensor)
            if role == "time":
                if isinstance(leaf, (np.generic, np.ndarray)) and leaf.size == 1:
                    leaf = leaf.item()
                if self.time is None and isinstance(leaf, (torch.Tensor, int, float)):
                    self.time = leaf
            elif is_tensor and role == "sample":
                self.samples.append(leaf)
                self.lists_samples = path.rpartition(".")[2].isdigit()
            elif is_tensor and role == "residual" and nested.is_comparable(leaf):
                self.residuals.append(leaf)
            else:
                self.conditioning[path] = leaf

    def compute(self) -> Any:
        """What the model itself returns."""
        return self.forward(self.args, self.kwargs)

    @functools.cached_property
    def signature(self) -> Hashable:
        """Equal for two calls that do the same with their blocks."""
        kind = self.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        form = [
            (path, (leaf.shape, leaf.dtype, leaf.device))
            if type(leaf) is torch.Tensor and not leaf.is_nested
            else (path, leaf if isinstance(leaf, CONSTANTS) else nested.signature(leaf))
            for path, leaf in self._leaves.items()
            if self._roles[path] != "time"
        ]
        return torch.get_autocast_dtype(kind) if casts else None, *form

    def copied(self) -> Call:
        """The same with tensors and containers that nobody else writes into."""
        copies = {id(tensor): tensor.clone() for tensor in self.tensors}
        args, kwargs = nested.map_tensors(
            lambda one: copies[id(one)] if id(one) in copies else one.clone(), (self.args, self.kwargs)
        )
        leaves = {path: copies.get(id(leaf), leaf) for path, leaf in self._leaves.items()}
        return Call(self.forward, args, kwargs, leaves, self._learned)

    def at_another_step(self, output: Any, with_time: bool = True) -> tuple[Any, Any]:
        """Arguments with another sample, and at another time. Where no argument is known to be the sample, it is what
        has the form of the output, or else everything but the time."""
        shapes = {nested.shape(tensor) for tensor in nested.tensors(output)}
        alike = [tensor for tensor in self.tensors if nested.shape(tensor) in shapes]
        samples = set(map(id, [*self.residuals, *(self.samples or alike or self.conditioning.values())]))

        def other(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is self.time:
                return _later(tensor) if with_time else tensor
            is_moved = id(tensor) in samples and tensor.is_floating_point()
            return tensor + torch.ones_like(tensor).cumsum(-1) if is_moved else tensor

        args, kwargs = nested.map_tensors(other, (self.args, self.kwargs))
        return args, kwargs

    def side_effect(self, before: list[torch.Tensor], output: Any) -> str | None:
        """What the forward did that a skipped one would not do, if anything. `before`: copies of its tensors."""
        known = set(map(id, self.tensors))
        is_filled = not known.issuperset(map(id, nested.tensors((self.args, self.kwargs))))
        if is_filled or not all(map(_has_same_numbers, self.tensors, before)):
            return "it writes into its inputs"
        return None if nested.is_transparent(output) else "its output holds objects that cannot be inspected"


def _has_same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN included, where that can be seen."""
    if not nested.is_comparable(one):
        return True
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _later(time: torch.Tensor) -> torch.Tensor:
    """A very different time, whether times go from 0 to 1 or to 1000, which a model that counts in integers takes."""
    if time.is_floating_point():
        half = torch.where(time.abs() > 1.5, 500.0, 0.5)  # In the other half, in case a model rounds it coarsely.
        return torch.where(time > half, 0.3 * time, 1.4 * half + 0.3 * time).to(time.dtype)
    return torch.where(time < 2, 1 - time, time // 8)


# ------------------------------------------------------------------------------------------------ a branch


class Output:
    """What a computed step returned."""

    def __init__(self, place: float, value: Any) -> None:
        """`value`: with copies of its tensors, which their owner may change."""
        self.place, self.value, self.form = place, value, nested.signature(value)
        self.tensors = list(nested.tensors(value))
        self.numbers = [tensor for tensor in self.tensors if tensor.is_floating_point() and tensor.dim()]
        """The tensors that can be forecast."""
        self.is_flat = type(value) is tuple and len(value) == len(self.tensors) == sum(map(torch.is_tensor, value))
        """Whether it is a plain tuple of tensors, which pipelines ask for."""


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
        self.made_of: tuple[int, Hashable] | None = None
        """The generation of the model, and the form of inputs."""
        self.conditioning: dict[str, Snapshot] = {}
        self._residuals: list[tuple[weakref.ref[torch.Tensor], int | None, torch.Tensor]] = []
        """Those among the inputs, as they were: version, and some elements."""

    def changes(self, call: Call) -> list[Pair]:
        """How much each residual has changed that is not what it was."""
        return [
            [size(_some(now) - some), size(some)]
            for now, (ref, version, some) in zip(call.residuals, self._residuals, strict=True)
            if ref() is not now or version is None or version != nested.version(now)
        ]

    def note_computed(self, call: Call, signal: Signal | None = None) -> None:
        """A step was computed; its result is stored by others."""
        if self.made_of is None:
            self.conditioning = {path: Snapshot(value) for path, value in call.conditioning.items()}
        self.made_of = call.generation, call.signature
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
        sums = [_sum(parts, list(factors.values())) for parts in zip(*[one.tensors for one in known], strict=True)]
        if known[0].is_flat:
            return tuple(sums)
        left = iter(sums)
        return nested.map_tensors(lambda _: next(left), known[0].value)


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
        position = None if run is None or self._is_misled else run.position()
        if position is not None and last is not None and last.step == position.step == self.step.index:
            position = None if self._goes_on(call) else position
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
        self._calls[branch] = _Last(index, time, Snapshot(next(iter(call.samples), None)))
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

    def _goes_on(self, call: Call) -> bool:
        """Whether time goes on at the same step: the pipeline steps another scheduler than its own."""
        time, before = self._read(call.time), self._read(self._step_time)
        self._is_misled = time is not None and before is not None and time != before
        return self._is_misled

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
