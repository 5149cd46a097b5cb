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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..arch.blocks import Anatomy, BlockStack, Place, Stream, in_form_of, output_values
from ..arch.modules import unwrapped
from ..core import nested
from ..core.errors import DeclarationError, ModelError
from ..hooks import NOT_BYPASSED
from .gates import Gate, Gates

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

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The carried argument for each returned value; None where nothing is carried."""
        return [
            None if place is None else args[place] if isinstance(place, int) else kwargs[place] for place in self.places
        ]


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
    """An output of this form with these values. Zeros replace a value of another form, on the device of the tensors
    that were given."""
    if form is None:
        return None

    def zeros(part: torch.Tensor) -> torch.Tensor:
        device = next((value.device for value in given if isinstance(value, torch.Tensor)), torch.device("cpu"))
        return torch.zeros((), dtype=part.dtype, device=device).expand(part.shape)

    pairs = zip(values, output_values(form), strict=True)
    return in_form_of(
        form, [v.to(part.dtype) if alike(v, part) else nested.map_tensors(zeros, part) for v, part in pairs]
    )


def added(inputs: Sequence[Any], output: Any) -> Tensors:
    """What was added to each input; the returned value itself where no input has its form."""
    pairs = list(zip(inputs, output_values(output), strict=True))
    found = [(after - before if alike(before, after) else after.clone()).detach()
             if isinstance(after, torch.Tensor) else None for before, after in pairs]  # fmt: skip
    return list(found)


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


class _Flow:
    """What the calls of one stack hand on, from each to the next."""

    def __init__(self) -> None:
        self._last: BlockCall | None = None
        self._ran_once = True
        self._by_identity: dict[int, set[str]] = defaultdict(set)
        """By place in the output: the parameters that took the very tensor."""
        self._by_form: dict[int, set[str]] = {}
        """By place in the output: the parameters that had its form in every call."""
        self._changing: set[str] = set()
        """The parameters that did not get the same value at every call."""

    def enter(self, call: BlockCall) -> None:
        last, self._last = self._last, call
        if last is None:
            return
        self._ran_once = False
        returned = output_values(last.output)
        for name, value in _tensors(call.arguments):
            taken = [place for place, other in enumerate(returned) if other is value]
            for place in taken:
                self._by_identity[place].add(name)
            before = last.arguments.get(name)
            if taken or not (
                value is before or nested.equal(value, before)
            ):  # A block may write into what it is given.
                self._changing.add(name)

    def leave(self, output: Any) -> None:
        assert self._last is not None
        self._last.output = output
        for place, value in enumerate(output_values(output)):
            if isinstance(value, torch.Tensor):
                named = _tensors(self._last.arguments)
                names = {name for name, other in named if (other.shape, other.dtype) == (value.shape, value.dtype)}
                self._by_form[place] = self._by_form.get(place, names) & names

    def streams(self, parameters: Sequence[str], count: int) -> tuple[Stream, ...]:
        """The parameter that carries each of the returned values."""
        order = {name: place for place, name in enumerate(parameters)}
        found: dict[int, str] = {}
        for names_by_place, is_certain in ((self._by_identity, True), (self._by_form, self._ran_once)):
            for place, names in names_by_place.items():
                free = names.difference(found.values())
                likely = free & self._changing or (free if is_certain else set())
                if likely and place not in found:  # What only `**kwargs` takes has no place in the order.
                    found[place] = min(likely, key=lambda name: (order.get(name, len(order)), name))
        return tuple(Stream(found.get(place)) for place in range(count))


def _tensors(arguments: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in arguments.items() if isinstance(value, torch.Tensor)]


@dataclass(eq=False)
class _Seen:
    """A call, noted while its forward runs."""

    gate: Gate
    is_inner: bool
    """Whether it was called inside of another: that is its private business."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Where each parameter of the stack was given."""
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    run: int = 0
    """Which run of blocks of its list it belongs to."""
    returned: Any = None

    @property
    def key(self) -> _Key:
        return self.gate.path, self.run


class Watcher:
    """A pass that lets every block compute, and notes what the blocks are given and return."""

    def __init__(self, model: torch.nn.Module, anatomy: Anatomy, *, keeps_calls: bool = False) -> None:
        """`keeps_calls`: keep the first call of every block."""
        self._model, self._structure, self._keeps_calls = model, anatomy, keeps_calls
        self.calls: dict[str, BlockCall] = {}
        """By the path of the block, if they are kept."""
        self.blocks: list[str] = []
        """The paths of the blocks in the order in which they ran."""
        self.returned: dict[torch.nn.Module, Any] = {}
        """By block: the form of its output, as tensors without data."""
        self._seen: list[_Seen] = []
        self._open: list[_Seen] = []
        self._flows: dict[str, _Flow] = defaultdict(_Flow)
        self._latest: dict[str, _Seen] = {}
        self._first: dict[_Key, Given] = {}
        """Copies of the arguments of the first call of each run: blocks may overwrite them."""
        self._last_output: dict[_Key, Any] = {}
        self._failure: ModelError | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, forwards of the model on this thread are watched."""
        with Gates(self._model, self._structure, "watch") as gates, gates.asking(self):
            yield

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        seen = _Seen(gate, is_inner=bool(self._open))
        self._seen.append(seen)
        self._open.append(seen)
        with self._noting():
            if gate.stack is not None:
                self._enter_block(seen, gate.stack, Given(module, args, kwargs))
        return NOT_BYPASSED

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        seen = self._open.pop()
        with self._noting():
            seen.returned = nested.without_data(output)
            if gate.stack is not None and self._failure is None:
                self.returned[unwrapped(module)] = seen.returned
                self._flows[gate.path].leave(output)
                self._last_output[seen.key] = output

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Inside, an error ends the watching, and not the forward."""
        try:
            yield
        except ModelError as error:
            self._failure = self._failure or error

    def _enter_block(self, seen: _Seen, stack: BlockStack, given: Given) -> None:
        seen.places = stack.places(*given)
        call = BlockCall(stack.arguments(*given), len(given.args))
        self._flows[stack.path].enter(call)
        path = stack.block_paths[seen.gate.index]
        self.blocks.append(path)
        if self._keeps_calls:
            self.calls.setdefault(path, call)
        seen.shapes = {name: value.shape for name, value in _tensors(call.arguments)}
        before = self._latest.get(stack.path)
        if before is not None:  # Another run, if the list starts again or hands on another shape.
            reshaped = any(before.shapes.get(name, shape) != shape for name, shape in seen.shapes.items())
            seen.run = before.run + (seen.gate.index <= before.gate.index or reshaped)
        self._latest[stack.path] = seen
        if seen.key not in self._first:
            self._first[seen.key] = given.copied()

    # ------------------------------------------------------------------------------------------------ the result

    def anatomy(self) -> Anatomy:
        """The stacks that ran, in that order, with their streams; what ran between blocks is set aside."""
        if self._failure is not None:
            raise self._failure
        known = {stack.path: stack for stack in self._structure.stacks}
        moments: dict[str, list[int]] = defaultdict(list)
        for moment, seen in enumerate(self._seen):
            moments[seen.gate.path].append(moment)

        def runs_inside_another(path: str) -> bool:
            others = (other for name, other in moments.items() if name in known and name != path)
            return any(other[0] < moments[path][0] < other[-1] for other in others)

        side = tuple(path for path in moments if path in self._structure.side or runs_inside_another(path))
        ran = [known[path] for path in moments if path in known and path not in side]
        if not ran:
            raise ModelError(
                f"No block of {self._structure.model_class} ran, in {', '.join(map(repr, known))}; expected at "
                "least one stack to run. Probe the model before attaching hooks that skip blocks, with inputs that "
                "reach the blocks."
            )
        idle = tuple(path for path in known if path not in moments)
        return replace(self._structure, stacks=tuple(map(self._with_streams, ran)), side=side, idle=idle)

    def _with_streams(self, stack: BlockStack) -> BlockStack:
        """The stack as its blocks ran; what was declared stays as declared."""
        blocks = zip(stack.block_paths, map(unwrapped, stack.modules(self._model)), strict=True)
        counts = {len(output_values(self.returned[block])): path for path, block in blocks if block in self.returned}
        if len(counts) != 1:
            found = ", ".join(f"{count} by {path!r}" for count, path in counts.items())
            raise ModelError(
                f"The blocks of {stack.path!r} return different numbers of values ({found}); expected the same "
                "number from each. Register an extractor for such a model: samovar.cache.register_extractor."
            )
        (count,) = counts
        if stack.evidence != "declaration":
            return replace(stack, streams=self._flows[stack.path].streams(stack.parameters, count), evidence="probe")
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
        outer = [seen for seen in self._seen if not seen.is_inner]
        moments: dict[_Key, list[int]] = defaultdict(list)
        for moment, seen in enumerate(outer):
            if seen.gate.path in stacks:
                moments[seen.key].append(moment)
        if not moments:
            raise ModelError("its blocks run inside each other, so none of them can be skipped")
        segments: dict[_Key, Segment] = {}
        residuals: Tensors = []
        for key in moments:
            stack = stacks[key[0]]
            segments[key] = Segment(stack, len(residuals))
            arguments = stack.arguments(*self._first[key])
            inputs = [arguments.get(stream.parameter or "") for stream in stack.streams]
            residuals += added(inputs, self._last_output[key])
        calls = tuple(_calls(outer, segments, moments))
        leader = next(call for call in calls if call.is_first)
        trace = Trace(calls, tuple(segments.values()), leader, anatomy.side)
        return Watched(trace, residuals, {segment: self._first[key] for key, segment in segments.items()})


def _calls(
    outer: Sequence[_Seen], segments: Mapping[_Key, Segment], moments: Mapping[_Key, Sequence[int]]
) -> Iterator[Call]:
    """What is answered on a skipped step: all blocks, and what runs between them."""
    for moment, seen in enumerate(outer):
        if seen.key in segments:
            segment, own = segments[seen.key], moments[seen.key]
            places = tuple(seen.places.get(stream.parameter or "") for stream in segment.stack.streams)
            yield Call(seen.gate, segment, moment == own[0], moment == own[-1], places, seen.returned)
        elif any(other[0] < moment < other[-1] for other in moments.values()):
            count = 0 if seen.returned is None else len(output_values(seen.returned))
            yield Call(seen.gate, None, False, False, (None,) * count, seen.returned)
