"""Does a skipped step give what a computed one gives, and which stack decides?

A step that was just computed is skipped on the model's shadow, with the residuals it left: the outputs must agree.
Skipped again with another sample at another time, the forward shows which stack sees the sample, and so leads. With
numbers in place of a residual, it shows whether that residual has any effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .. import tree
from ..errors import ModelError
from ..hooks import NOT_BYPASSED
from .forward import Given, Segment, Trace, Watched
from .gates import Gate
from .passes import Outlook, StepPass
from .shadow import Shadow, TrialFailed, trial

Perturb = Callable[[bool], tuple[Any, Any]]
"""Makes arguments of the model with another sample and, if asked to, at another time."""


class Replay:
    """Forwards of a model's shadow in which no block runs. The model itself is not called."""

    def __init__(self, model: torch.nn.Module, gates: Mapping[torch.nn.Module, Gate], trace: Trace) -> None:
        self._gates = gates
        self._first = {call.gate: call.segment for call in trace.calls if call.is_first and call.segment is not None}
        self._step: StepPass | None = None
        self.first_calls: dict[Segment, Given] = {}
        """The arguments of the first block of each segment in the last forward, as copies, if they were kept."""
        self._keeps_calls = False
        self._shadow = Shadow(model, dict.fromkeys(gates, self._answer))

    def run(self, step: StepPass, args: Any, kwargs: Any, *, keeps_calls: bool = False) -> Any:
        """The output of a forward through this pass; TrialFailed if the model raises."""
        self._step, self._keeps_calls = step, keeps_calls
        self.first_calls = {}
        try:
            output = self._shadow.run(args, kwargs)
        finally:
            self._step = None
        step.finish()
        return output

    def close(self) -> None:
        """Free the shadow at once: its classes form cycles that only the garbage collector would find."""
        self._shadow.close()

    def _answer(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self._step is None:
            return NOT_BYPASSED
        gate = self._gates[module]
        segment = self._first.get(gate)
        if self._keeps_calls and segment is not None and segment not in self.first_calls:
            self.first_calls[segment] = Given(module, args, kwargs).copied()
        return self._step.enter(gate, module, args, kwargs)


class Rehearsed(NamedTuple):
    """Arguments of the leading block, to find its signal with."""

    given: Given
    other: Given | None
    """The same with another sample at another time."""


class Rehearsal:
    """Tries skipped steps on a model's shadow."""

    def __init__(
        self, model: torch.nn.Module, gates: Mapping[torch.nn.Module, Gate], watched: Watched, args: Any, kwargs: Any
    ) -> None:
        self._trace, self._residuals, self._first_calls = watched
        self._outlook = Outlook([1], [watched.residuals])
        self._given = args, kwargs
        self._replay = Replay(model, gates, watched.trace)

    def run(self, output: Any, perturb: Perturb) -> Rehearsed:
        """Complete the trace: the leader, and which residuals are idle. ModelError says why nothing can be skipped."""
        try:
            same, skipped = self._same(output)
            self._find_leader(same, self._elsewhere(perturb, with_time=False))
            segment = self._trace.leader.segment
            assert segment is not None
            expected = skipped, same.inputs[segment][self._trace.stream]
            self._trace.idle_slots = frozenset(
                slot for slot, residual in enumerate(self._residuals)
                if residual is not None and residual.is_floating_point() and self._is_idle(slot, segment, expected)
            )  # fmt: skip
            return Rehearsed(self._first_calls[segment], self._at_another_time(perturb, segment))
        finally:
            self._replay.close()

    def _skip(self, args: Any, kwargs: Any, poison: tuple[int, float] | None = None) -> tuple[StepPass, Any]:
        step = StepPass(self._trace, "skip", self._outlook, poison=poison)
        return step, self._replay.run(step, args, kwargs, keeps_calls=True)

    def _same(self, output: Any) -> tuple[StepPass, Any]:
        """The step that was just computed, skipped, if that gives what it gave."""
        try:
            same, skipped = self._skip(*self._given)
        except TrialFailed as error:
            raise ModelError(f"it cannot be tried outside its run ({error})") from error
        if same.lost is not None:
            raise ModelError(f"the blocks are not called in the same order each time: {same.lost}")
        difference = tree.difference(skipped, output)
        if not difference <= tolerance(self._residuals):
            raise ModelError(f"a skipped step differs from a computed one by {difference:.1e} where they should agree")
        return same, skipped

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
        if not trace.leader_is_declared:
            starts = (call for call in trace.calls if call.is_first and any(moved.get(call.segment, ())))
            leader = next(starts, None)
            if leader is None:
                raise ModelError("the sample reaches none of its blocks directly, so nothing shows how it changes")
            trace.leader = leader
        streams = moved[trace.leader.segment]
        trace.stream = streams.index(True) if True in streams else 0

    def _at_another_time(self, perturb: Perturb, segment: Segment) -> Given | None:
        """The arguments of the leading block at another time; None if the model refuses that time."""
        try:
            self._elsewhere(perturb, with_time=True)
        except ModelError:
            return None
        return self._replay.first_calls.get(segment)

    def _is_idle(self, slot: int, segment: Segment, expected: tuple[Any, Any]) -> bool:
        """Whether neither the output nor the signal changes with a residual."""
        for number in (torch.nan, 1e3):
            try:
                poisoned, output = self._skip(*self._given, poison=(slot, number))
            except TrialFailed:  # Something looked at it.
                return False
            if poisoned.lost is not None:
                return False
            if not tree.equal((output, poisoned.inputs[segment][self._trace.stream]), expected):
                return False
        return True


def tolerance(value: Any) -> float:
    """How far a result may be off that is computed in another order, by the precision of its tensors."""
    is_precise = all(tensor.dtype in (torch.float32, torch.float64) for tensor in tree.tensors(value))
    return 1e-4 if is_precise else 5e-2
