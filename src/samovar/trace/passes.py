"""What does each block do in this forward: compute, or hand on its input? And may it be skipped at all?

On a skipped step no block runs. Every block of a segment hands its streams on except the last, which returns the
segment's first input plus the residual; the residual includes whatever the model did to the streams in between. Modules
between blocks return zeros. The forward itself always runs to its end.

A rehearsal skips, on the model's shadow, a step that was just computed: the outputs must agree. Skipped again with
another sample at another time, the forward shows which stack sees the sample, and so leads. With numbers in place of a
residual, it shows whether that residual has any effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from ..arch.blocks import output_values
from ..core import nested
from ..core.errors import ModelError
from ..hooks import NOT_BYPASSED
from .forward import Call, Given, Segment, Tensors, Trace, Watched, added, alike
from .shadow import Shadow, TrialFailed, trial
from .watch import Gate

Mode = Literal["compute", "skip", "ask"]


class StepPass:
    """One forward through blocks that were traced before."""

    def __init__(
        self,
        trace: Trace,
        mode: Mode,
        expected: Tensors | None = None,
        choose: Callable[[Given], Mode] | None = None,
        poison: tuple[int, float] | None = None,
    ) -> None:
        """`expected`: the residuals of a skipped step. Without them it hands its streams on unchanged, and its output
        is not used. `choose` picks the mode at the leading block, from its arguments. `poison` is a slot, and a number
        to put in place of its residual.
        """
        self.mode = mode
        """`ask` computes until the leading block has chosen."""
        self.lost: str | None = None
        """Why this forward does not follow the trace, if it does not. A skipped step's output is then useless."""
        self.inputs: dict[Segment, list[Any]] = {}
        """What reached the first block of each segment."""
        self._trace = trace
        self._calls = trace.calls
        self._count = len(trace.calls)
        self._position = 0
        self._expected = expected
        self._choose = choose
        self._poison = poison
        self._current: Call | None = None
        self._residuals: dict[Segment, Tensors] = {}
        self._versions: dict[Segment, list[int | None]] = {}

    @property
    def residuals(self) -> Tensors | None:
        """What each segment added to its streams, in the order of the slots; None if unknown."""
        if self.lost is not None:
            return None
        nothing: dict[Segment, Tensors] = {s: [None] * len(s.stack.streams) for s in self._trace.segments}
        return [residual for parts in (nothing | self._residuals).values() for residual in parts]

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self.lost is not None:
            return NOT_BYPASSED
        call = self._calls[self._position] if self._position < self._count else None
        if call is None or call.gate is not gate:
            # Members of a list that runs between blocks may be called at other times too.
            if gate.stack is not None and gate.path not in self._trace.side:
                self._lose(f"a block of {gate.path!r} was not expected here")
            return NOT_BYPASSED
        self._position += 1
        try:
            if call.hand_on is not None and self.mode == "skip":  # Most calls of a skipped step.
                return call.hand_on(args, kwargs)
            return self._enter(call, Given(module, args, kwargs))
        except (IndexError, KeyError):
            self._lose(f"a block of {gate.path!r} got other arguments than in the traced forward")
            return NOT_BYPASSED

    def _enter(self, call: Call, given: Given) -> Any:
        if call is self._trace.leader and self._choose is not None:
            self.mode = self._choose(given)
        if self.mode == "skip":
            return self._answer(call, given)
        self._current = call
        if call.is_first and call.segment is not None:
            inputs = call.read(given.args, given.kwargs)
            if call.segment.writes_in_place:
                inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
            self.inputs[call.segment] = inputs
            self._versions[call.segment] = _versions(inputs)
        return NOT_BYPASSED

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        call = self._current
        segment = None if call is None or call.gate is not gate or not call.is_last else call.segment
        if segment is not None:
            if _versions(self.inputs[segment]) != self._versions[segment]:
                segment.writes_in_place = True
                self._lose(f"the inputs of the blocks of {gate.path!r} were overwritten")
                return
            try:
                self._residuals[segment] = added(self.inputs.pop(segment), output, segment.slot, self._trace.idle_slots)
            except ValueError:
                self._lose(f"a block of {gate.path!r} returned other shapes than in the traced forward")

    def finish(self) -> None:
        """Called when the forward has returned."""
        if self.lost is None and self._position < self._count:
            self._lose(f"the forward ended before it called a block of {self._calls[self._position].gate.path!r}")

    def _answer(self, call: Call, given: Given) -> Any:
        values = call.read(given.args, given.kwargs)
        if call.segment is not None:
            if call.is_first:  # Copies: the model may write, between blocks, into what they hand on.
                self.inputs[call.segment] = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            if call.is_last and self._expected is not None:
                values = self._with_residuals(call, call.segment, self._expected)
        return call.answer(values, given.args, given.kwargs)

    def _with_residuals(self, call: Call, segment: Segment, expected: Tensors) -> list[Any]:
        values: list[Any] = []
        forms = zip(self.inputs[segment], output_values(call.returned), strict=True)
        for slot, (base, form) in enumerate(forms, start=segment.slot):
            residual = expected[slot]
            if residual is None or slot in self._trace.idle_slots or not isinstance(form, torch.Tensor):
                values.append(base)
            elif self._poison is not None and slot == self._poison[0]:
                number = torch.full((), self._poison[1], dtype=form.dtype, device=residual.device)
                values.append(number.expand(form.shape))
            else:
                values.append((base + residual).to(form.dtype) if alike(base, form) else residual.clone())
        return values

    def _lose(self, why: str) -> None:
        self.lost, self._current = why, None


def _versions(values: Sequence[Any]) -> list[int | None]:
    return [nested.version(value) for value in values if isinstance(value, torch.Tensor)]


Perturb = Callable[[bool], tuple[Any, Any]]
"""Makes arguments of the model with another sample and, if asked to, at another time."""
Rehearsed = tuple[Given, Given | None]
"""Arguments of the leading block, and the same with another sample at another time."""


class Replay(Shadow):
    """Forwards of a model's shadow in which no block runs. The model itself is not called."""

    def __init__(self, model: torch.nn.Module, gates: Mapping[torch.nn.Module, Gate], trace: Trace) -> None:
        self._gates = gates
        self._first = {call.gate: call.segment for call in trace.calls if call.is_first and call.segment is not None}
        self._step: StepPass | None = None
        self._keeps_calls = False
        self.first_calls: dict[Segment, Given] = {}
        """The arguments of the first block of each segment in the last forward, as copies, if they were kept."""
        super().__init__(model, dict.fromkeys(gates, self._answer))

    def skip(self, step: StepPass, args: Any, kwargs: Any, *, keeps_calls: bool = False) -> Any:
        """The output of a forward through this pass; TrialFailed if the model raises."""
        self._step, self._keeps_calls, self.first_calls = step, keeps_calls, {}
        try:
            output = self.run(args, kwargs)
        finally:
            self._step = None
        step.finish()
        return output

    def _answer(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self._step is None:
            return NOT_BYPASSED
        gate = self._gates[module]
        segment = self._first.get(gate)
        if self._keeps_calls and segment is not None and segment not in self.first_calls:
            self.first_calls[segment] = Given(module, args, kwargs).copied()
        return self._step.enter(gate, module, args, kwargs)


class Rehearsal(Replay):
    """Tries skipped steps on a model's shadow."""

    def __init__(
        self, model: torch.nn.Module, gates: Mapping[torch.nn.Module, Gate], watched: Watched, args: Any, kwargs: Any
    ) -> None:
        self._trace, self._residuals, self._calls = watched
        self._given = args, kwargs
        super().__init__(model, gates, watched.trace)

    def rehearse(self, output: Any, perturb: Perturb) -> Rehearsed:
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
            return self._calls[segment], self._at_another_time(perturb, segment)
        finally:
            self.close()

    def _skip(self, args: Any, kwargs: Any, poison: tuple[int, float] | None = None) -> tuple[StepPass, Any]:
        step = StepPass(self._trace, "skip", self._residuals, poison=poison)
        return step, self.skip(step, args, kwargs, keeps_calls=True)

    def _same(self, output: Any) -> tuple[StepPass, Any]:
        """The step that was just computed, skipped, if that gives what it gave."""
        try:
            same, skipped = self._skip(*self._given)
        except TrialFailed as error:
            raise ModelError(f"a trial of the model failed ({error})") from error
        if same.lost is not None:
            raise ModelError(f"the blocks are not called in the same order each time: {same.lost}")
        difference = nested.difference(skipped, output)
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
            raise ModelError(f"could not test which blocks depend on the sample ({error})") from error

    def _find_leader(self, same: StepPass, other: StepPass) -> None:
        """The first segment that another sample reaches leads, unless one is declared."""
        trace = self._trace
        moved: dict[Segment | None, list[bool]] = {}
        for segment in trace.segments:
            pairs = zip(same.inputs.get(segment, ()), other.inputs.get(segment, ()), strict=False)
            moved[segment] = [isinstance(one, torch.Tensor) and not nested.equal(one, two) for one, two in pairs]
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
        return self.first_calls.get(segment)

    def _is_idle(self, slot: int, segment: Segment, expected: tuple[Any, Any]) -> bool:
        """Whether neither the output nor the signal changes with a residual."""
        for number in (torch.nan, 1e3):
            try:
                poisoned, output = self._skip(*self._given, poison=(slot, number))
            except TrialFailed:  # Something looked at it.
                return False
            if poisoned.lost is not None:
                return False
            if not nested.equal((output, poisoned.inputs[segment][self._trace.stream]), expected):
                return False
        return True


def tolerance(value: Any) -> float:
    """How far a result may be off that is computed in another order, by the precision of its tensors."""
    is_precise = all(tensor.dtype in (torch.float32, torch.float64) for tensor in nested.tensors(value))
    return 1e-4 if is_precise else 5e-2
