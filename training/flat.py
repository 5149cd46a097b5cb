"""Hundreds of weights as one vector: the layout of named tensors in a flat buffer.

With one buffer the clipping, the optimiser and the average are a few operations on long vectors,
and equal matrices that Muon orthogonalises lie side by side, ready to be treated as one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGN = 8  # elements: 16 bytes in 16 bit, which matrix kernels want
SEGMENTS = ("muon", "decay", "plain")


@dataclass(frozen=True)
class Slot:
    """Where one weight lies."""

    name: str
    shape: tuple[int, ...]
    segment: str
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def room(self) -> int:
        return -(-self.size // ALIGN) * ALIGN


@dataclass(frozen=True)
class Layout:
    """Slots in order: Muon's matrices by shape, then decayed weights, then the rest."""

    slots: tuple[Slot, ...]
    bounds: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.slots[-1].offset + self.slots[-1].room

    def segment(self, flat: Tensor, name: str) -> Tensor:
        start, end = self.bounds[name]
        return flat[start:end]

    def flatten(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The buffer of these weights (or gradients), zeros between."""
        pieces = []
        for slot in self.slots:
            piece = weights[slot.name].reshape(-1)
            if slot.room > slot.size:
                piece = torch.nn.functional.pad(piece, (0, slot.room - slot.size))
            pieces.append(piece)
        return torch.cat(pieces)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The weights as views of the buffer; gradients flow back into it."""
        pieces = flat.split([slot.room for slot in self.slots])
        return {
            slot.name: (piece if slot.room == slot.size else piece[: slot.size]).view(slot.shape)
            for slot, piece in zip(self.slots, pieces, strict=True)
        }

    def groups(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Muon's batches of equal matrices: start, end and shape (count, rows, columns)."""
        found: dict[tuple[int, ...], list[Slot]] = {}
        for slot in self.slots:
            if slot.segment == "muon":
                found.setdefault(slot.shape, []).append(slot)
        return [
            (slots[0].offset, slots[-1].offset + slots[-1].room, (len(slots), *shape)) for shape, slots in found.items()
        ]


def make_layout(shapes: Mapping[str, tuple[int, ...]], takes_muon: Callable[[str, tuple[int, ...]], bool]) -> Layout:
    """Lay out weights by their shapes; `takes_muon` says which are Muon's."""

    def segment(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) == 2 and math.prod(shape) % ALIGN == 0 and takes_muon(name, shape):
            return "muon"
        return "decay" if len(shape) > 1 else "plain"

    keyed = [(SEGMENTS.index(segment(n, tuple(s))), tuple(s), n) for n, s in shapes.items()]
    slots: list[Slot] = []
    bounds: dict[str, tuple[int, int]] = {}
    offset = 0
    for index, name in enumerate(SEGMENTS):
        start = offset
        for _, shape, weight in sorted(entry for entry in keyed if entry[0] == index):
            slots.append(Slot(weight, shape, name, offset))
            offset += slots[-1].room
        bounds[name] = (start, offset)
    return Layout(tuple(slots), bounds)
