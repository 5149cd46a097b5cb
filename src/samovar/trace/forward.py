"""The blocks that a forward calls, in which order, and what they take and return.

A watched forward computes as ever. It shows the order of the stacks, the modules that run between blocks, and the
parameter through which each returned value reaches the next block: by identity of the tensors or, where the model makes
a new tensor in between, by shape. The trace made of it describes all later forwards that are called alike. It cuts
every stack into segments, runs of blocks that hand their streams on: nearly always one. A segment's residual is what it
adds to its streams, from its first input to its last output.
"""

from __future__ import annotations

import contextlib
import functools
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
    is_inner: bool
    """Whether it was called inside of another: that is the other's private business."""
    segment: Segment | None = None
    """None for a module between blocks."""
    is_first: bool = False
    is_last: bool = False
    """Of its segment."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Where each parameter of the stack was given."""
    returned: Any = None
    """The form of its output, as tensors without data."""

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The argument that carries each returned value in; None where nothing is carried."""
        streams = () if self.segment is None else self.segment.stack.streams
        places = [self.places.get(stream.parameter or "") for stream in streams]
        return [None if at is None else args[at] if isinstance(at, int) else kwargs[at] for at in places]


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

    @functools.cached_property
    def early_segments(self) -> tuple[Segment, ...]:
        """Those that run before the leader, such as text refiners."""
        before = self.calls[: self.calls.index(self.leader)]
        return tuple(dict.fromkeys(call.segment for call in before if call.segment is not None))


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
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, value) for name, value in self.arguments.items() if isinstance(value, torch.Tensor)]


class _Flow:
    """What the calls of one stack hand on, from each to the next."""

    def __init__(self, stack: BlockStack) -> None:
        self._stack, self._segment = stack, Segment(stack)
        self._last: BlockCall | None = None
        self._index, self._num_calls = -1, 0
        self._handed_on: set[tuple[int, str]] = set()
        """Place in the output and parameter that took the very tensor."""
        self._alike: dict[int, set[str]] = {}
        """By place in the output: the parameters that had its form in every call."""
        self._changing: set[str] = set()
        """The parameters that did not get the same value at every call."""

    def enter(self, index: int, call: BlockCall) -> Segment:
        """The segment of a call. Another one starts if the list starts again or hands on another shape."""
        if not (self._last is not None and self._compare(self._last, call) and index > self._index):
            self._segment = Segment(self._stack)
        self._last, self._index, self._num_calls = call, index, self._num_calls + 1
        return self._segment

    def _compare(self, last: BlockCall, call: BlockCall) -> bool:
        """Learn from two calls in a row. Whether what is handed on has the same shapes."""
        has_same_shapes, returned = True, output_values(last.output)
        for name, value in call.tensors:
            before = last.arguments.get(name)
            taken = {(place, name) for place, other in enumerate(returned) if other is value}
            self._handed_on |= taken
            if taken or not (value is before or nested.equal(value, before)):  # Blocks may write into arguments.
                self._changing.add(name)
            has_same_shapes = has_same_shapes and (before is None or alike(before, value))
        return has_same_shapes

    def leave(self, output: Any) -> None:
        assert self._last is not None
        self._last.output = output
        for place, value in enumerate(output_values(output)):
            if isinstance(value, torch.Tensor):
                form = value.shape, value.dtype
                names = {name for name, other in self._last.tensors if (other.shape, other.dtype) == form}
                self._alike[place] = self._alike.get(place, names) & names

    def streams(self, parameters: Sequence[str], count: int) -> tuple[Stream, ...]:
        """The parameter that carries each of the returned values: one that took the very tensor or, if that was made
        anew in between, one of its form."""
        order = {name: place for place, name in enumerate(parameters)}

        def rank(pair: tuple[int, str]) -> Any:
            place, name = pair  # What only `**kwargs` takes has no place in the order.
            return pair not in self._handed_on, place, name not in self._changing, order.get(name, len(order)), name

        formed = {(place, name) for place, names in self._alike.items() for name in names}
        if self._num_calls > 1:
            formed = {pair for pair in formed if pair[1] in self._changing}
        found: dict[int, str] = {}
        for place, name in sorted(self._handed_on | formed, key=rank):
            if place not in found and name not in found.values():
                found[place] = name
        return tuple(Stream(found.get(place)) for place in range(count))


class Watcher:
    """A pass that lets every block compute, and notes what the blocks are given and return."""

    def __init__(self, model: torch.nn.Module, anatomy: Anatomy, *, keeps_calls: bool = False) -> None:
        """`keeps_calls`: keep the first call of every block."""
        self._model, self._structure, self._keeps_calls = model, anatomy, keeps_calls
        self.calls: dict[str, BlockCall] = {}
        """By the path of the block, if they are kept."""
        self.blocks: list[str] = []
        """The paths of the blocks in the order in which they ran."""
        self._seen: list[Call] = []
        self._open: list[Call] = []
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
        call = Call(gate, is_inner=bool(self._open))
        self._seen.append(call)
        self._open.append(call)
        if gate.stack is not None:
            with self._noting():
                self._enter_block(call, gate.stack, Given(module, args, kwargs))
        return NOT_BYPASSED

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        call = self._open.pop()
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
        block = BlockCall(stack.arguments(*given), len(given.args))
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
        spans: dict[str, tuple[int, int]] = {}
        """By list: when it ran first and last."""
        for moment, call in enumerate(self._seen):
            spans[call.gate.path] = spans.get(call.gate.path, (moment,))[0], moment

        def is_beside(path: str) -> bool:
            inside = (spans[other][0] < spans[path][0] < spans[other][1] for other in spans if other in known)
            return path in self._structure.side or any(inside)

        side = tuple(path for path in spans if is_beside(path))
        ran = [known[path] for path in spans if path in known and path not in side]
        if not ran:
            raise ModelError(
                f"No block of {self._structure.model_class} ran, in {', '.join(map(repr, known))}; expected at "
                "least one stack to run. Probe the model before attaching hooks that skip blocks, with inputs that "
                "reach the blocks."
            )
        idle = tuple(path for path in known if path not in spans)
        return replace(self._structure, stacks=tuple(map(self._with_streams, ran)), side=side, idle=idle)

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
        outer = [call for call in self._seen if not call.is_inner]
        moments: dict[Segment, list[int]] = defaultdict(list)
        for moment, call in enumerate(outer):
            if call.segment is not None and call.gate.path in stacks:
                moments[call.segment].append(moment)
            else:
                call.segment = None
        if not moments:
            raise ModelError("its blocks run inside each other, so none of them can be skipped")
        residuals: Tensors = []
        for segment, own in moments.items():
            segment.stack, segment.slot = stacks[segment.stack.path], len(residuals)
            outer[own[0]].is_first = outer[own[-1]].is_last = True
            arguments = segment.stack.arguments(*self._first[segment])
            inputs = [arguments.get(stream.parameter or "") for stream in segment.stack.streams]
            residuals += added(inputs, self._last_output[segment])
        spans = [(own[0], own[-1]) for own in moments.values()]
        calls = [call for moment, call in enumerate(outer) if any(one <= moment <= end for one, end in spans)]
        leader = next(call for call in calls if call.is_first)
        trace = Trace(tuple(calls), tuple(moments), leader, anatomy.side)
        return Watched(trace, residuals, {segment: self._first[segment] for segment in moments})
