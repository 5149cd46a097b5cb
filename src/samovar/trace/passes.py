"""What does each block do in this forward: compute, or hand on its input?

On a skipped step no block runs. Every block of a segment hands its streams on but the last, which returns the segment's
first input plus the residual, whatever the model did to the streams in between: that is in the residual. What stands
between blocks returns zeros. The forward itself always runs to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol

import torch

from .. import tree
from ..arch.blocks import output_values
from ..hooks import NOT_BYPASSED
from .forward import Call, Given, Segment, Tensors, Trace, added, alike
from .gates import Gate

Mode = Literal["compute", "skip", "ask"]


class Outlook(Protocol):
    """What the residuals of a skipped step are expected to be."""

    @property
    def device(self) -> torch.device: ...

    def has(self, index: int) -> bool:
        """Whether the residual of a slot is known."""

    def value(self, index: int) -> torch.Tensor | None:
        """The residual of a slot."""

    def added_to(self, base: torch.Tensor, index: int) -> torch.Tensor:
        """The same, added to a tensor."""


class StepPass:
    """One forward through blocks that were traced before."""

    def __init__(
        self,
        trace: Trace,
        mode: Mode,
        outlook: Outlook | None = None,
        choose: Callable[[Given], Mode] | None = None,
        poison: tuple[int, float] | None = None,
        *,
        keeps: Collection[Segment] | None = None,
    ) -> None:
        """Without an outlook, a skipped step hands its streams on unchanged: its output is not used.

        `choose` is asked at the leading block, with its arguments, how to go on. `poison` is a slot, and a number to
        put in the place of its residual. `keeps`: the segments whose residuals are wanted of a
        computed step, by default all.
        """
        self.mode = mode
        """`ask` computes until the leading block has chosen."""
        self.lost: str | None = None
        """Why this forward is not like the trace, if it is not. The output of a skipped step is then of no use."""
        self.inputs: dict[Segment, list[Any]] = {}
        """What reached the first block of each segment."""
        self._trace = trace
        self._calls = trace.calls
        self._count = len(trace.calls)
        self._position = 0
        self._outlook = outlook
        self._choose = choose
        self._poison = poison
        self._keeps = trace.segments if keeps is None else keeps
        self._current: Call | None = None
        self._residuals: dict[Segment, Tensors] = {}
        self._versions: dict[Segment, list[int | None]] = {}

    @property
    def residuals(self) -> Tensors | None:
        """What each segment added to its streams, in the order of the slots; None if that is not known or wanted."""
        if not self._keeps or self.lost is not None:
            return None
        nothing: dict[Segment, Tensors] = {s: [None] * len(s.stack.streams) for s in self._trace.segments}
        return [residual for parts in (nothing | self._residuals).values() for residual in parts]

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self.mode == "skip" and self.lost is None and self._position < self._count:  # Most calls of a skipped step.
            call = self._calls[self._position]
            if call.gate is gate and call.hand_on is not None:
                self._position += 1
                try:
                    return call.hand_on(args, kwargs)
                except (IndexError, KeyError):
                    self._lose(f"a block of {gate.path!r} is called in another way than before")
                    return NOT_BYPASSED
        return self._enter_slowly(gate, module, args, kwargs)

    def _enter_slowly(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self.lost is not None:
            return NOT_BYPASSED
        call = self._calls[self._position] if self._position < self._count else None
        if call is None or call.gate is not gate:
            # A list whose members run between blocks at times may well be called at others.
            if gate.stack is not None and gate.path not in self._trace.side:
                self._lose(f"a block of {gate.path!r} was not expected here")
            return NOT_BYPASSED
        self._position += 1
        try:
            return self._enter(call, Given(module, args, kwargs))
        except (IndexError, KeyError):
            self._lose(f"a block of {gate.path!r} is called in another way than before")
            return NOT_BYPASSED

    def _enter(self, call: Call, given: Given) -> Any:
        if call is self._trace.leader and self._choose is not None:
            self.mode = self._choose(given)
        if self.mode == "skip":
            return self._answer(call, given)
        self._current = call
        if call.is_first and call.segment is not None and call.segment in self._keeps:
            inputs = call.read(given.args, given.kwargs)
            if call.segment.writes_in_place:
                inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
            self.inputs[call.segment] = inputs
            self._versions[call.segment] = [tree.version(v) for v in inputs if isinstance(v, torch.Tensor)]
        return NOT_BYPASSED

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        call = self._current
        segment = None if call is None or call.gate is not gate or not call.is_last else call.segment
        if segment is not None and segment in self._keeps:
            idle = self._trace.idle_slots
            before = self.inputs[segment]
            if [tree.version(v) for v in before if isinstance(v, torch.Tensor)] != self._versions[segment]:
                segment.writes_in_place = True
                self._lose(f"what the blocks of {gate.path!r} were given was overwritten")
                return
            try:
                self._residuals[segment] = added(self.inputs.pop(segment), output, segment.slot, idle)
            except ValueError:
                self._lose(f"a block of {gate.path!r} returned something of another form than before")

    def finish(self) -> None:
        """Called when the forward has returned."""
        if self.lost is None and self._position < self._count:
            self._lose(f"the forward ended before {self._calls[self._position].gate.path!r}")

    def _answer(self, call: Call, given: Given) -> Any:
        values = call.read(given.args, given.kwargs)
        if call.segment is not None:
            if call.is_first:  # As copies: the model may write into what blocks hand on, between them.
                self.inputs[call.segment] = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            if call.is_last and self._outlook is not None:
                values = self._with_residuals(call, call.segment, self._outlook)
        return self._trace.answer(call, values, given.args, given.kwargs)

    def _with_residuals(self, call: Call, segment: Segment, outlook: Outlook) -> list[Any]:
        values: list[Any] = []
        forms = zip(self.inputs[segment], output_values(call.returned), strict=True)
        for slot, (base, form) in enumerate(forms, start=segment.slot):
            if self._poison is not None and slot == self._poison[0]:
                number = torch.full((), self._poison[1], dtype=form.dtype, device=outlook.device)
                values.append(number.expand(form.shape))
            elif slot in self._trace.idle_slots or not isinstance(form, torch.Tensor) or not outlook.has(slot):
                values.append(base)
            elif alike(base, form):
                values.append(outlook.added_to(base, slot).to(form.dtype))
            else:
                values.append(outlook.value(slot))
        return values

    def _lose(self, why: str) -> None:
        self.lost, self._current = why, None
