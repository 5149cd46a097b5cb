"""What does each block do in this forward: compute, or hand on what it was given?

On a skipped step no block runs. Every block of a segment hands its streams on but the last, which
returns the segment's first input plus the residual, whatever the model did to the streams in between:
that is in the residual. What stands between blocks returns zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..arch.blocks import output_values
from ..hooks import NOT_BYPASSED
from .forecast import Outlook
from .memo import Memo, equal
from .schedule import Mode
from .trace import Call, Desynchronised, Gate, OuterCall, Segment, Trace, added, alike

Lead = Callable[[Call, "Given", bool], Mode]
"""Called at the leading block with what it is given, and with whether anything before it was left out on the chance
that the step is skipped; says how to go on."""


class Given(NamedTuple):
    """A block and what it was called with."""

    block: torch.nn.Module
    args: Any
    kwargs: Any


class Recompute(Exception):
    """The step is to be computed after all, and not everything before the leader has been run."""


class Passage:
    """One forward through blocks that were traced before."""

    def __init__(
        self,
        trace: Trace,
        mode: Mode,
        outlook: Outlook | None = None,
        lead: Lead | None = None,
        memo: Memo | None = None,
        poisoned_slot: int | None = None,
    ) -> None:
        self.mode = mode
        """`ask` computes what sees the sample, and skips what does not, until the leader says more."""
        self.synchronised = True
        self.guessed = False
        """Whether something before the leader has not been run, on the chance that the whole step is skipped."""
        self.inputs: dict[Segment, list[Any]] = {}
        """What reached the first block of each segment."""
        self.given: dict[Segment, Given] = {}
        """On a skipped step: the same, as it was given."""
        self.outer: dict[OuterCall, Any] = {}
        """Without a memo: what each of the modules before the stacks returned."""
        self.outer_inputs: dict[OuterCall, Any] = {}
        """Without a memo: what each of them was given."""
        self.nested: dict[OuterCall, tuple[OuterCall, ...]] = {}
        """Without a memo: inside which others of them each was called."""
        self._trace = trace
        self._calls = trace.calls
        self._position = 0
        self._outlook = outlook
        self._lead = lead
        self._memo = memo
        self._poisoned_slot = poisoned_slot
        self._current: Call | None = None
        self._counts: dict[Gate, int] = {}
        self._open: list[OuterCall] = []
        self._residuals: dict[Segment, list[torch.Tensor | None]] = {}

    @property
    def residuals(self) -> list[torch.Tensor | None]:
        """What each segment added to its streams, in the order of the slots."""
        return [residual for segment in self._trace.segments for residual in self._residuals[segment]]

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        try:
            call = self._calls[self._position]
        except IndexError:
            return self._unexpected(gate, args, kwargs)
        if call.gate is not gate:
            return self._unexpected(gate, args, kwargs)
        self._position += 1
        if self.mode == "skip" and call.hand_on is not None:
            try:
                return call.hand_on(args, kwargs)
            except (IndexError, KeyError):
                raise call.restyled() from None
        return self._enter(call, Given(module, args, kwargs))

    def _enter(self, call: Call, given: Given) -> Any:
        if call is self._trace.leader and self._lead is not None:
            mode = self._lead(call, given, self.guessed)
            if mode == "compute" and self.guessed:
                raise Recompute
            self.mode = mode
        if self.mode == "skip":
            return self._answer(call, given)
        if self.mode == "ask" and call.segment is not None and not call.segment.sees_sample:
            self.guessed = True
            return self._answer(call, given)
        self._current = call
        if call.is_first and call.segment is not None:
            self.inputs[call.segment] = call.read(given.args, given.kwargs)
        return NOT_BYPASSED

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        if gate.is_outer:
            if self._position == 0:
                self._leave_outer(output)
            return
        call = self._current
        if call is not None and call.gate is gate and call.is_last and call.segment is not None:
            segment, idle = call.segment, self._trace.idle_slots
            try:
                self._residuals[segment] = added(self.inputs.pop(segment), output, segment.slot, idle)
            except ValueError:
                self._lost(f"a block of {gate.path!r} returned something of another form than before")

    def _enter_outer(self, gate: Gate, args: Any, kwargs: Any) -> Any:
        if self._position > 0:
            return NOT_BYPASSED
        number = self._counts.get(gate, 0)
        self._counts[gate] = number + 1
        call = gate, number
        if self._memo is not None and call in self._trace.trusted:
            answer = self._memo.recall(call)
            if answer is not NOT_BYPASSED:
                return answer
        self._open.append(call)
        if self._memo is None:
            self.outer_inputs[call] = args, kwargs
        return NOT_BYPASSED

    def _leave_outer(self, output: Any) -> None:
        call = self._open.pop()
        if self._memo is None:
            self.outer[call], self.nested[call] = output, tuple(self._open)
        elif call in self._trace.constants:
            before = self._memo.recall(call)
            if before is NOT_BYPASSED:
                self._memo.keep(call, output)
            elif equal(before, output):
                self._trace.trusted.add(call)
            else:
                self._trace.constants -= {call}
                self._trace.trusted.discard(call)

    def finish(self) -> None:
        """Called when the forward has returned."""
        if self._position < len(self._calls):
            self._lost(f"the forward ended before {self._calls[self._position].gate.path!r}")

    def _answer(self, call: Call, given: Given) -> Any:
        values = call.read(given.args, given.kwargs)
        if call.segment is not None:
            if call.is_first:
                self.inputs[call.segment] = values
                self.given[call.segment] = given
            if call.is_last:
                values = self._with_residuals(call, call.segment)
        return self._trace.answer(call, values, given.args, given.kwargs)

    def _with_residuals(self, call: Call, segment: Segment) -> list[Any]:
        assert self._outlook is not None
        values: list[Any] = []
        forms = zip(self.inputs[segment], output_values(call.returned), strict=True)
        for slot, (base, form) in enumerate(forms, start=segment.slot):
            if slot == self._poisoned_slot:
                values.append(
                    torch.full((), torch.nan, dtype=form.dtype, device=self._outlook.device).expand(form.shape)
                )
            elif slot in self._trace.idle_slots or not isinstance(form, torch.Tensor):
                values.append(base)
            elif alike(base, form):
                values.append(self._outlook.added_to(base, slot).to(form.dtype))
            else:
                values.append(self._outlook.value(slot))
        return values

    def _unexpected(self, gate: Gate, args: Any, kwargs: Any) -> Any:
        if gate.is_outer:
            return self._enter_outer(gate, args, kwargs)
        # What stands between blocks at times may well be called at others.
        if gate.stack is not None and gate.path not in self._trace.side:
            self._lost(f"a block of {gate.path!r} was not expected here")
        return NOT_BYPASSED

    def _lost(self, why: str) -> None:
        self.synchronised, self._current = False, None
        if self.mode != "compute":
            raise Desynchronised(why)
