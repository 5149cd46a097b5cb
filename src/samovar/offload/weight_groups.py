"""Which tensors move together? Those of one block, or all of a component that are outside its blocks.

Parameters and buffers stay the same objects; only their `data` is swapped between host and device memory. Before a
group is sent it is compared with the model: adapters may have come or gone, or weights been replaced (`to(dtype)`,
`load_state_dict`), and what the model holds now counts.

Weights rarely change on the device, so the device copy is dropped, and copied back only if it changed. A group with
its own device memory tells by a checksum of all of it, and by torch's counts. A streamed block tells by torch's count
of changes to each tensor, which costs no wait for the device. Writes through `tensor.data` are not counted; a forward
makes none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from ..core.tensor_parts import Wrapper, bits, plainly, take_apart
from .coded import CodedFile, Copy, checksum, code, version_of
from .files import ModelFile, Unpinned
from .host import HostMemory, move_to_host
from .staging import Buffer, Stage
from .tiers import Tier
from .weights import LINE, Piece, Span, lay_out, spans_of

_MOST_VIEWS = 16
"""Places in the ring for which views are kept: making them takes the host longer than all else that it does."""
_THREADS = 4
_SAMPLES = 64
"""Bytes of each piece that are looked at for changes that torch does not count."""


class _Entry(NamedTuple):
    tensor: torch.Tensor
    host: torch.Tensor
    """Its data on the host."""
    piece: int
    offset: int
    """Where in the piece it begins."""
    span: tuple[int, int]
    """Where in the piece the memory that it shares with others begins, and its length."""


class WeightGroup:
    """Tensors that come to the device and leave it together."""

    def __init__(
        self,
        name: str,
        find: Callable[[], list[torch.Tensor]],
        stage: Stage,
        host: HostMemory,
        find_cast: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        """`find` looks up the tensors as the model holds them now; they are moved as what they are made of.
        `find_cast`: the ids of those that are cast for each call and back."""
        self.name = name
        self.keeps_host = True
        """Whether there is a host copy while it is loaded. Resident weights have none."""
        self.tier: Tier = "pinned"
        """Where it is."""
        self.is_coded = False
        """Whether pieces cross the bus coded if that gains enough. Then the copy that is pinned is the coded one."""
        self.pieces: Sequence[int] = ()
        self.sources: list[torch.Tensor | Unpinned] = []
        """The host bytes of each piece."""
        self.file: CodedFile | None = None
        """Where coded copies are looked for, and kept."""
        self.copies: list[Copy | None] = []
        """The coded or shared copy of each piece that has one."""
        self._find, self._find_cast, self._stage, self._host = find, find_cast, stage, host
        self._cast: Collection[int] = ()
        self._entries: list[_Entry] = []
        self._tensors: list[torch.Tensor] = []
        self._hosts: list[torch.Tensor] = []
        """Of the entries."""
        self._wrappers: list[Wrapper] = []
        self._left: dict[int, _Place] = {}
        """By tensor id, where its data is as we left it."""
        self._lent: tuple[list[torch.Tensor], list[int]] | None = None
        """While a streamed block is called: its data on the device, and the counts of changes before."""
        self._files: list[ModelFile] = []
        """Those that its weights are read from."""
        self._was: tuple[bool, Tier] = (False, "pinned")
        """Whether it was coded, and its tier, when it was adopted."""
        self._starts: Sequence[int] = ()
        """Where in each piece its source begins."""
        self._phases: dict[int, int] = {}
        """By tensor id, where in a cache line its data began before we moved it."""
        self._buffer: Buffer | None = None
        """Its own device memory, if it is loaded."""
        self.loaded_sum: torch.Tensor | None = None
        """The checksum of its device memory as it was loaded, on the device."""
        self._found: list[torch.Tensor] = []
        """What `find` returned when it was adopted."""
        self._views: dict[tuple[int, ...], list[torch.Tensor]] = {}
        """Its tensors in the ring, by the offsets of its pieces there."""
        self._viewed: Buffer | None = None

    # ------------------------------------------------------------------------------------------------ on the host

    @plainly
    def adopt(self) -> None:
        """Take over the tensors that the model holds now. Pinning them is up to the caller."""
        self.use_host()  # If a call was interrupted: the ring's memory is not the model's.
        found = self._find()
        tensors, self._wrappers, _ = take_apart(found)
        self._return_to_host(tensors)
        pieces = lay_out(spans_of(tensors), in_phase=self._stage.keeps_phase)
        before = self.wires
        with self._host.adopting():
            self._copy(pieces)
            self.sources = [
                self._host.adopt(piece, self.tier, pinned=self.keeps_host)
                if copy is None
                else self._host.in_place(piece)
                for piece, copy in zip(pieces, self.copies, strict=True)
            ]
        read = [source for source in self.sources if isinstance(source, Unpinned)]
        self._files = list({part.file for source in read for _, part in source.parts if part.file is not None})
        # Tensors that were copied have new addresses, but the same order and distances.
        self._entries = [
            _Entry(tensor, tensor.data, index, offset + tensor.data_ptr() - start, (offset, span.num_bytes))
            for index, piece in enumerate(pieces)
            for span, offset in piece.spans
            for start in [min(tensor.data_ptr() for tensor in span.tensors)]
            for tensor in span.tensors
        ]
        self._tensors, self._hosts = [entry.tensor for entry in self._entries], [entry.host for entry in self._entries]
        self.pieces = [piece.num_bytes for piece in pieces]
        self._starts = [piece.start for piece in pieces]
        self._found, self._cast = found, self._find_cast()
        self._tell_wrappers()
        self.forget_views()
        self._left = {id(tensor): _place(tensor) for tensor in self._tensors}
        self._host.release(before, self.wires)

    def _copy(self, pieces: Sequence[Piece]) -> None:
        """Code what gains by it, but for what is coded already; share other copies, if that is asked for."""
        # Looked at here: a thread knows of no run, and looks less closely.
        fresh = [copy for copy in self.copies if copy is not None and copy.form is not None and copy.is_fresh()]
        known = {copy.address: copy for copy in fresh}
        self._was = self.is_coded, self.tier
        if not (self.keeps_host and self.tier == "pinned"):
            self.copies = [None] * len(pieces)
            return

        def coded(piece: Piece) -> Copy | None:
            with torch.inference_mode(False):  # It is a state of the thread.
                return code(piece, self._stage, known.get(piece.spans[0][0].start), self.file)

        if not self.is_coded:
            self.copies = [self._shared(piece) for piece in pieces]
            return

        # Most of the time goes into copies between host and device, and into new pages.
        with ThreadPoolExecutor(1 if self._stage.device.type == "cpu" else _THREADS) as threads:
            self.copies = list(threads.map(coded, pieces))

    def _shared(self, piece: Piece) -> Copy | None:
        source = self._host.in_place(piece)
        data = self._host.share(source)
        tensors = [tensor for span, _ in piece.spans for tensor in span.tensors]
        return None if data is None else Copy([part.memory for _, part in source.parts], tensors, None, data)

    @property
    def wires(self) -> list[torch.Tensor | Unpinned]:
        """The host bytes of each piece as they cross the bus."""
        both = zip(self.sources, self.copies, strict=True)
        return [source if copy is None else copy.data for source, copy in both]

    def prepare(self) -> None:
        """Make sure that what is about to be sent is what the model holds."""
        if self.update() and self.keeps_host and self.tier == "pinned":
            self._host.pin(self.wires)

    def update(self) -> bool:
        """Take over what the model holds now, if that is not what we left it with, and say whether."""
        is_current = self.is_current()
        if not is_current:
            self.adopt()
        return not is_current

    def check_files(self) -> None:
        """Refuse files that have changed, before their pages are touched."""
        for file in self._files:
            file.check()

    def is_current(self) -> bool:
        """Whether the model holds what we left it with."""
        self.check_files()
        return self._is_in_place() and all(copy is None or copy.is_fresh() for copy in self.copies)

    @plainly
    def _is_in_place(self) -> bool:
        if (self.is_coded, self.tier) != self._was:
            return False
        found, left = self._find(), self._left
        if found is self._found and self._entries and self._buffer is None:  # The usual case, quickly.
            is_set = all(map(torch.Tensor.is_set_to, self._tensors, self._hosts))
            return is_set and all(map(is_, map(_dtype, self._tensors), map(_dtype, self._hosts)))
        tensors = take_apart(found).plain
        return len(tensors) == len(left) and all(left.get(id(tensor)) == _place(tensor) for tensor in tensors)

    @plainly
    def anonymous_bytes(self) -> int:
        """Bytes of it that are in memory alone, and in no file."""
        ours = {id(entry.tensor): entry.host for entry in self._entries}
        return self._host.anonymous_bytes(ours.get(id(tensor), tensor) for tensor in take_apart(self._find()).plain)

    @plainly
    def edits(self) -> int:
        """A number that changes when torch counts a change of one of the tensors."""
        return sum(self._versions())

    def _versions(self) -> list[int]:
        """How often each tensor was changed, as far as torch counts. A change of a wrapper is counted there, and not of
        what it is made of."""
        tensors = [*self._tensors, *(wrapper.tensor for wrapper in self._wrappers)]
        try:
            return list(map(_version, tensors))
        except RuntimeError:  # One was made in inference mode.
            return list(map(version_of, tensors))

    def fingerprint(self) -> Any:
        """What the model holds, as far as a quick look tells; equal as long as nobody changes it."""
        memories = [
            memory
            for source in self.sources
            for memory in ([source] if isinstance(source, torch.Tensor) else [part.memory for _, part in source.parts])
        ]
        samples = [memory[:: max(memory.numel() // _SAMPLES, 1) | 1].numpy().tobytes() for memory in memories]
        return self._is_in_place(), self.edits(), samples

    def _return_to_host(self, tensors: list[torch.Tensor]) -> None:
        """Point our tensors back at the host copy; copy replaced ones to the host."""
        ours = {id(entry.tensor): entry.host for entry in self._entries}
        away: list[torch.Tensor] = []
        for tensor in tensors:
            host = ours.get(id(tensor))
            if host is not None and (tensor.is_set_to(host) or self._is_ours(tensor)):
                tensor.data = host
                continue
            self._phases[id(tensor)] = Span(tensor.data_ptr(), 0, (tensor,)).phase
            if self._stage.is_here(tensor) or tensor.device.type != "cpu":
                away.append(tensor)
        for span in spans_of(away):
            move_to_host(span, span.phase)

    def _tell_wrappers(self) -> None:
        for wrapper in self._wrappers:
            wrapper.follow()

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return self._left.get(id(tensor)) == _place(tensor)

    @plainly
    def restore(self) -> None:
        """Let go for good: tensors on the host begin where in a cache line they did before."""
        ours = [tensor for tensor in take_apart(self._find()).plain if self._is_ours(tensor)]
        for span in spans_of(ours):
            if span.phase != self._phase_before(span):
                move_to_host(span, self._phase_before(span))
        self.sources, self.copies, self._left, self._phases, self._files = [], [], {}, {}, []
        self._entries, self._tensors, self._hosts = [], [], []
        self._found, self._wrappers = [], []

    def _phase_before(self, span: Span) -> int:
        return self._phases.get(id(span.tensors[0]), span.phase)

    # ------------------------------------------------------------------------------------------------ on the device

    def send(self, piece: int, memory: Buffer, offset: int) -> None:
        """Start to copy one piece."""
        copy = self.copies[piece]
        target = offset + self._starts[piece]
        if copy is None:
            self._stage.send(memory, target, self.sources[piece])
        else:
            self._stage.send(memory, target, copy.data, copy.form)

    @plainly
    def use_device(self, offsets: Sequence[int], memory: Buffer) -> None:
        """Point the tensors at the device memory that their pieces were sent to."""
        if memory is not self._viewed or len(self._views) >= _MOST_VIEWS:
            self.forget_views()
            self._viewed = memory
        views = self._views.get(tuple(offsets))
        if views is None:
            views = [memory.view(host, offsets[piece] + offset) for _, host, piece, offset, _ in self._entries]
            self._views[tuple(offsets)] = views
        # Noted before it is done: whatever interrupts this, `use_host` finds the way back.
        self._lent = views, self._versions()
        _set_data(self._tensors, views)
        self._tell_wrappers()

    def forget_views(self) -> None:
        """Let go of the ring's memory."""
        self._views, self._viewed = {}, None

    @plainly
    def use_host(self) -> None:
        """Point the tensors at the host copy, if they are lent. What the call has changed is copied back."""
        if self._lent is None:
            return
        views, versions = self._lent
        is_counted = self._versions() != versions
        lent = list(zip(self._entries, views, versions, strict=False))
        if not is_counted and all(map(torch.Tensor.is_set_to, self._tensors, views)):
            _set_data(self._tensors, self._hosts)  # The usual case, quickly.
            lent = []
        for (tensor, host, piece, *_), view, version in lent:
            if tensor.is_set_to(host):
                continue  # An interrupt came before it was lent, or after it was given back.
            is_set = not tensor.is_set_to(view)
            if is_set and _place(tensor)[1:] != _place(host)[1:]:
                tensor.data = tensor.data.to(host.device, copy=True)  # `prepare` will adopt it.
                continue
            # Batch norms do not have torch count the changes of their statistics, only those of their counter.
            is_changed = is_counted and (version_of(tensor) != version or not isinstance(tensor, torch.nn.Parameter))
            # A layer that is cast for its call and back has other data with the same content; to look is to wait.
            is_other = is_set and id(tensor) not in self._cast and not torch.equal(bits(tensor), bits(view))
            if is_changed or is_other:
                host.copy_(tensor.data)
                if copy := self.copies[piece]:
                    copy.expire()
            tensor.data = host
        self._tell_wrappers()
        self._lent = None

    @plainly
    def load(self) -> None:
        """Copy it to its own device memory. `compute_waits` is up to the caller."""
        self._buffer = self._stage.allocate(sum(self.pieces))
        offsets = [sum(self.pieces[:piece]) for piece in range(len(self.pieces))]
        for piece, offset in enumerate(offsets):
            self.send(piece, self._buffer, offset)
        parts: dict[tuple[int, int], Buffer] = {}
        views: list[torch.Tensor] = []
        for _, host, piece, offset, (start, num_bytes) in self._entries:
            if (piece, start) not in parts:
                line = start - start % LINE
                parts[piece, start] = self._buffer.part(offsets[piece] + line, start - line + max(num_bytes, 1))
            views.append(parts[piece, start].view(host, offset - start + start % LINE))
        self._left = {id(tensor): _place(view) for tensor, view in zip(self._tensors, views, strict=True)}
        _set_data(self._tensors, views)
        self._tell_wrappers()
        if not self.keeps_host:
            self.sources, self.copies = [], []
            self._entries, self._tensors, self._hosts = [], [], []

    @property
    def is_loaded(self) -> bool:
        return self._buffer is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of its own device memory."""
        return 0 if self._buffer is None else self._buffer.flat.numel()

    def note_loaded(self) -> None:
        """Everything has been sent: what differs from now on was changed on the device."""
        self.loaded_sum = self.checksum()

    def checksum(self) -> torch.Tensor:
        """A number on the device that tells whether its weights were changed there: torch's count of changes, and a sum
        of the device memory, as torch does not count all. This does not wait for the device."""
        assert self._buffer is not None
        return checksum(self._buffer.flat) + self.edits()

    @plainly
    def keep_changes(self) -> None:
        """Copy what is on the device back into the host copy."""
        for tensor, host, *_ in self._entries:
            if self._is_ours(tensor):
                host.copy_(tensor.data)

    @plainly
    def unload(self) -> None:
        """Drop the device copy. Weights without a host copy are copied back."""
        if self._buffer is None:
            return
        self.loaded_sum = None
        if not self.keeps_host:
            for span in spans_of(filter(self._stage.is_here, take_apart(self._find()).plain)):
                move_to_host(span, self._phase_before(span))
        self._return_to_host([entry.tensor for entry in self._entries])
        self._tell_wrappers()
        self._left = {id(entry.tensor): _place(entry.host) for entry in self._entries}  # Not what others have set.
        buffer, self._buffer = self._buffer, None
        self._stage.free(buffer)


_dtype = attrgetter("dtype")
_version = attrgetter("_version")


def _set_data(tensors: Iterable[torch.Tensor], data: Iterable[torch.Tensor]) -> None:
    """In a loop that Python does not run: a quantised block has a hundred tensors."""
    deque(map(setattr, tensors, repeat("data"), data), maxlen=0)


_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""An address, and what is read there."""


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
