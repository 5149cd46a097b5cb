"""Does a skipped step give what a computed one does, and what decides it?

A step that was just computed is skipped on the model's shadow, with the residuals it left: the outputs must agree.
Skipped once more with another sample at another time, the forward shows which stack sees the sample, and so leads; and
with numbers in place of a residual, whether that residual has any effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .. import tree
from ..errors import ModelError
from .forward import Given, Segment, Tensors, Watched
from .gates import Gate
from .passes import StepPass
from .replay import Replay
from .shadow import TrialFailed, trial

Perturb = Callable[[bool], tuple[Any, Any]]
"""Arguments of the model with another sample, and, if that is asked for, at another time."""


class Rehearsed(NamedTuple):
    """What the leading block is given, for its signal to be found."""

    given: Given
    other: Given | None
    """The same with another sample at another time."""


class Residuals:
    """The residuals of one step, as the outlook of a rehearsal."""

    def __init__(self, residuals: Tensors) -> None:
        self._residuals = residuals

    @property
    def device(self) -> torch.device:
        return next((r.device for r in self._residuals if r is not None), torch.device("cpu"))

    def has(self, index: int) -> bool:
        return self._residuals[index] is not None

    def value(self, index: int) -> torch.Tensor | None:
        return self._residuals[index]

    def added_to(self, base: torch.Tensor, index: int) -> torch.Tensor:
        residual = self._residuals[index]
        assert residual is not None
        return base + residual


class Rehearsal:
    """Tries skipped steps on a model's shadow."""

    def __init__(
        self, model: torch.nn.Module, gates: Mapping[torch.nn.Module, Gate], watched: Watched, args: Any, kwargs: Any
    ) -> None:
        self._trace, self._residuals, self._first_calls = watched
        self._outlook = Residuals(watched.residuals)
        self._given = args, kwargs
        self._replay = Replay(model, gates, watched.trace)

    def run(self, output: Any, perturb: Perturb) -> Rehearsed:
        """Complete the trace: who leads, and what is idle. ModelError says why nothing can be skipped."""
        try:
            return self._run(output, perturb)
        finally:
            self._replay.close()

    def _run(self, output: Any, perturb: Perturb) -> Rehearsed:
        trace = self._trace
        try:
            same, skipped = self._skip(*self._given)
        except TrialFailed as error:
            raise ModelError(f"it cannot be tried outside of its run ({error})") from error
        if same.lost is not None:
            raise ModelError(f"the blocks are not called in the same order each time: {same.lost}")
        difference = tree.difference(skipped, output)
        is_precise = all(r is None or r.dtype in (torch.float32, torch.float64) for r in self._residuals)
        if not difference <= (1e-4 if is_precise else 5e-2):
            raise ModelError(f"a skipped step differs from a computed one by {difference:.1e} where they should agree")
        self._find_leader(same, self._elsewhere(perturb, with_time=False))
        trace.idle_slots = frozenset(
            slot for slot, residual in enumerate(self._residuals)
            if residual is not None and residual.is_floating_point()
            and self._has_no_effect(slot, (skipped, self._leading(same)))
        )  # fmt: skip
        segment = trace.leader.segment
        assert segment is not None
        return Rehearsed(self._first_calls[segment], self._at_another_time(perturb, segment))

    def _skip(self, args: Any, kwargs: Any, poison: tuple[int, float] | None = None) -> tuple[StepPass, Any]:
        step = StepPass(self._trace, "skip", self._outlook, poison=poison)
        return step, self._replay.run(step, args, kwargs, keeps_calls=True)

    def _elsewhere(self, perturb: Perturb, *, with_time: bool) -> StepPass:
        """A skipped step with another sample."""
        try:
            with trial(self._given):
                given = perturb(with_time)
            return self._skip(*given)[0]
        except TrialFailed as error:
            raise ModelError(f"which of its blocks see the sample cannot be tried ({error})") from error

    def _find_leader(self, same: StepPass, other: StepPass) -> None:
        """The first segment that another sample reaches leads, unless one is declared."""
        trace = self._trace
        moved: dict[Segment | None, list[bool]] = {}
        for segment in trace.segments:
            pairs = zip(same.inputs.get(segment, ()), other.inputs.get(segment, ()), strict=False)
            moved[segment] = [isinstance(one, torch.Tensor) and not tree.equal(one, two) for one, two in pairs]
        starts = [call for call in trace.calls if call.is_first and call.segment is not None]
        if not trace.leader_is_declared:
            leader = next((call for call in starts if any(moved[call.segment])), None)
            if leader is None:
                raise ModelError("the sample reaches none of its blocks directly, so that nothing tells how it changes")
            trace.leader = leader
        streams = moved[trace.leader.segment]
        trace.stream = streams.index(True) if True in streams else 0

    def _at_another_time(self, perturb: Perturb, segment: Segment) -> Given | None:
        """What the leading block is given at another time; None if the model does not take such a time."""
        try:
            self._elsewhere(perturb, with_time=True)
        except ModelError:
            return None
        return self._replay.first_calls.get(segment)

    def _leading(self, step: StepPass) -> Any:
        segment = self._trace.leader.segment
        assert segment is not None
        return step.inputs[segment][self._trace.stream]

    def _has_no_effect(self, slot: int, expected: tuple[Any, Any]) -> bool:
        """Whether neither the output nor the signal changes with a residual."""
        for number in (torch.nan, 1e3):
            try:
                poisoned, output = self._skip(*self._given, poison=(slot, number))
            except TrialFailed:  # Something looked at it.
                return False
            if poisoned.lost is not None or not tree.equal((output, self._leading(poisoned)), expected):
                return False
        return True
