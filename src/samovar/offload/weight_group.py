"""Tensors that move together: those of one block, or all of a component that are outside its blocks.

Between calls the truth is on the host. Parameters and buffers stay the same objects; only for a call are they pointed
at device memory, in a ring or their own, and what the call has changed is copied back. So `state_dict`, adapters and
everything else that looks at weights between calls sees and changes the one true copy, and a device copy is dropped
without a thought.

Before a group is used it is compared with the model: adapters may have come or gone, weights been replaced
(`to(dtype)`, `load_state_dict`) or written to, and what the model holds now counts.

An interrupt may come between any two lines. What is lent is noted before it is, all tensors of a group change places at
once, and what a group knows is replaced as a whole: so whatever was done, the way back to the host is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from ..core.tensor_parts import Wrapper, bits, plainly, take_apart
from .coding import Form
from .device import Buffer, Stage
from .files import ModelFile, Unpinned
from .host_tiers import Tier
from .layout import (
    Piece,
    cast_for_calls,
    flat_bytes,
    held_by,
    lay_out,
    move_to_host,
    set_data,
    spans_of,
    tensors_of,
    view_of,
)
from .pinned import HostMemory, Source, new_chunk
from .ring import Mark
from .seen import Seen, versions_of

_MAX_VIEWS = 1024
"""Places of groups in a ring for which views are kept."""
_dtype = attrgetter("dtype")


class Wire(NamedTuple):
    """A piece as it crosses the bus."""

    source: Source
    piece: Piece
    seen: Seen
    """The weights as they were when it was made."""
    form: Form | None = None
    """How it is compressed."""


@dataclass(frozen=True)
class _Held:
    """What the model holds, and where that is on the host."""

    found: Sequence[torch.Tensor] = ()
    """Parameters and buffers, and what they are made of, in the order in which they are found."""
    tensors: Sequence[torch.Tensor] = ()
    """What they are made of."""
    hosts: Sequence[torch.Tensor] = ()
    """The data of each on the host."""
    places: Sequence[tuple[int, int]] = ()
    """The piece that each is in, and where in it."""
    wrappers: Sequence[Wrapper] = ()
    counted: Sequence[torch.Tensor] = ()
    """Where torch counts changes: of a wrapper, there and not in what it is made of."""
    wires: Sequence[Wire] = ()
    files: Collection[ModelFile] = ()
    """Those that weights are read from."""
    how: tuple[bool, Tier] = (False, "pinned")
    """Whether it is compressed, and where it is kept."""


@dataclass(eq=False)
class _Own:
    """A copy in device memory of its own."""

    buffer: Buffer
    changes: int
    """The group's when the memory was allocated."""
    is_sent: bool = False
    arrived: Mark = None
    """When all of it is there; None if that was waited for."""


class WeightGroup:
    """Tensors that come to the device and leave it together."""

    def __init__(
        self,
        module: torch.nn.Module,
        stage: Stage,
        host: HostMemory,
        skip: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`skip` says what of the module to leave out now (see `held_by`)."""
        self.tier: Tier = "pinned"
        self.is_coded = False
        """Whether pieces cross the bus compressed if that gains enough. Then the copy that is pinned is that one."""
        self.is_due = False
        """Whether a closer look at its weights is due: once a run."""
        self._module, self._skip, self._stage, self._host = module, skip, stage, host
        self._held = _Held()
        self._changes = 0
        self._lent: tuple[Sequence[torch.Tensor], list[int]] | None = None
        """While it is called: its data on the device, and the counts of changes before."""
        self._own: _Own | None = None

    # ------------------------------------------------------------------------------------------------ on the host

    @property
    def pieces(self) -> Sequence[int]:
        """Bytes of device memory that each piece takes."""
        return [wire.piece.num_bytes for wire in self._held.wires]

    @property
    def num_bytes(self) -> int:
        return sum(self.pieces)

    @property
    def sources(self) -> list[Source]:
        """The host bytes of each piece as they cross the bus."""
        return [wire.source for wire in self._held.wires]

    @property
    def largest_coded(self) -> int:
        """Bytes of the largest piece that crosses the bus compressed."""
        return max((wire.source.numel() for wire in self._held.wires if isinstance(wire.source, torch.Tensor)
                    and wire.form is not None), default=0)  # fmt: skip

    def prepare(self) -> int:
        """Take over what the model holds now, and pin it; returns how many changes were seen so far."""
        self.give_back()  # If a call was interrupted.
        self.check_files()
        is_due, self.is_due = self.is_due, False
        if not self._is_in_place() or not all(wire.seen.is_same(thorough=is_due) for wire in self._held.wires):
            self._adopt()
            self._host.pin(self.sources)
        return self._changes

    def check_files(self) -> None:
        """Refuse files that have changed, before their pages are touched."""
        for file in self._held.files:
            file.check()

    @plainly
    def _is_in_place(self) -> bool:
        """Whether the model holds the same tensors, where they were."""
        held, found = self._held, self._found()
        if (len(found), self.is_coded, self.tier) != (len(held.found), *held.how):
            return False
        is_set = all(map(is_, found, held.found)) and all(map(torch.Tensor.is_set_to, held.tensors, held.hosts))
        return is_set and all(map(is_, map(_dtype, held.tensors), map(_dtype, held.hosts)))

    def _found(self) -> list[torch.Tensor]:
        """What the model holds now, and what that is made of."""
        found = held_by(self._module, self._skip())
        return [*found, *take_apart(found).plain]

    @plainly
    def _adopt(self) -> None:
        """Take over the tensors that the model holds now."""
        found = self._found()
        tensors, wrappers = take_apart(found)
        self._bring_home(tensors)
        pieces = lay_out(spans_of(tensors), in_phase=self._stage.keeps_phase)
        wrapped = [wrapper.tensor for wrapper in wrappers]
        wires = self._wires(pieces, wrapped)
        placed = _places_in(pieces)
        tensors = [tensor for tensor, _ in placed]
        before, self._held = self._held, _Held(
            found,
            tensors,
            hosts=[tensor.data for tensor in tensors],
            places=[place for _, place in placed],
            wrappers=wrappers,
            counted=[*tensors, *wrapped],
            wires=wires,
            files={file for wire in wires if isinstance(wire.source, Unpinned) for file in wire.source.files},
            how=(self.is_coded, self.tier),
        )  # fmt: skip
        self._changes += 1
        self._follow()
        self._host.release((wire.source for wire in before.wires), self.sources)

    def _bring_home(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move those of some tensors to the host that are elsewhere."""
        self._host.note_phases(tensors)
        for span in spans_of(t for t in tensors if t.device.type != "cpu" or self._stage.is_here(t)):
            move_to_host(span, self._host.phase_before(span))

    def _wires(self, pieces: Sequence[Piece], wrapped: Sequence[torch.Tensor]) -> list[Wire]:
        """Pieces as they are to cross the bus. Compressed copies are kept as long as they are of the same weights."""
        known = {_place_of(wire.piece): wire for wire in self._held.wires if wire.form is not None}

        def coded(piece: Piece) -> Wire | None:
            wire = known.get(_place_of(piece))
            if wire is not None and wire.seen.is_same(thorough=True):
                return wire
            with torch.inference_mode(False):  # It is a state of the thread.
                return compressed(piece, self._stage)

        with self._host.adopting(), ThreadPoolExecutor(self._stage.num_coders()) as threads:
            found = list(threads.map(coded, pieces)) if self.is_coded else [None] * len(pieces)
            both = enumerate(zip(found, pieces, strict=True))
            return [wire or self._wire(piece, () if index else wrapped) for index, (wire, piece) in both]

    def _wire(self, piece: Piece, wrapped: Sequence[torch.Tensor]) -> Wire:
        """A piece as it is to cross the bus uncompressed: from where it is, or from a chunk into which it moves."""
        source = self._host.take_in(piece) if self.tier == "pinned" else self._host.in_place(piece)
        return Wire(source, piece, Seen(tensors_in(piece), wrapped))

    @plainly
    def anonymous_bytes(self) -> int:
        """Bytes of it that are in memory alone, and in no file."""
        self.give_back()
        return self._host.anonymous_bytes(tensors_of(self._module, self._skip()))

    def edits(self) -> int:
        """A number that changes when torch counts a change of one of the tensors."""
        return sum(versions_of(self._held.counted))

    def _follow(self) -> None:
        for wrapper in self._held.wrappers:
            wrapper.follow()

    @plainly
    def restore(self) -> None:
        """Let go for good: tensors begin where in a cache line they did before."""
        self.unload()
        for span in spans_of(self._held.tensors):
            if span.phase != self._host.phase_before(span):
                move_to_host(span, self._host.phase_before(span))
        self._held = _Held()

    # ------------------------------------------------------------------------------------------------ for a call

    def send(self, piece: int, memory: Buffer, offset: int) -> None:
        """Start to copy one piece."""
        wire = self._held.wires[piece]
        self._stage.send(memory, offset + wire.piece.start, wire.source, wire.form)

    @plainly
    def lend(self, offsets: Sequence[int], memory: Buffer) -> None:
        """Point the tensors at the device memory that their pieces were sent to."""
        held, key = self._held, (self, self._changes, *offsets)
        views = memory.views.get(key)
        if views is None:
            both = zip(held.hosts, held.places, strict=True)
            views = [view_of(memory.flat, host, offsets[piece] + offset) for host, (piece, offset) in both]
            if len(memory.views) >= _MAX_VIEWS:
                memory.views.clear()
            memory.views[key] = views
        # Noted before it is done: whatever interrupts this, `give_back` finds the way back.
        self._lent = views, versions_of(held.counted)
        set_data(held.tensors, views)
        self._follow()

    @property
    def is_lent(self) -> bool:
        return self._lent is not None

    @plainly
    def give_back(self) -> None:
        """Point the tensors at the host, if they are lent. What the call has changed is copied there."""
        if self._lent is None:
            return
        held, (views, versions) = self._held, self._lent
        now = versions_of(held.counted)
        if now == versions and all(map(torch.Tensor.is_set_to, held.tensors, views)):
            set_data(held.tensors, held.hosts)  # The usual case, quickly.
        else:
            is_counted, cast = now != versions, cast_for_calls(self._module)
            for tensor, host, view, *counts in zip(held.tensors, held.hosts, views, now, versions, strict=False):
                _take_back(tensor, host, view, is_counted, counts[0] != counts[1], id(tensor) in cast)
        self._follow()
        self._lent = None

    # ------------------------------------------------------------------------------------------------ a copy of its own

    @property
    def held_bytes(self) -> int:
        """Bytes of its own device memory."""
        return 0 if self._own is None else self._own.buffer.num_bytes

    @property
    def is_sent(self) -> bool:
        """Whether it has a copy there, or on its way."""
        return self._own is not None and self._own.is_sent

    def is_fresh(self) -> bool:
        """Whether that is a copy of what the model holds now."""
        return self.is_sent and self._own is not None and self._own.changes == self.prepare()

    def reserve(self) -> None:
        """Allocate device memory of its own for what the model holds now."""
        self.unload()
        changes = self.prepare()
        self._own = _Own(self._stage.allocate(self.num_bytes), changes)

    def load(self) -> None:
        """Start to copy it there."""
        if self._own is None or self._own.is_sent or self._own.changes != self.prepare():
            self.reserve()
        own = self._own
        assert own is not None
        for piece, offset in enumerate(self._own_offsets):
            self.send(piece, own.buffer, offset)
        own.arrived = self._stage.mark_copied()
        own.is_sent = True

    @property
    def _own_offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.pieces)][:-1]

    def lend_own(self) -> None:
        """Point the tensors at that copy, which is there when the device reaches the work enqueued next."""
        own = self._own
        assert own is not None
        if own.arrived is not None:
            self._stage.compute_waits(own.arrived)
            own.arrived = None
        self.lend(self._own_offsets, own.buffer)

    def unload(self) -> None:
        """Drop that copy."""
        self.give_back()
        own, self._own = self._own, None
        if own is not None:
            self._stage.free(own.buffer)


def _take_back(
    tensor: torch.Tensor, host: torch.Tensor, view: torch.Tensor, is_counted: bool, is_changed: bool, is_cast: bool
) -> None:
    """Point a tensor at the host. `is_counted`: torch has counted a change of any in its group; `is_cast`: it is cast
    for each call and back."""
    if tensor.is_set_to(host):
        return  # An interrupt came before it was lent, or after it was given back.
    is_set = not tensor.is_set_to(view)
    if is_set and _form(tensor) != _form(host):
        tensor.data = tensor.data.to(host.device, copy=True)  # `prepare` will adopt it.
        return
    # Batch norms do not have torch count the changes of their statistics, only those of their counter.
    is_changed = is_changed or (is_counted and not isinstance(tensor, torch.nn.Parameter))
    # A layer that is cast for its call and back has other data with the same content; to look is to wait.
    is_other = is_set and not is_cast and not torch.equal(bits(tensor), bits(view))
    if is_changed or is_other:
        host.copy_(tensor.data)
    tensor.data = host


def compressed(piece: Piece, stage: Stage) -> Wire | None:
    """A compressed copy of a piece. None if compressing gains too little."""
    span = piece.spans[0][0]
    is_words = span.tensors[0].dtype is torch.bfloat16 and span.start % 2 == 0 and span.num_bytes % 2 == 0
    seen = Seen(span.tensors)
    coded = stage.encode(flat_bytes(span).view(torch.int16)) if piece.is_large and is_words else None
    if coded is None:
        return None
    # New pages fill slowly from a device, and quickly from memory, with all cores.
    is_here = coded.data.device.type == "cpu"
    here = coded.data if is_here else torch.empty_like(coded.data, device="cpu", pin_memory=True).copy_(coded.data)
    return Wire(new_chunk(here.numel())[: here.numel()].copy_(here), piece, seen, coded.form)


def tensors_in(piece: Piece) -> list[torch.Tensor]:
    return [tensor for span, _ in piece.spans for tensor in span.tensors]


def _place_of(piece: Piece) -> Any:
    """Where its weights are."""
    span = piece.spans[0][0]
    return span.start, span.num_bytes


def _places_in(pieces: Iterable[Piece]) -> list[tuple[torch.Tensor, tuple[int, int]]]:
    """The tensors of some pieces, each with its piece and where in that it begins. Those that have moved since have new
    addresses, but the same order and distances."""
    placed = []
    for index, piece in enumerate(pieces):
        for span, offset in piece.spans:
            start = min(tensor.data_ptr() for tensor in span.tensors)
            placed += [(tensor, (index, offset + tensor.data_ptr() - start)) for tensor in span.tensors]
    return placed


def _form(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype
