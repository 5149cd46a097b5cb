"""The blocks that a forward calls, in which order, and what they take and return.

A watched forward computes as ever. It shows the order of the stacks, the modules that run between blocks, and the
parameter through which each returned value reaches the next block: by identity of the tensors or, where the model makes
a new tensor in between, by shape. The trace made of it describes all later forwards that are called alike. It cuts
every stack into segments, runs of blocks that hand their streams on: nearly always one. A segment's residual is what it
adds to its streams, from its first input to its last output.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..arch.blocks import Anatomy, BlockStack, Place, Stream, in_form_of, output_values
from ..core import nested
from ..core.errors import DeclarationError, ModelError
from ..hooks import NOT_BYPASSED
from .gates import Gate, Gates

Tensors = list[torch.Tensor | None]


class Given(NamedTuple):
    """A module and its arguments."""

    module: torch.nn.Module
    args: Any
    kwargs: Any

    def at(self, place: Place | None) -> Any:
        """The argument at a place; None where there is none."""
        return None if place is None else (self.args if isinstance(place, int) else self.kwargs)[place]

    def copied(self) -> Given:
        """The same with tensors that nobody else writes into."""
        return Given(self.module, *nested.map_tensors(torch.clone, (self.args, self.kwargs)))


@dataclass(eq=False)
class Segment:
    """Blocks of one stack that were called one after the other."""

    stack: BlockStack
    slot: int = 0
    """Index of its first stream's residual in the list of all residuals."""


@dataclass(eq=False)
class Call:
    """One call of a gated module. On a skipped step it is answered."""

    gate: Gate
    segment: Segment | None = None
    """None for a module between blocks."""
    is_first: bool = False
    is_last: bool = False
    """Of its segment."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Where each parameter of the stack was given."""
    returned: Any = None
    """The form of its output, as tensors without data."""

    def read(self, given: Given) -> list[Any]:
        """The argument that carries each returned value in; None where nothing is carried."""
        streams = () if self.segment is None else self.segment.stack.streams
        return [given.at(self.places.get(stream.parameter or "")) for stream in streams]


@dataclass(eq=False)
class Trace:
    """What a forward does with its blocks."""

    calls: tuple[Call, ...]
    segments: tuple[Segment, ...]
    leader: Call
    """The call whose input decides whether a step is skipped."""
    side: tuple[str, ...] = ()
    """Lists whose members run between blocks."""
    stream: int = 0
    """Which value that the leader returns is the sample."""

    @property
    def has_early_blocks(self) -> bool:
        """Whether blocks run before the leader, such as text refiners."""
        return self.leader is not self.calls[0]


class Watched(NamedTuple):
    """A trace, and what its forward left."""

    trace: Trace
    residuals: Tensors
    first_calls: Mapping[Segment, Given]
    """The arguments of the first block of each segment, as copies."""


def filled(form: Any, values: Sequence[Any], given: Iterable[Any]) -> Any:
    """An output of this form with these values. Zeros replace a value that is missing or of another form, on the device
    of the tensors that were given."""
    if form is None:
        return None
    device = next((value.device for value in given if isinstance(value, torch.Tensor)), torch.device("cpu"))

    def zeros(part: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=part.dtype, device=device).expand(part.shape)

    pairs = itertools.zip_longest(values, output_values(form))
    found = [v.to(part.dtype) if alike(v, part) else nested.map_tensors(zeros, part) for v, part in pairs]
    return in_form_of(form, found)


def added(inputs: Sequence[Any], output: Any) -> Tensors:
    """What was added to each input; the returned value itself where no input has its form."""

    def residual(before: Any, after: Any) -> torch.Tensor | None:
        if not isinstance(after, torch.Tensor):
            return None
        return (after - before if alike(before, after) else after.clone()).detach()

    return list(itertools.starmap(residual, zip(inputs, output_values(output), strict=True)))


def alike(before: Any, after: Any) -> bool:
    """Whether both are tensors of one shape."""
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.shape == after.shape


# ------------------------------------------------------------------------------------------------ watching


@dataclass
class BlockCall:
    """One call of a block."""

    arguments: Mapping[str, Any]
    """By the stack's parameters."""
    num_positional: int
    """How many of them were positional: other hooks may rely on their places."""
    output: Any = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, torch.Tensor)}


class _Flow:
    """What the calls of one stack hand on, from each to the next."""

    def __init__(self, stack: BlockStack) -> None:
        self._segment, self._index, self._num_calls = Segment(stack), -1, 0
        self._last = BlockCall({}, 0)
        self._handed_on: set[tuple[int, str]] = set()
        """Place in the output and parameter that took the very tensor."""
        self._alike: dict[int, set[str]] = {}
        """By place in the output: the parameters that had its form in every call."""
        self._changing: set[str] = set()
        """The parameters that did not get the same value at every call."""

    def enter(self, index: int, call: BlockCall) -> Segment:
        """The segment of a call. Another one starts if the list starts again or hands on another shape."""
        if self._num_calls and not (self._compare(self._last, call) and index > self._index):
            self._segment = Segment(self._segment.stack)
        self._last, self._index, self._num_calls = call, index, self._num_calls + 1
        return self._segment

    def _compare(self, last: BlockCall, call: BlockCall) -> bool:
        """Learn from two calls in a row. Whether what is handed on has the same shapes."""
        returned = output_values(last.output)
        for name, value in call.tensors.items():
            before = last.arguments.get(name)
            taken = {(place, name) for place, other in enumerate(returned) if other is value}
            self._handed_on |= taken
            if taken or not (value is before or nested.equal(value, before)):  # Blocks may write into arguments.
                self._changing.add(name)
        return all(alike(last.arguments.get(name, value), value) for name, value in call.tensors.items())

    def leave(self, output: Any) -> None:
        self._last.output = output
        for place, value in enumerate(output_values(output)):
            if isinstance(value, torch.Tensor):
                form = value.shape, value.dtype
                names = {name for name, other in self._last.tensors.items() if (other.shape, other.dtype) == form}
                self._alike[place] = self._alike.get(place, names) & names

    def streams(self, parameters: Sequence[str], count: int) -> tuple[Stream, ...]:
        """The parameter that carries each of the returned values: one that took the very tensor or, if that was made
        anew in between, one of its form."""

        def rank(pair: tuple[int, str]) -> Any:
            place, name = pair  # What only `**kwargs` takes has no place in the order.
            order = parameters.index(name) if name in parameters else len(parameters)
            return pair not in self._handed_on, place, name not in self._changing, order, name

        able = self._changing if self._num_calls > 1 else self._last.arguments.keys()
        formed = {(place, name) for place, names in self._alike.items() for name in names & able}
        found: dict[int, str] = {}
        for place, name in sorted(self._handed_on | formed, key=rank):
            if place not in found and name not in found.values():
                found[place] = name
        return tuple(map(Stream, map(found.get, range(count))))


class Watcher:
    """A pass that lets every block compute, and notes what the blocks are given and return. What a gated module calls
    is its own business."""

    def __init__(self, model: torch.nn.Module, anatomy: Anatomy, *, keeps_calls: bool = False) -> None:
        """`keeps_calls`: keep the first call of every block."""
        self._model, self._structure, self._keeps_calls = model, anatomy, keeps_calls
        self.calls: dict[str, BlockCall] = {}
        """By the path of the block, if they are kept."""
        self.blocks: list[str] = []
        """The paths of the blocks in the order in which they ran."""
        self._seen: list[Call] = []
        self._depth = 0
        self._flows: dict[str, _Flow] = {}
        self._first: dict[Segment, Given] = {}
        """Copies of the arguments of the first call of each: blocks may overwrite them."""
        self._last_output: dict[Segment, Any] = {}
        self._failure: ModelError | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, forwards of the model on this thread are watched."""
        with Gates(self._model, self._structure, "watch") as gates, gates.asking(self):
            yield

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth == 1:
            self._seen.append(Call(gate))
            if gate.stack is not None:
                with self._noting():
                    self._enter_block(self._seen[-1], gate.stack, Given(module, args, kwargs))
        return NOT_BYPASSED

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            call = self._seen[-1]
            with self._noting():
                call.returned = nested.without_data(output)
                if call.segment is not None and self._failure is None:
                    self._flows[gate.path].leave(output)
                    self._last_output[call.segment] = output

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Inside, an error ends the watching, and not the forward."""
        try:
            yield
        except ModelError as error:
            self._failure = self._failure or error

    def _enter_block(self, call: Call, stack: BlockStack, given: Given) -> None:
        call.places = stack.places(*given)
        block = BlockCall({name: given.at(place) for name, place in call.places.items()}, len(given.args))
        path = stack.block_paths[call.gate.index]
        self.blocks.append(path)
        if self._keeps_calls:
            self.calls.setdefault(path, block)
        call.segment = self._flows.setdefault(stack.path, _Flow(stack)).enter(call.gate.index, block)
        if call.segment not in self._first:
            self._first[call.segment] = given.copied()

    # ------------------------------------------------------------------------------------------------ the result

    def anatomy(self) -> Anatomy:
        """The stacks that ran, in that order, with their streams; what ran between blocks is set aside."""
        if self._failure is not None:
            raise self._failure
        known = {stack.path: stack for stack in self._structure.stacks}
        moments: dict[str, list[int]] = defaultdict(list)
        for moment, call in enumerate(self._seen):
            moments[call.gate.path].append(moment)
        spans = [own for path, own in moments.items() if path in known]
        inside = {path for path, own in moments.items() if any(span[0] < own[0] < span[-1] for span in spans)}
        side = tuple(path for path in moments if path in inside.union(self._structure.side))
        ran = tuple(self._with_streams(known[path]) for path in moments if path in known and path not in side)
        if not ran:
            raise ModelError(
                f"No block of {self._structure.model_class} ran, in {', '.join(map(repr, known))}; expected at "
                "least one stack to run. Probe the model before attaching hooks that skip blocks, with inputs that "
                "reach the blocks."
            )
        return replace(self._structure, stacks=ran, side=side)

    def _with_streams(self, stack: BlockStack) -> BlockStack:
        """The stack as its blocks ran; what was declared stays as declared."""
        own = [call for call in self._seen if call.gate.path == stack.path]
        counts = {len(output_values(call.returned)): stack.block_paths[call.gate.index] for call in reversed(own)}
        if len(counts) != 1:
            found = ", ".join(f"{count} by {path!r}" for count, path in sorted(counts.items()))
            raise ModelError(
                f"The blocks of {stack.path!r} return different numbers of values ({found}); expected the same "
                "number from each. Register an extractor for such a model: samovar.cache.register_extractor."
            )
        (count,) = counts
        if not stack.streams:
            return replace(stack, streams=self._flows[stack.path].streams(stack.parameters, count))
        if count != len(stack.streams):
            raise DeclarationError(
                f"A declaration carries {len(stack.streams)} values through {stack.path!r}, but its blocks return "
                f"{count}. Declare one parameter for each returned value, None for one that is not passed on."
            )
        return stack

    def watched(self) -> Watched:
        """The trace with the residuals of its forward; ModelError if the forward cannot be understood."""
        anatomy = self.anatomy()
        stacks = {stack.path: stack for stack in anatomy.stacks}
        segments: dict[Segment, list[Call]] = defaultdict(list)
        for call in self._seen:
            if call.segment is not None and call.gate.path in stacks:
                segments[call.segment].append(call)
            else:
                call.segment = None
        residuals: Tensors = []
        for segment, own in segments.items():
            segment.stack, segment.slot = stacks[segment.stack.path], len(residuals)
            own[0].is_first = own[-1].is_last = True
            residuals += added(own[0].read(self._first[segment]), self._last_output[segment])
        num_open, calls = 0, list[Call]()
        for call in self._seen:
            num_open += call.is_first
            calls += [call] * bool(num_open)
            num_open -= call.is_last
        trace = Trace(tuple(calls), tuple(segments), calls[0], anatomy.side)
        return Watched(trace, residuals, {segment: self._first[segment] for segment in segments})
