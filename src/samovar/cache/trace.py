"""Which blocks did a forward call, in which order, and what did they take and give?

A trace is made of one forward and describes all later ones that are called alike. It cuts every stack
into segments, runs of blocks that hand their streams on: nearly always one. What a segment adds to its
streams, from its first input to its last output, is its residual.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..arch import Anatomy, BlockStack
from ..arch.blocks import in_form_of, output_values
from ..arch.declarations import declaration_for
from ..arch.probe import Watcher
from ..errors import ModelError
from ..hooks import NOT_BYPASSED, HookOrder, ModelHook
from .signal import ModulatedInput

Place = int | str
"""Where an argument is given: its position, or its name."""
_Key = tuple[str, int]
"""A list of blocks, and which run of its blocks."""


class Active(threading.local):
    """The forward that is under way on this thread, if the cache takes part in it."""

    passage: Any = None


class Gate(ModelHook):
    """Stands before a block, or before a module that may run between blocks, and asks the forward under way."""

    order = HookOrder.CACHE

    def __init__(
        self, active: Active, path: str, stack: BlockStack | None = None, index: int = 0, is_outer: bool = False
    ) -> None:
        self._active = active
        self.path = path
        """Of the list that holds the module, or of the module itself if it is in none."""
        self.stack = stack
        """As structure tells it; None if the module is no block."""
        self.index = index
        self.is_outer = is_outer
        """Whether the module stands before or behind the stacks."""

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        passage = self._active.passage
        return NOT_BYPASSED if passage is None else passage.enter(self, module, args, kwargs)

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        passage = self._active.passage
        if passage is not None:
            passage.leave(self, module, output)
        return output


OuterCall = tuple[Gate, int]
"""A module before the stacks, and which of its calls in a forward."""


@dataclass(eq=False)
class Segment:
    """Blocks of one stack that were called one after the other."""

    stack: BlockStack
    slot: int = 0
    """Where the residuals of its streams begin in the list of all."""
    sees_sample: bool = True
    """Whether what is denoised reaches its input."""


@dataclass(eq=False)
class Call:
    """One call that is answered on a skipped step."""

    gate: Gate
    segment: Segment | None
    """None for a module between blocks."""
    is_first: bool
    is_last: bool
    places: tuple[Place | None, ...]
    """For each value that is returned: where the carried argument is given that becomes it."""
    returned: Any
    """The form of what it returned, as tensors without data."""
    passes_on: bool = False
    """Whether all that is returned has the form of what is carried in."""
    hand_on: Callable[[Any, Any], Any] | None = None
    """Makes the output of a block that is neither first nor last of what it is given."""

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The carried arguments, for each value that is returned; None where nothing is carried."""
        try:
            return [
                None if place is None else args[place] if isinstance(place, int) else kwargs[place]
                for place in self.places
            ]
        except (IndexError, KeyError):
            raise self.restyled() from None

    def restyled(self) -> Desynchronised:
        """What is raised where an argument is not given as it was."""
        return Desynchronised(f"a block of {self.gate.path!r} is called in another way than before")


@dataclass(eq=False)
class Trace:
    """What a forward does with its blocks."""

    calls: tuple[Call, ...]
    segments: tuple[Segment, ...]
    leader: Call
    """The call by whose input a step is judged."""
    leader_is_declared: bool = False
    side: tuple[str, ...] = ()
    """Lists whose members run between blocks."""
    stream: int = 0
    """Which of the values that the leader returns is what is denoised."""
    constants: frozenset[OuterCall] = frozenset()
    """Calls of modules before the stacks that seem to return the same at all steps of a branch."""
    trusted: set[OuterCall] = field(default_factory=set)
    """Those of them that were seen to do so at two real steps of a run."""
    idle_slots: frozenset[int] = frozenset()
    """Residuals that have no effect on the output."""
    probe: ModulatedInput | None = None
    """Reads the signal off the leader's arguments; made when it is first needed in a run."""
    probe_checked: bool = False
    probe_is_wrong: bool = False
    """Whether a block's attention was seen to get something else than its twin's."""
    idle_in_twin: frozenset[str] | None = None
    problem: str | None = None
    """Why a skipped step does not stand for a computed one here."""
    zeros: dict[tuple[torch.dtype, torch.device], torch.Tensor] = field(default_factory=dict)

    def answer(self, call: Call, values: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An output of a call's form with these values, and zeros where one is missing."""
        if call.passes_on:
            return in_form_of(call.returned, values)
        given = (value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        device = next(given, torch.device("cpu"))
        forms = () if call.returned is None else output_values(call.returned)
        fitted = [self._fit(value, form, device) for value, form in zip(values, forms, strict=True)]
        return None if call.returned is None else in_form_of(call.returned, fitted)

    def _fit(self, value: Any, form: Any, device: torch.device) -> Any:
        if isinstance(form, (tuple, list)):
            return in_form_of(form, [self._fit(None, part, device) for part in form])
        if not isinstance(form, torch.Tensor):
            return None
        if alike(value, form):
            return value
        key = (form.dtype, device)
        if key not in self.zeros:
            self.zeros[key] = torch.zeros((), dtype=form.dtype, device=device)
        return self.zeros[key].expand(form.shape)


class Desynchronised(Exception):
    """The forward does not call its blocks as the trace says: it is computed and traced anew."""


@dataclass(eq=False)
class _Seen:
    """A call, as it is remembered while its forward runs."""

    gate: Gate
    run: int = 0
    """Which run of blocks of its list it belongs to."""
    given: tuple[Place, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    returned: Any = None

    @property
    def key(self) -> _Key:
        return self.gate.path, self.run


class Tracer:
    """Watches a forward that is computed, and makes a trace of it."""

    def __init__(self, model: torch.nn.Module, structure: Anatomy) -> None:
        self._watcher = Watcher(model, structure)
        self._declared_leader = declaration_for(model).leader
        self._seen: list[_Seen] = []
        self._open: list[_Seen] = []
        self._failure: ModelError | None = None
        self._latest: dict[str, _Seen] = {}
        self._first_arguments: dict[_Key, dict[str, Any]] = {}
        self._last_output: dict[_Key, Any] = {}

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if not gate.is_outer and self._failure is None:
            try:
                self._begin(gate, module, args, kwargs)
            except ModelError as error:  # The forward goes on all the same.
                self._failure = error
        return NOT_BYPASSED

    def _begin(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        seen = _Seen(gate)
        if gate.stack is None:
            self._watcher.before_other(gate.path)
        else:
            self._watcher.before_block(gate.stack, module, args, kwargs)
            arguments = gate.stack.arguments(module, args, kwargs)
            seen.shapes = {name: value.shape for name, value in arguments.items() if isinstance(value, torch.Tensor)}
            seen.names = gate.stack.names(module)
            seen.given = (*range(len(args)), *kwargs)
            seen.run = self._run_of(seen)
            self._first_arguments.setdefault(seen.key, arguments)
            self._latest[gate.path] = seen
        if not self._open:  # What a module between blocks calls itself is its own affair.
            self._seen.append(seen)
        self._open.append(seen)

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        if gate.is_outer or self._failure is not None:
            return
        seen = self._open.pop()
        seen.returned = _without_data(output)
        if gate.stack is not None:
            self._watcher.after_block(gate.stack, module, (), output)
            self._last_output[seen.key] = output

    def _run_of(self, seen: _Seen) -> int:
        """The same as before, unless the list starts again or hands on something of another shape."""
        before = self._latest.get(seen.gate.path)
        if before is None:
            return 0
        reshaped = any(before.shapes.get(name, shape) != shape for name, shape in seen.shapes.items())
        return before.run + (seen.gate.index <= before.gate.index or reshaped)

    def finish(self) -> tuple[Trace, list[torch.Tensor | None]]:
        """The trace, and the residuals of the forward that it was made of; an error if it cannot be understood."""
        if self._failure is not None:
            raise self._failure
        anatomy = self._watcher.anatomy()
        stacks = {stack.path: stack for stack in anatomy.stacks}
        moments: dict[_Key, list[int]] = {}
        for moment, seen in enumerate(self._seen):
            if seen.gate.path in stacks:
                moments.setdefault(seen.key, []).append(moment)
        segments: dict[_Key, Segment] = {}
        num_slots = 0
        for key in moments:
            segments[key] = Segment(stacks[key[0]], num_slots)
            num_slots += len(stacks[key[0]].streams)
        calls = tuple(self._calls(segments, moments))
        starts = [call for call in calls if call.is_first]
        leader = next((call for call in starts if call.gate.path == self._declared_leader), starts[0])
        residuals: list[torch.Tensor | None] = []
        for key, segment in segments.items():
            arguments = self._first_arguments[key]
            inputs = [arguments.get(stream.parameter or "") for stream in segment.stack.streams]
            residuals += added(inputs, self._last_output[key])
        is_declared = leader.gate.path == self._declared_leader
        return Trace(calls, tuple(segments.values()), leader, is_declared, anatomy.side), residuals

    def _calls(self, segments: Mapping[_Key, Segment], moments: Mapping[_Key, Sequence[int]]) -> Iterator[Call]:
        """What is answered on a skipped step: all blocks, and what runs between them."""
        for moment, seen in enumerate(self._seen):
            segment = segments.get(seen.key)
            if segment is not None:
                own = moments[seen.key]
                places = tuple(_place(seen, stream.parameter) for stream in segment.stack.streams)
                forms = zip(segment.stack.streams, output_values(seen.returned), strict=True)
                passes_on = all(
                    isinstance(form, torch.Tensor) and seen.shapes.get(stream.parameter or "") == form.shape
                    for stream, form in forms
                )
                is_first, is_last = moment == own[0], moment == own[-1]
                hand_on = _handing_on(places, seen.returned) if passes_on and not (is_first or is_last) else None
                yield Call(seen.gate, segment, is_first, is_last, places, seen.returned, passes_on, hand_on)
            elif any(other[0] < moment < other[-1] for other in moments.values()):
                count = 0 if seen.returned is None else len(output_values(seen.returned))
                yield Call(seen.gate, None, False, False, (None,) * count, seen.returned)


def added(inputs: Sequence[Any], output: Any, slot: int = 0, idle: Collection[int] = ()) -> list[torch.Tensor | None]:
    """What was added to each input, from this slot on; what was returned itself, where no input has its form."""
    residuals: list[torch.Tensor | None] = []
    for place, (before, after) in enumerate(zip(inputs, output_values(output), strict=True), start=slot):
        if place in idle or not isinstance(after, torch.Tensor):
            residuals.append(None)
        else:
            residuals.append((after - before if alike(before, after) else after.clone()).detach())
    return residuals


def alike(before: Any, after: Any) -> bool:
    """Whether one can be had from the other by adding something."""
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.shape == after.shape


def _handing_on(places: Sequence[Place | None], returned: Any) -> Callable[[Any, Any], Any] | None:
    """The quickest way from a block's arguments to the same values in the form in which it returns them."""
    if not isinstance(returned, torch.Tensor) and type(returned) is not tuple:
        return None
    pick: Callable[[Any], Any] = operator.itemgetter(*places)
    as_tuple = type(returned) is tuple and len(places) == 1
    if all(isinstance(place, str) for place in places):
        return lambda args, kwargs: (pick(kwargs),) if as_tuple else pick(kwargs)
    if all(isinstance(place, int) for place in places):
        return lambda args, kwargs: (pick(args),) if as_tuple else pick(args)
    return None


def _place(seen: _Seen, parameter: str | None) -> Place | None:
    positional = list(seen.names.items())
    for place in seen.given:
        name = positional[place][1] if isinstance(place, int) else seen.names.get(place, place)
        if name == parameter:
            return place
    return None


def _without_data(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return torch.empty_like(output, device="meta")
    if isinstance(output, (tuple, list)):
        return in_form_of(output, list(map(_without_data, output)))
    return None
