"""Which tensors move together? Those of one block, or all of a component that are outside its blocks.

Parameters and buffers stay the same objects; only their `data` is swapped between host and device memory. Weights do
not change on the device, so unloading drops the device copy. Before a group is sent it is compared with the model:
adapters may have come or gone, or weights been replaced (`to(dtype)`, `load_state_dict`), and what the model holds now
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .host import HostMemory, move_to_host
from .staging import Buffer, Stage
from .tiers import Tier
from .truth import Bounced
from .weights import Span, lay_out, spans_of


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
        self.pieces: Sequence[int] = ()
        self.sources: list[torch.Tensor | Bounced] = []
        """The host bytes of each piece."""
        self._find, self._stage, self._host = find, stage, host
        self._entries: list[_Entry] = []
        self._left: dict[int, int] = {}
        """By tensor id, the address of its data as we left it."""
        self._starts: Sequence[int] = ()
        """Where in each piece its source begins."""
        self._phases: dict[int, int] = {}
        """By tensor id, where in a cache line its data began before we moved it."""
        self._buffer: Buffer | None = None
        """Its own device memory, if it is loaded."""

    # ------------------------------------------------------------------------------------------------ on the host

    def adopt(self) -> None:
        """Take over the tensors that the model holds now. Pinning them is up to the caller."""
        tensors = self._find()
        self._return_to_host(tensors)
        if self.keeps_host and self.tier == "disk":
            self._host.spill(tensors)
        pieces = lay_out(spans_of(tensors), in_phase=self._stage.keeps_phase)
        self.sources = self._host.adopt(pieces, pinned=self.keeps_host, tier=self.tier)
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
            if self.keeps_host:
                self._host.pin(self.sources)

    def anonymous_bytes(self) -> int:
        """Bytes of it that are in memory alone, and in no file."""
        ours = {id(entry.tensor): entry.host for entry in self._entries}
        return self._host.anonymous_bytes(ours.get(id(tensor), tensor) for tensor in self._find())

    def is_current(self) -> bool:
        """Whether the model holds what we left it with."""
        tensors, left = self._find(), self._left
        is_ours = len(tensors) == len(left) and all(left.get(id(tensor)) == tensor.data_ptr() for tensor in tensors)
        return is_ours and self._host.is_current(self.sources)

    def _return_to_host(self, tensors: list[torch.Tensor]) -> None:
        """Point our tensors back at the host copy; copy replaced ones to the host."""
        ours = {id(entry.tensor): entry.host for entry in self._entries}
        away: list[torch.Tensor] = []
        for tensor in tensors:
            if id(tensor) in ours and tensor.data_ptr() == self._left[id(tensor)]:
                tensor.data = ours[id(tensor)]
                continue
            self._phases[id(tensor)] = Span(tensor.data_ptr(), 0, (tensor,)).phase
            if self._stage.is_here(tensor) or tensor.device.type != "cpu":
                away.append(tensor)
        for span in spans_of(away):
            move_to_host(span, span.phase)

    def _remember(self) -> None:
        self._left = {id(entry.tensor): entry.tensor.data_ptr() for entry in self._entries}

    def restore(self) -> None:
        """Let go for good: tensors on the host begin where in a cache line they did before."""
        ours = [tensor for tensor in self._find() if self._left.get(id(tensor)) == tensor.data_ptr()]
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

    def use_host(self) -> None:
        """Point the tensors at the host copy."""
        for tensor, host, _, _ in self._entries:
            tensor.data = host

    def load(self) -> None:
        """Copy it to its own device memory. `compute_waits` is up to the caller."""
        self._buffer = self._stage.allocate(sum(self.pieces))
        offsets = [sum(self.pieces[:piece]) for piece in range(len(self.pieces))]
        for piece, offset in enumerate(offsets):
            self.send(piece, self._buffer, offset)
        self.use_device(offsets, self._buffer)
        self._remember()
        if not self.keeps_host:
            self.sources, self._entries = [], []

    def unload(self, *, keep_changes: bool = False) -> None:
        """Drop the device copy. Weights without a host copy, or with `keep_changes` changed ones, are copied back."""
        if self._buffer is None:
            return
        if not self.keeps_host:
            for span in spans_of(filter(self._stage.is_here, self._find())):
                move_to_host(span, self._phase_before(span))
        elif keep_changes:
            self._copy_changes_back()
        self._return_to_host([entry.tensor for entry in self._entries])
        self._remember()
        self._stage.free(self._buffer)
        self._buffer = None

    def _copy_changes_back(self) -> None:
        """Compare on the device: with pinned memory that is faster than copying everything back."""
        for tensor, host, _, _ in self._entries:
            is_ours = tensor.data_ptr() == self._left[id(tensor)]
            if is_ours and not torch.equal(_bits(host.to(tensor.device)), _bits(tensor.data)):
                host.copy_(tensor.data)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as bytes, so that NaN equals itself."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
