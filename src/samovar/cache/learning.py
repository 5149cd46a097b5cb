"""What can be learnt of a model by skipping a step that was just computed?

Whether a skipped step gives what a computed one does; which stack sees what is denoised, and leads;
what stays the same at all steps and need not be made again; and which residuals have no effect on the
output, so that they need not be kept. It takes a few skipped steps, once for each form of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .forecast import Outlook, Tensors
from .inputs import Inputs
from .memo import equal
from .passage import Given, Passage
from .trace import Desynchronised, OuterCall, Segment, Trace

Replay = Callable[[Passage, Inputs], Any]
"""Runs the model's forward through a passage."""
_PLAIN = (torch.Tensor, int, float, complex, str, torch.dtype, torch.device, type(None))
"""What an output is made of, if it can be compared with another."""


_MODEL_FAILS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    Warning,
)
"""What a model may raise at inputs that it was never given."""


def learn(trace: Trace, residuals: Tensors, inputs: Inputs, output: Any, replay: Replay) -> Given | None:
    """Complete the trace of a step that was computed; what its leading block was given."""
    if not _is_known(output):
        trace.problem = "it returns something that cannot be looked into"
        return None
    with _random_numbers_kept(inputs.device()):
        return _learn(trace, residuals, inputs, output, replay)


def _learn(trace: Trace, residuals: Tensors, inputs: Inputs, output: Any, replay: Replay) -> Given | None:
    outlook = Outlook([1.0], [residuals])
    same, other = Passage(trace, "skip", outlook), Passage(trace, "skip", outlook)
    try:
        skipped = replay(same, inputs.spare())
        replay(other, inputs.spare().with_other_sample())
        difference = _difference(skipped, output)
    except Desynchronised as error:
        trace.problem = f"the blocks are not called in the same order each time: {error}"
        return None
    except _MODEL_FAILS as error:  # Whatever a model may say to inputs that it was never given.
        trace.problem = f"it does not take what is tried on it ({type(error).__name__}: {error})"
        return None
    is_precise = all(r is None or r.dtype in (torch.float32, torch.float64) for r in residuals)
    if not difference <= (1e-4 if is_precise else 5e-2):
        trace.problem = f"a skipped step differs from a computed one by {difference:.1e} where they should agree"
        return None
    _find_leader(trace, same, other)
    trace.constants = _constants(same, other)
    trace.idle_slots = frozenset(
        slot for slot, residual in enumerate(residuals)
        if residual is not None and residual.is_floating_point()
        and _has_no_effect(slot, trace, outlook, inputs, (skipped, _leading(trace, same)), replay)
    )  # fmt: skip
    segment = trace.leader.segment
    return None if segment is None else same.given[segment]


def _find_leader(trace: Trace, same: Passage, other: Passage) -> None:
    """The first segment that another sample reaches leads, unless one is declared."""
    moved: dict[Segment | None, list[bool]] = {}
    for segment in trace.segments:
        pairs = zip(same.inputs[segment], other.inputs[segment], strict=True)
        moved[segment] = [isinstance(one, torch.Tensor) and not equal(one, another) for one, another in pairs]
        segment.sees_sample = any(moved[segment])
    if not trace.leader_is_declared:
        starts = [call for call in trace.calls if call.is_first and call.segment is not None]
        trace.leader = next((call for call in starts if call.segment and call.segment.sees_sample), starts[0])
    streams = moved[trace.leader.segment]
    trace.stream = streams.index(True) if True in streams else 0


def _constants(same: Passage, other: Passage) -> frozenset[OuterCall]:
    """The calls that are given the same with another sample at another time, and are not part of another such call.

    That they give the same would not do: a time that is looked up in buckets gives the same for a while.
    """
    found = {
        call for call, output in same.outer.items()
        if call in other.outer and equal(same.outer_inputs[call], other.outer_inputs[call])
        and _is_known(output) and equal(output, other.outer[call])
    }  # fmt: skip
    inside = {call[0] for call, around in same.nested.items() if not found.isdisjoint(around)}
    return frozenset(call for call in found if call[0] not in inside)


def _leading(trace: Trace, passage: Passage) -> Any:
    segment = trace.leader.segment
    return None if segment is None else passage.inputs[segment][trace.stream]


def _has_no_effect(
    slot: int, trace: Trace, outlook: Outlook, inputs: Inputs, expected: tuple[Any, Any], replay: Replay
) -> bool:
    """Whether neither the output nor the signal changes when a residual is not a number."""
    poisoned = Passage(trace, "skip", outlook, poisoned_slot=slot)
    try:
        output = replay(poisoned, inputs.spare())
    except _MODEL_FAILS:  # Something looked at it.
        return False
    return equal((output, _leading(trace, poisoned)), expected)


def _is_known(output: Any) -> bool:
    """Whether all that an output holds can be compared: what is of a form of its own may hold tensors."""
    return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(output))


def _random_numbers_kept(device: torch.device) -> AbstractContextManager[None]:
    """What is tried on a model draws no random numbers of the user's."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _difference(one: Any, other: Any) -> float:
    """The largest relative difference of the tensors of two outputs."""
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    errors = [((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in pairs]
    return max(errors, key=lambda error: (error != error, error), default=0.0)


def _tensors(output: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(output)
    return [leaf.detach().float() for leaf in leaves if isinstance(leaf, torch.Tensor)]
