"""What does each block do in this forward: compute, or hand on its input?

On a skipped step no block runs. Every block of a segment hands its streams on except the last, which returns the
segment's first input plus the residual; the residual includes whatever the model did to the streams in between. Modules
between blocks return zeros. The forward itself always runs to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch

from .. import tree
from ..arch.blocks import output_values
from ..hooks import NOT_BYPASSED
from .forward import Call, Given, Segment, Tensors, Trace, added, alike
from .gates import Gate

Mode = Literal["compute", "skip", "ask"]


class Outlook:
    """The expected residuals (or outputs) of a skipped step: a weighted sum of stored lists of tensors, made on
    demand."""

    def __init__(
        self, weights: Sequence[float], stored: Sequence[Sequence[torch.Tensor | None]], is_precise: bool = False
    ) -> None:
        """`is_precise`: sum 16-bit values in 32 bits, as large weights that nearly cancel need."""
        self._weights, self._stored, self._is_precise = weights, stored, is_precise

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next((tensor.device for tensor in self._stored[0] if tensor is not None), torch.device("cpu"))

    def has(self, index: int) -> bool:
        """Whether the list has a tensor at this index."""
        return self._stored[0][index] is not None

    def value(self, index: int) -> torch.Tensor | None:
        """One tensor of the list."""
        newest = self._stored[0][index]
        if newest is None:
            return None
        if not (newest.is_floating_point() or newest.is_complex()):  # Integers cannot be interpolated.
            return newest.clone()
        start = newest.to(torch.promote_types(newest.dtype, torch.float32)) if self._is_precise else newest
        return self._add_rest(start * self._weights[0], index).to(newest.dtype)

    def added_to(self, base: torch.Tensor, index: int) -> torch.Tensor:
        """One tensor of the list, added to another tensor."""
        newest = self._stored[0][index]
        assert newest is not None
        return self._add_rest(torch.add(base, newest, alpha=self._weights[0]), index)

    def _add_rest(self, total: torch.Tensor, index: int) -> torch.Tensor:
        for weight, tensors in zip(self._weights[1:], self._stored[1:], strict=True):
            older = tensors[index]
            assert older is not None
            total.add_(older, alpha=weight)
        return total


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
        """Without an outlook, a skipped step hands its streams on unchanged, and its output is not used.

        `choose` picks the mode at the leading block, from its arguments. `poison` is a slot, and a number to put in
        place of its residual. `keeps`: the segments whose residuals a computed step keeps, by default all.
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
        self._outlook = outlook
        self._choose = choose
        self._poison = poison
        self._keeps = trace.segments if keeps is None else keeps
        self._current: Call | None = None
        self._residuals: dict[Segment, Tensors] = {}
        self._versions: dict[Segment, list[int | None]] = {}

    @property
    def residuals(self) -> Tensors | None:
        """What each segment added to its streams, in the order of the slots; None if unknown or not kept."""
        if not self._keeps or self.lost is not None:
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
            self._versions[call.segment] = _versions(inputs)
        return NOT_BYPASSED

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        call = self._current
        segment = None if call is None or call.gate is not gate or not call.is_last else call.segment
        if segment is not None and segment in self._keeps:
            if _versions(self.inputs[segment]) != self._versions[segment]:
                segment.writes_in_place = True
                self._lose(f"the inputs of the blocks of {gate.path!r} were overwritten")
                return
            try:
                self._residuals[segment] = added(self.inputs.pop(segment), output, segment.slot, self._trace.idle_slots)
            except ValueError:
                self._lose(f"a block of {gate.path!r} returned another form than before")

    def finish(self) -> None:
        """Called when the forward has returned."""
        if self.lost is None and self._position < self._count:
            self._lose(f"the forward ended before {self._calls[self._position].gate.path!r}")

    def _answer(self, call: Call, given: Given) -> Any:
        values = call.read(given.args, given.kwargs)
        if call.segment is not None:
            if call.is_first:  # Copies: the model may write, between blocks, into what they hand on.
                self.inputs[call.segment] = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            if call.is_last and self._outlook is not None:
                values = self._with_residuals(call, call.segment, self._outlook)
        return call.answer(values, given.args, given.kwargs)

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


def _versions(values: Sequence[Any]) -> list[int | None]:
    return [tree.version(value) for value in values if isinstance(value, torch.Tensor)]
