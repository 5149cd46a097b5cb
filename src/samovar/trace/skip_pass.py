"""Forwards in which no block runs.

Every block of a segment hands its streams on except the last, which returns the segment's first input plus the
residual; the residual includes whatever the model did to the streams in between. Modules between blocks return zeros.
The forward itself always runs to its end.

Before a model is skipped, a step that was just computed is skipped on the model's twin: the outputs must agree. Skipped
again with another sample, the forward shows which stack sees the sample, and so leads.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch

from ..arch.declarations import declaration_for
from ..core import nested
from ..core.errors import ModelError
from ..hooks import NOT_BYPASSED
from ..hooks.handle import for_now
from .forward import Call, Given, Segment, Tensors, Trace, Watched, added, alike, filled
from .gates import Gate
from .twin import Forward, TrialFailed, free, run_trial, trial, twin_of

Mode = Literal["compute", "skip", "ask"]


class StepPass:
    """One forward through blocks that were traced before."""

    def __init__(
        self,
        trace: Trace,
        mode: Mode,
        expected: Tensors | None = None,
        choose: Callable[[Given], Mode] | None = None,
    ) -> None:
        """`expected`: the residuals of a skipped step. Without them it hands its streams on unchanged, and its output
        is not used. `choose` picks the mode at the leading block, from its arguments."""
        self.mode = mode
        """`ask` computes until the leading block has chosen."""
        self.lost: str | None = None
        """Why this forward does not follow the trace, if it does not. A skipped step's output is then useless."""
        self.inputs: dict[Segment, list[Any]] = {}
        """What reached the first block of each segment, as copies: what gets them may overwrite them."""
        self._trace, self._expected, self._choose = trace, expected, choose
        self._position = 0
        self._current: Call | None = None
        self._added: dict[Segment, Tensors] = {}

    @property
    def residuals(self) -> Tensors | None:
        """What each segment added to its streams, in the order of the slots; None if unknown."""
        if self.lost is not None:
            return None
        parts = (self._added.get(each, [None] * len(each.stack.streams)) for each in self._trace.segments)
        return list(itertools.chain.from_iterable(parts))

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        call, given = self._next(gate), Given(module, args, kwargs)
        if call is None:
            return NOT_BYPASSED
        try:
            inputs = call.read(given)
        except (IndexError, KeyError):
            self._lose(f"a block of {gate.path!r} got other arguments than in the traced forward")
            return NOT_BYPASSED
        if call is self._trace.leader and self._choose is not None:
            self.mode = self._choose(given)
        if call.is_first and call.segment is not None:
            self.inputs[call.segment] = nested.map_tensors(torch.clone, inputs)
        if self.mode == "skip":
            return filled(call.returned, self._handed_on(call, inputs), (*args, *kwargs.values()))
        self._current = call
        return NOT_BYPASSED

    def _next(self, gate: Gate) -> Call | None:
        """The traced call that a gate's is, if the forward follows the trace."""
        if self.lost is not None:
            return None
        call = next(iter(self._trace.calls[self._position :]), None)
        if call is not None and call.gate is gate:
            self._position += 1
            return call
        if gate.stack is not None and gate.path not in self._trace.side:  # Such members may be called at any time.
            self._lose(f"a block of {gate.path!r} was not expected here")
        return None

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        call = self._current
        if call is None or call.gate is not gate or not call.is_last or call.segment is None:
            return
        try:
            self._added[call.segment] = added(self.inputs.pop(call.segment), output)
        except ValueError:
            self._lose(f"a block of {gate.path!r} returned other shapes than in the traced forward")

    def finish(self) -> None:
        """Called when the forward has returned."""
        if self.lost is None and self._position < len(self._trace.calls):
            path = self._trace.calls[self._position].gate.path
            self._lose(f"the forward ended before it called a block of {path!r}")

    def _handed_on(self, call: Call, values: list[Any]) -> list[Any]:
        """What a skipped call returns: what it was given or, at the end of a segment, that with the residuals."""
        segment = call.segment
        if segment is None or not call.is_last or self._expected is None:
            return values
        pairs = zip(self.inputs[segment], self._expected[segment.slot :], strict=False)
        return [
            base if residual is None else base + residual if alike(base, residual) else residual.clone()
            for base, residual in pairs
        ]

    def _lose(self, why: str) -> None:
        self.lost, self._current = why, None


class Replay:
    """Forwards of a model's twin in which no block runs. The model itself is not called."""

    def __init__(self, model: torch.nn.Module, gates: Mapping[torch.nn.Module, Gate], trace: Trace) -> None:
        self._step: StepPass | None = None
        self._twin = twin_of(model, {module: partial(self._answer, module, gate) for module, gate in gates.items()})

    def skip(self, step: StepPass, args: Any, kwargs: Any) -> Any:
        """The output of a forward through this pass; TrialFailed if the model raises."""
        with for_now(self, _step=step):
            output = run_trial(self._twin, args, kwargs)
        step.finish()
        return output

    def close(self) -> None:
        """Free the twin."""
        free(self._twin)

    def _answer(self, module: torch.nn.Module, gate: Gate, forward: Forward, args: Any, kwargs: Any) -> Any:
        assert self._step is not None
        answer = self._step.enter(gate, module, args, kwargs)
        return forward(*args, **kwargs) if answer is NOT_BYPASSED else answer


Perturb = Callable[[bool], tuple[Any, Any]]
"""Makes arguments of the model with another sample and, if asked to, at another time."""
Rehearsed = tuple[Given, Given | None]
"""Arguments of the leading block, and the same with another sample at another time."""


def rehearse(
    model: torch.nn.Module,
    gates: Mapping[torch.nn.Module, Gate],
    watched: Watched,
    given: tuple[Any, Any],
    output: Any,
    perturb: Perturb,
) -> Rehearsed:
    """Skip the step that gave this output, on the model's twin, and find the leader of the trace. ModelError says why
    nothing can be skipped."""
    trace, residuals, first_calls = watched
    with _refusing("a trial of the model failed"), contextlib.closing(Replay(model, gates, trace)) as replay:

        def skip_another(step: StepPass, with_time: bool) -> None:
            with trial(given):
                replay.skip(step, *perturb(with_time))

        same, other = StepPass(trace, "skip", residuals), StepPass(trace, "skip", residuals)
        skipped = replay.skip(same, *given)
        if same.lost is not None:
            raise ModelError(f"the blocks are not called in the same order each time: {same.lost}")
        difference = nested.difference(skipped, output)
        if not difference <= tolerance(residuals):
            raise ModelError(f"a skipped step differs from a computed one by {difference:.1e} where they should agree")
        with _refusing("could not test which blocks depend on the sample"):
            skip_another(other, False)
        _find_leader(trace, declaration_for(model).leader, same, other)
        later: list[Given] = []

        def note(given: Given) -> Mode:
            later.append(given.copied())
            return "skip"

        with contextlib.suppress(TrialFailed):  # Some models refuse that time.
            skip_another(StepPass(trace, "skip", residuals, note), True)
    assert trace.leader.segment is not None
    return first_calls[trace.leader.segment], next(iter(later), None)


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    except TrialFailed as error:
        raise ModelError(f"{what} ({error})") from error


def _find_leader(trace: Trace, declared: str | None, same: StepPass, other: StepPass) -> None:
    """The first segment that another sample reaches leads, unless one is declared."""
    starts = {call: _moved(call.segment, same, other) for call in trace.calls if call.is_first}

    def rank(call: Call) -> int:
        return 0 if call.gate.path == declared else 1 if any(starts[call]) else 2

    trace.leader = min(starts, key=rank)
    moved = starts[trace.leader]
    if rank(trace.leader) == 2:
        raise ModelError("the sample reaches none of its blocks directly, so nothing shows how it changes")
    trace.stream = moved.index(True) if any(moved) else 0


def _moved(segment: Segment | None, same: StepPass, other: StepPass) -> list[bool]:
    """Which streams of a segment begin otherwise in another step."""
    assert segment is not None
    pairs = zip(same.inputs.get(segment, ()), other.inputs.get(segment, ()), strict=False)
    return [isinstance(one, torch.Tensor) and not nested.equal(one, two) for one, two in pairs]


def tolerance(value: Any) -> float:
    """How far a result may be off that is computed in another order, by the precision of its tensors."""
    is_precise = all(tensor.dtype in (torch.float32, torch.float64) for tensor in nested.tensors(value))
    return 1e-4 if is_precise else 5e-2
