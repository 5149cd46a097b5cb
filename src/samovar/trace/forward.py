"""Which blocks did a forward call, in which order, and what did they take and return?

A trace is made from one forward and describes all later ones that are called alike. It cuts every stack into segments,
runs of blocks that hand their streams on: nearly always one. A segment's residual is what it adds to its streams, from
its first input to its last output.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..arch import Anatomy, BlockStack
from ..arch.blocks import in_form_of, output_values
from ..arch.declarations import declaration_for
from ..core import nested
from ..core.errors import ModelError
from ..hooks import NOT_BYPASSED
from .watch import Gate, Watcher

Place = int | str
"""The position or name of an argument."""
Tensors = list[torch.Tensor | None]
_Key = tuple[str, int]
"""A list of blocks, and which run of its blocks."""


class Given(NamedTuple):
    """A module and its arguments."""

    module: torch.nn.Module
    args: Any
    kwargs: Any

    def copied(self) -> Given:
        """The same with tensors that nobody else writes into."""
        return Given(self.module, *nested.map_tensors(torch.clone, (self.args, self.kwargs)))


@dataclass(eq=False)
class Segment:
    """Blocks of one stack that were called one after the other."""

    stack: BlockStack
    slot: int = 0
    """Index of its first stream's residual in the list of all residuals."""
    writes_in_place: bool = False
    """Whether its blocks overwrite their inputs."""


@dataclass(eq=False)
class Call:
    """One call that is answered on a skipped step."""

    gate: Gate
    segment: Segment | None
    """None for a module between blocks."""
    is_first: bool
    is_last: bool
    places: tuple[Place | None, ...]
    """For each returned value, the argument that carries it in."""
    returned: Any
    """The form of its output, as tensors without data."""
    passes_on: bool = False
    """Whether every returned value has the form of what is carried in."""
    hand_on: Callable[[Any, Any], Any] | None = None
    """For a block that is neither first nor last: makes its output from its arguments."""

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The carried argument for each returned value; None where nothing is carried."""
        return [
            None if place is None else args[place] if isinstance(place, int) else kwargs[place] for place in self.places
        ]

    def answer(self, values: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An output of the call's form with these values, and zeros where one is missing."""
        if self.passes_on:
            return in_form_of(self.returned, values)
        return None if self.returned is None else filled(self.returned, values, (*args, *kwargs.values()))


@dataclass(eq=False)
class Trace:
    """What a forward does with its blocks."""

    calls: tuple[Call, ...]
    segments: tuple[Segment, ...]
    leader: Call
    """The call whose input decides whether a step is skipped."""
    leader_is_declared: bool = False
    side: tuple[str, ...] = ()
    """Lists whose members run between blocks."""
    stream: int = 0
    """Which value that the leader returns is the sample."""
    idle_slots: frozenset[int] = frozenset()
    """Residuals that have no effect on the output."""

    @functools.cached_property
    def early_segments(self) -> tuple[Segment, ...]:
        """Those that run before the leader, such as text refiners."""
        before = self.calls[: self.calls.index(self.leader)]
        return tuple(dict.fromkeys(call.segment for call in before if call.segment is not None))


def filled(form: Any, values: Sequence[Any], given: Iterable[Any]) -> Any:
    """An output of this form with these values. Zeros replace a value of another form, on the device of the tensors
    that were given."""
    device = next((value.device for value in given if isinstance(value, torch.Tensor)), torch.device("cpu"))

    def zeros(part: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=part.dtype, device=device).expand(part.shape)

    pairs = zip(values, output_values(form), strict=True)
    return in_form_of(form, [v if alike(v, part) else nested.map_tensors(zeros, part) for v, part in pairs])


def added(inputs: Sequence[Any], output: Any, slot: int = 0, idle: Collection[int] = ()) -> Tensors:
    """What was added to each input, from this slot on; the returned value itself where no input has its form."""
    residuals: Tensors = []
    for place, (before, after) in enumerate(zip(inputs, output_values(output), strict=True), start=slot):
        if place in idle or not isinstance(after, torch.Tensor):
            residuals.append(None)
        else:
            residuals.append((after - before if alike(before, after) else after.clone()).detach())
    return residuals


def alike(before: Any, after: Any) -> bool:
    """Whether both are tensors of one shape."""
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.shape == after.shape


@dataclass(eq=False)
class _Seen:
    """A call, noted while its forward runs."""

    gate: Gate
    run: int = 0
    """Which run of blocks of its list it belongs to."""
    places: Mapping[str | None, Place] = field(default_factory=dict)
    """Where each parameter of the stack was given."""
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    returned: Any = None

    @property
    def key(self) -> _Key:
        return self.gate.path, self.run


class Watched(NamedTuple):
    """A trace, and what its forward left."""

    trace: Trace
    residuals: Tensors
    first_calls: Mapping[Segment, Given]
    """The arguments of the first block of each segment, as copies."""


class Tracer(Watcher):
    """A pass that lets every block compute, and makes a trace."""

    def __init__(self, model: torch.nn.Module, structure: Anatomy) -> None:
        super().__init__(model, structure)
        self._declared_leader = declaration_for(model).leader
        self._seen: list[_Seen] = []
        self._open: list[_Seen] = []
        self._failure: ModelError | None = None
        self._latest: dict[str, _Seen] = {}
        self._live: dict[_Key, Given] = {}
        self._copies: dict[_Key, Given] = {}
        self._last_output: dict[_Key, Any] = {}

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self._failure is None:
            try:
                super().enter(gate, module, args, kwargs)
                self._note(gate, Given(module, args, kwargs))
            except ModelError as error:  # The forward goes on all the same.
                self._failure = error
        return NOT_BYPASSED

    def _note(self, gate: Gate, given: Given) -> None:
        seen = _Seen(gate)
        if gate.stack is not None:
            arguments = self._last[gate.path].arguments
            seen.shapes = {name: value.shape for name, value in arguments.items() if isinstance(value, torch.Tensor)}
            names = gate.stack.names(given.module)
            positional: dict[Any, Any] = dict(zip(names.values(), range(len(given.args)), strict=False))
            seen.places = {**positional, **{names.get(name, name): name for name in given.kwargs}}
            seen.run = self._run_of(seen)
            if seen.key not in self._live:
                self._live[seen.key], self._copies[seen.key] = given, given.copied()
            self._latest[gate.path] = seen
        if not self._open:  # Calls inside a module between blocks are its private business.
            self._seen.append(seen)
        self._open.append(seen)

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        if self._failure is not None:
            return
        try:
            seen = self._open.pop()
            seen.returned = nested.without_data(output)
            super().leave(gate, module, output)
            if gate.stack is not None:
                self._last_output[seen.key] = output
        except ModelError as error:
            self._failure = error

    def _run_of(self, seen: _Seen) -> int:
        """The same as before, unless the list starts again or hands on another shape."""
        before = self._latest.get(seen.gate.path)
        if before is None:
            return 0
        reshaped = any(before.shapes.get(name, shape) != shape for name, shape in seen.shapes.items())
        return before.run + (seen.gate.index <= before.gate.index or reshaped)

    def finish(self) -> Watched:
        """The trace with the residuals of its forward; ModelError if the forward cannot be understood."""
        if self._failure is not None:
            raise self._failure
        anatomy = self.anatomy()
        stacks = {stack.path: stack for stack in anatomy.stacks}
        moments: dict[_Key, list[int]] = {}
        for moment, seen in enumerate(self._seen):
            if seen.gate.path in stacks:
                moments.setdefault(seen.key, []).append(moment)
        segments: dict[_Key, Segment] = {}
        residuals: Tensors = []
        for key in moments:
            segments[key] = Segment(stacks[key[0]], len(residuals))
            residuals += self._residuals(key, segments[key])
        calls = tuple(self._calls(segments, moments))
        starts = [call for call in calls if call.is_first]
        if not starts:
            raise ModelError("its blocks run inside each other, so none of them can be skipped")
        leader = next((call for call in starts if call.gate.path == self._declared_leader), starts[0])
        is_declared = leader.gate.path == self._declared_leader
        trace = Trace(calls, tuple(segments.values()), leader, is_declared, anatomy.side)
        return Watched(trace, residuals, {segment: self._copies[key] for key, segment in segments.items()})

    def _residuals(self, key: _Key, segment: Segment) -> Tensors:
        live, copied = self._live[key], self._copies[key]
        segment.writes_in_place = not nested.equal((live.args, live.kwargs), (copied.args, copied.kwargs))
        arguments = segment.stack.arguments(copied.module, copied.args, copied.kwargs)
        inputs = [arguments.get(stream.parameter or "") for stream in segment.stack.streams]
        return added(inputs, self._last_output[key])

    def _calls(self, segments: Mapping[_Key, Segment], moments: Mapping[_Key, Sequence[int]]) -> Iterator[Call]:
        """What is answered on a skipped step: all blocks, and what runs between them."""
        for moment, seen in enumerate(self._seen):
            segment = segments.get(seen.key)
            if segment is not None:
                own, streams = moments[seen.key], segment.stack.streams
                places = tuple(seen.places.get(stream.parameter) for stream in streams)
                passes_on = all(
                    isinstance(form, torch.Tensor) and seen.shapes.get(stream.parameter or "") == form.shape
                    for stream, form in zip(streams, output_values(seen.returned), strict=True)
                )
                is_first, is_last = moment == own[0], moment == own[-1]
                hand_on = _handing_on(places, seen.returned) if passes_on and not (is_first or is_last) else None
                yield Call(seen.gate, segment, is_first, is_last, places, seen.returned, passes_on, hand_on)
            elif any(other[0] < moment < other[-1] for other in moments.values()):
                count = 0 if seen.returned is None else len(output_values(seen.returned))
                yield Call(seen.gate, None, False, False, (None,) * count, seen.returned)


def _handing_on(places: Sequence[Place | None], returned: Any) -> Callable[[Any, Any], Any] | None:
    """The fastest way from a block's arguments to the same values in the form in which it returns them."""
    if not isinstance(returned, torch.Tensor) and type(returned) is not tuple:
        return None
    pick: Callable[[Any], Any] = operator.itemgetter(*places)
    as_tuple = type(returned) is tuple and len(places) == 1
    if all(isinstance(place, str) for place in places):
        return lambda args, kwargs: (pick(kwargs),) if as_tuple else pick(kwargs)
    if all(isinstance(place, int) for place in places):
        return lambda args, kwargs: (pick(args),) if as_tuple else pick(args)
    return None
