"""Which tensors move together? Those of one block, or all of a component that are outside its blocks.

Parameters and buffers stay the same objects; only their `data` is swapped between host and device memory. Before a
group is sent it is compared with the model: adapters may have come or gone, or weights been replaced (`to(dtype)`,
`load_state_dict`), and what the model holds now counts.

Weights rarely change on the device, so the device copy is dropped, and copied back only if it changed. A group with
its own device memory tells by a checksum of all of it. A streamed block tells by torch's count of changes to each
tensor, which costs no wait for the device. Writes through `tensor.data` are not counted; a forward makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .host import HostMemory, move_to_host
from .staging import Buffer, Stage
from .tiers import Tier
from .truth import Bounced
from .weights import Span, lay_out, spans_of

_RESIDUES = 262_147
"""Checksums tell words apart by their position modulo this: a prime, so that rows that are swapped show."""


class _Entry(NamedTuple):
    tensor: torch.Tensor
    host: torch.Tensor
    """Its data on the host."""
    piece: int
    offset: int
    """Where in the piece it begins."""


class WeightGroup:
    """Tensors that come to the device and leave it together."""

    def __init__(self, name: str, find: Callable[[], list[torch.Tensor]], stage: Stage, host: HostMemory) -> None:
        """`find` looks up the tensors as the model holds them now."""
        self.name = name
        self.keeps_host = True
        """Whether there is a host copy while it is loaded. Resident weights have none."""
        self.tier: Tier = "pinned"
        """Where that copy is."""
        self.is_pinned = True
        """Whether that copy is to be pinned."""
        self.pieces: Sequence[int] = ()
        self.sources: list[torch.Tensor | Bounced] = []
        """The host bytes of each piece."""
        self._find, self._stage, self._host = find, stage, host
        self._entries: list[_Entry] = []
        self._left: dict[int, _Place] = {}
        """By tensor id, where its data is as we left it."""
        self._lent: list[tuple[_Place, int]] = []
        """The place and the count of changes of each tensor, as the block's call began."""
        self._starts: Sequence[int] = ()
        """Where in each piece its source begins."""
        self._phases: dict[int, int] = {}
        """By tensor id, where in a cache line its data began before we moved it."""
        self._buffer: Buffer | None = None
        """Its own device memory, if it is loaded."""

    # ------------------------------------------------------------------------------------------------ on the host

    @torch.inference_mode(False)  # Otherwise parameters would be bound to inference mode.
    def adopt(self) -> None:
        """Take over the tensors that the model holds now. Pinning them is up to the caller."""
        tensors = self._find()
        self._return_to_host(tensors)
        if self.keeps_host and self.tier == "disk":
            self._host.spill(tensors)
        pieces = lay_out(spans_of(tensors), in_phase=self._stage.keeps_phase)
        before = self.sources
        self.sources = self._host.adopt(pieces, pinned=self.keeps_host and self.is_pinned, tier=self.tier)
        self._host.release(before, self.sources)
        # Tensors that were copied have new addresses, but the same order and distances.
        self._entries = [
            _Entry(tensor, tensor.data, index, offset + tensor.data_ptr() - min(t.data_ptr() for t in span.tensors))
            for index, piece in enumerate(pieces)
            for span, offset in piece.spans
            for tensor in span.tensors
        ]
        self.pieces = [piece.num_bytes for piece in pieces]
        self._starts = [piece.start for piece in pieces]
        self._remember()

    def prepare(self) -> None:
        """Make sure that what is about to be sent is what the model holds."""
        if not self.is_current():
            self.adopt()
            if self.keeps_host and self.is_pinned:
                self._host.pin(self.sources)

    def anonymous_bytes(self) -> int:
        """Bytes of it that are in memory alone, and in no file."""
        ours = {id(entry.tensor): entry.host for entry in self._entries}
        return self._host.anonymous_bytes(ours.get(id(tensor), tensor) for tensor in self._find())

    def is_current(self) -> bool:
        """Whether the model holds what we left it with."""
        tensors, left = self._find(), self._left
        is_ours = len(tensors) == len(left) and all(left.get(id(tensor)) == _place(tensor) for tensor in tensors)
        return is_ours and self._host.is_current(self.sources)

    def edits(self) -> int:
        """A number that changes when torch counts a change of one of the tensors."""
        return sum(_version(entry.tensor) for entry in self._entries)

    def fingerprint(self) -> Any:
        """What the model holds, as far as a quick look tells; equal as long as nobody changes it."""
        samples = [self._host.fingerprint(source) for source in self.sources]
        return [(id(tensor), _place(tensor), _version(tensor)) for tensor in self._find()], samples

    def _return_to_host(self, tensors: list[torch.Tensor]) -> None:
        """Point our tensors back at the host copy; copy replaced ones to the host."""
        ours = {id(entry.tensor): entry.host for entry in self._entries}
        away: list[torch.Tensor] = []
        for tensor in tensors:
            if id(tensor) in ours and self._is_ours(tensor):
                tensor.data = ours[id(tensor)]
                continue
            self._phases[id(tensor)] = Span(tensor.data_ptr(), 0, (tensor,)).phase
            if self._stage.is_here(tensor) or tensor.device.type != "cpu":
                away.append(tensor)
        for span in spans_of(away):
            move_to_host(span, span.phase)

    def _remember(self) -> None:
        self._left = {id(entry.tensor): _place(entry.tensor) for entry in self._entries}

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return self._left.get(id(tensor)) == _place(tensor)

    @torch.inference_mode(False)
    def restore(self) -> None:
        """Let go for good: tensors on the host begin where in a cache line they did before."""
        ours = [tensor for tensor in self._find() if self._is_ours(tensor)]
        for span in spans_of(ours):
            if span.phase != self._phase_before(span):
                move_to_host(span, self._phase_before(span))
        self.sources, self._entries, self._left, self._phases = [], [], {}, {}

    def _phase_before(self, span: Span) -> int:
        return self._phases.get(id(span.tensors[0]), span.phase)

    # ------------------------------------------------------------------------------------------------ on the device

    def send(self, piece: int, memory: Buffer, offset: int) -> None:
        """Start to copy one piece."""
        self._stage.send(memory, offset + self._starts[piece], self.sources[piece])

    def use_device(self, offsets: Sequence[int], memory: Buffer) -> None:
        """Point the tensors at the device memory that their pieces were sent to."""
        for tensor, host, piece, offset in self._entries:
            tensor.data = memory.view(host, offsets[piece] + offset)
        self._lent = [(_place(entry.tensor), _version(entry.tensor)) for entry in self._entries]

    @torch.inference_mode(False)
    def use_host(self) -> None:
        """Point the tensors at the host copy, if they are lent. What the call has changed is copied back."""
        now = [(_place(entry.tensor), _version(entry.tensor)) for entry in self._entries]
        is_any_changed = self._lent not in (now, [])
        for (tensor, host, _, _), before, after in zip(self._entries, self._lent, now, strict=False):
            # Batch norms do not have torch count the changes of their statistics, only those of their counter.
            if is_any_changed and (before != after or not isinstance(tensor, torch.nn.Parameter)):
                if _place(host)[1:] != after[0][1:]:
                    tensor.data = tensor.data.to(host.device, copy=True)  # `prepare` will adopt it.
                    continue
                host.copy_(tensor.data)
            tensor.data = host
        self._lent = []

    def load(self) -> None:
        """Copy it to its own device memory. `compute_waits` is up to the caller."""
        self._buffer = self._stage.allocate(sum(self.pieces))
        offsets = [sum(self.pieces[:piece]) for piece in range(len(self.pieces))]
        for piece, offset in enumerate(offsets):
            self.send(piece, self._buffer, offset)
        self.use_device(offsets, self._buffer)
        self._lent = []
        self._remember()
        if not self.keeps_host:
            self.sources, self._entries = [], []

    def checksum(self) -> torch.Tensor:
        """A number on the device that tells whether its device memory changed. This does not wait for the device."""
        assert self._buffer is not None
        words = self._buffer.flat.view(torch.int64)
        columns = max(min(words.numel(), _RESIDUES), 1)
        rows = words.numel() // columns
        sums = words[: rows * columns].view(rows, columns).sum(0)
        rest = words[rows * columns :]
        sums[: rest.numel()] += rest
        weights = torch.arange(1, 2 * columns, 2, device=words.device) * -7046029254386353131
        return (sums * weights).sum()

    @torch.inference_mode(False)
    def unload(self, *, keep_changes: bool = False) -> None:
        """Drop the device copy. Weights without a host copy are copied back, and with `keep_changes` all of them."""
        if self._buffer is None:
            return
        if not self.keeps_host:
            for span in spans_of(filter(self._stage.is_here, self._find())):
                move_to_host(span, self._phase_before(span))
        for tensor, host, _, _ in self._entries if keep_changes else ():
            if self._is_ours(tensor):
                host.copy_(tensor.data)
        self._return_to_host([entry.tensor for entry in self._entries])
        self._left = {id(entry.tensor): _place(entry.host) for entry in self._entries}  # Not what others have set.
        self._stage.free(self._buffer)
        self._buffer = None


_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""An address, and what is read there."""


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed, as far as torch counts; not at all for one that was made in inference mode."""
    try:
        return tensor._version
    except RuntimeError:
        return 0
