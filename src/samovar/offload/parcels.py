"""What moves together? A parcel: the tensors of a block, or of all of a component that is in no block.

The parameters and buffers stay the objects they are; what is swapped is their `data`: the host's memory while the
parcel is off the device, the device's while it is on. Weights do not change there, so going off is dropping the
device copy. Before a parcel is sent it is looked at again: adapters may have come or gone, or its weights may have
been replaced (`to(dtype)`, `load_state_dict`), and whatever the model holds now is what counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .host import HostMemory, move_to_host
from .staging import Buffer, Stage
from .weights import Find, Span, lay_out, phase_of, spans_of


class _Entry(NamedTuple):
    """One tensor of a parcel."""

    tensor: torch.Tensor
    host: torch.Tensor
    """Its data on the host."""
    piece: int
    offset: int
    """Where in the piece it begins."""


class Parcel:
    """Tensors that come to the device and leave it together."""

    def __init__(self, name: str, find: Find, stage: Stage, host: HostMemory) -> None:
        self.name = name
        self.pieces: Sequence[int] = ()
        self.is_loaded = False
        self._find, self._stage, self._host = find, stage, host
        self._entries: list[_Entry] = []
        self._sources: list[torch.Tensor] = []
        self._left: dict[int, int] = {}
        """By the id of each tensor, the address of its data as we left it."""
        self._starts: Sequence[int] = ()
        """Where in each piece its source begins."""
        self._phases: dict[int, int] = {}
        """By the id of each tensor, where in a cache line its data began before it was ours."""
        self._buffer: Buffer | None = None
        """Its own memory, if it has some."""
        self.target: Buffer | None = None
        """The ring's memory, if it passes through one."""

    @property
    def num_bytes(self) -> int:
        return sum(self.pieces)

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        """Its bytes on the host, by piece."""
        return self._sources

    # ------------------------------------------------------------------------------------------------ on the host

    def adopt(self, *, pinned: bool) -> None:
        """Take the tensors as the model holds them now. To look around and to pin is up to the caller."""
        tensors = self._find()
        self._bring_home(tensors)
        spans = spans_of(tensors)
        layout = lay_out(spans, in_phase=self._stage.keeps_phase)
        self._sources = self._host.adopt(spans, layout, pinned=pinned)
        # Where copied, the tensors' data lies elsewhere now, but in the same order and as far apart.
        self._entries = [
            _Entry(tensor, tensor.data, piece, offset + tensor.data_ptr() - min(t.data_ptr() for t in span.tensors))
            for span, (piece, offset) in zip(spans, layout.places, strict=True)
            for tensor in span.tensors
        ]
        self.pieces, self._starts = layout.pieces, layout.starts
        self._remember()

    def prepare(self) -> None:
        """Make sure that what is about to be sent is what the model holds."""
        if not self.is_current():
            self._host.look_around()
            self.adopt(pinned=True)
            self._host.pin(self._sources)

    def is_current(self) -> bool:
        """Whether the model holds what we left it with."""
        tensors, left = self._find(), self._left
        return len(tensors) == len(left) and all(left.get(id(tensor)) == tensor.data_ptr() for tensor in tensors)

    def _bring_home(self, tensors: list[torch.Tensor]) -> None:
        """What is still ours goes back to the host copy, what somebody put in its place is copied to the host."""
        ours = {id(entry.tensor): entry.host for entry in self._entries}
        away: list[torch.Tensor] = []
        for tensor in tensors:
            if id(tensor) in ours and tensor.data_ptr() == self._left[id(tensor)]:
                tensor.data = ours[id(tensor)]
                continue
            self._phases[id(tensor)] = phase_of(tensor)
            if self._stage.is_here(tensor) or tensor.device.type != "cpu":
                away.append(tensor)
        for span in spans_of(away):
            move_to_host(span, span.phase)

    def _remember(self) -> None:
        self._left = {id(entry.tensor): entry.tensor.data_ptr() for entry in self._entries}

    # ------------------------------------------------------------------------------------------------ to the device

    def send(self, piece: int, offset: int) -> None:
        """Start to copy one piece to the ring."""
        assert self.target is not None
        self._stage.send(self.target, offset + self._starts[piece], self._sources[piece])

    def place(self, offsets: Sequence[int], buffer: Buffer) -> None:
        """Let the tensors lie on the device, where their pieces were sent."""
        for tensor, host, piece, offset in self._entries:
            tensor.data = buffer.view(host, offsets[piece] + offset)
        self.is_loaded = True

    def withdraw(self) -> None:
        """Let the tensors lie on the host again."""
        for tensor, host, _, _ in self._entries:
            tensor.data = host
        self.is_loaded = False

    def load(self) -> None:
        """Bring it to memory of its own; `Lane.compute_waits` is up to the caller."""
        self._buffer = self._stage.allocate(self.num_bytes)
        offsets = [sum(self.pieces[:piece]) for piece in range(len(self.pieces))]
        for source, offset, start in zip(self._sources, offsets, self._starts, strict=True):
            self._stage.send(self._buffer, offset + start, source)
        self.place(offsets, self._buffer)
        self._remember()

    def unload(self, *, keep_changes: bool = False) -> None:
        """Drop the device copy. With `keep_changes`, weights that were changed on the device are copied back first."""
        if self._buffer is None:
            return
        if keep_changes:
            self._copy_changes_back()
        self._bring_home([entry.tensor for entry in self._entries])
        self._remember()
        self._let_go()

    def _copy_changes_back(self) -> None:
        """Compared on the device: from pinned memory that is quicker than copying everything back."""
        for tensor, host, _, _ in self._entries:
            is_ours = tensor.data_ptr() == self._left[id(tensor)]
            if is_ours and not torch.equal(_bits(host.to(tensor.device)), _bits(tensor.data)):
                host.copy_(tensor.data)

    def settle(self) -> None:
        """Load for good: the host copy is let go, and what the device holds is what counts."""
        self.load()
        self._stage.compute_waits(self._stage.mark_copied())
        self._sources, self._entries = [], []

    def resettle(self) -> None:
        """Bring back to the device what somebody has moved off it."""
        if not all(map(self._stage.is_here, self._find())):
            self.unsettle()
            self.adopt(pinned=False)
            self.settle()

    def unsettle(self) -> None:
        """Back to the host after `settle`."""
        if self._buffer is not None:
            for span in spans_of(filter(self._stage.is_here, self._find())):
                move_to_host(span, self._phase_before(span))
            self._let_go()

    def give_back(self) -> None:
        """For good: what lies on the host as we left it begins where in a cache line it did when it came."""
        ours = [tensor for tensor in self._find() if self._left.get(id(tensor)) == tensor.data_ptr()]
        for span in spans_of(ours):
            if span.phase != self._phase_before(span):
                move_to_host(span, self._phase_before(span))
        self._sources, self._entries, self._left, self._phases = [], [], {}, {}

    def _phase_before(self, span: Span) -> int:
        return self._phases.get(id(span.tensors[0]), span.phase)

    def _let_go(self) -> None:
        assert self._buffer is not None
        self.is_loaded = False
        self._stage.free(self._buffer)
        self._buffer = None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as bytes, so that what is not a number equals itself."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
