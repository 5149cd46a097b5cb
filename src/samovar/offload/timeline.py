"""How long does a pass take whose blocks come in over a bus? Found by letting the real ring run without a device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from .ring import Ring


class Timeline:
    """A device's two clocks: when its copies and its computing are done."""

    def __init__(self, bus_bytes_s: float) -> None:
        self.bus_bytes_s = bus_bytes_s
        self.copied_s = 0.0
        self.computed_s = 0.0

    def copy(self, num_bytes: int) -> None:
        """Copies take the time of their bytes."""
        self.copied_s += num_bytes / self.bus_bytes_s

    def compute(self, seconds: float) -> None:
        """Computing takes the time that it is said to take."""
        self.computed_s += seconds

    def mark_copied(self) -> float:
        return self.copied_s

    def mark_computed(self) -> float:
        return self.computed_s

    def compute_waits(self, mark: float) -> None:
        self.computed_s = max(self.computed_s, mark)

    def copies_wait(self, mark: float) -> None:
        self.copied_s = max(self.copied_s, mark)


class TimedBlock(NamedTuple):
    """A block as the clock sees it."""

    path: str
    pieces: tuple[int, ...]
    compute_s: float

    @property
    def num_bytes(self) -> int:
        return sum(self.pieces)


class _Freight:
    """A block of which only the time matters."""

    def __init__(self, block: TimedBlock, timeline: Timeline) -> None:
        self.pieces = block.pieces
        self._timeline = timeline

    def prepare(self) -> None:
        pass

    def send(self, piece: int, offset: int) -> None:
        self._timeline.copy(self.pieces[piece])


def pass_seconds(
    blocks: Sequence[TimedBlock], streamed: Collection[str], ring_bytes: int, bus_bytes_s: float, rest_s: float = 0.0
) -> float:
    """Seconds of one pass among many, where these blocks stream and the others stay; the rest comes before them."""
    timeline = Timeline(bus_bytes_s)
    freight = {block.path: _Freight(block, timeline) for block in blocks if block.path in streamed}
    ring = Ring(timeline, ring_bytes, list(freight.values()), goes_round=lambda: True)
    ends = [0.0]
    for _ in range(3):  # The first pass starts with an empty ring.
        timeline.compute(rest_s)
        ring.begin_pass()
        for block in blocks:
            if block.path in streamed:
                ring.acquire(freight[block.path])
            timeline.compute(block.compute_s)
            if block.path in streamed:
                ring.release()
        ring.end_pass()
        ends.append(timeline.computed_s)
    return ends[-1] - ends[-2]
