"""Which blocks of a component stream, and through how large a ring? Whatever takes the least time in the room there is.

Pure: sizes, room, the speed of the bus and the time of computing go in. What may stream is tried by size of block
(a ring must hold the largest that does), each with rings of several sizes; among these the clock decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .ring import least_capacity
from .sizes import ComponentSize
from .timeline import TimedBlock, pass_seconds

_RINGS = (1.0, 1.25, 1.5, 5 / 3, 2.0, 2.5, 3.0, 4.0)
"""How large a ring may be, in blocks of the largest that streams."""
_LEADS = (0.0, 0.25, 0.5, 0.75, 1.0)
_CLOSE = 1.005
"""Times as near as this are the same: then what takes the least memory wins, or within a budget what streams least."""


@dataclass(frozen=True)
class Timing:
    """What was measured, or is assumed, about a machine and a model."""

    bus_bytes_s: float = 25 * 2**30
    compute_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of one forward of a component when all of it is on the device, by its name."""
    block_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of one block by its component's name and its path, joined by a dot; else in proportion to its bytes."""

    def forward_s(self, component: ComponentSize) -> float | None:
        """Seconds of one forward of a component; None where nothing is known about it."""
        if component.name in self.compute_s:
            return self.compute_s[component.name]
        times = [self.block_s.get(f"{component.name}.{block.path}") for block in component.blocks]
        known = [seconds for seconds in times if seconds is not None]
        return sum(known) if known and len(known) == len(times) else None


@dataclass(frozen=True)
class Streaming:
    """How a component streams."""

    streamed: frozenset[str]
    """The blocks that do, by path."""
    ring_bytes: int
    kept_bytes: int
    """What stays while the component is in."""
    forward_s: float
    """Seconds of one forward."""

    @property
    def num_bytes(self) -> int:
        return self.ring_bytes + self.kept_bytes


def least_bytes(component: ComponentSize) -> int:
    """The least that a component can run in."""
    blocks = component.blocks
    if not blocks:
        return component.num_bytes
    return component.rest_bytes + max(least_capacity(block.pieces) for block in blocks)


def choose_streaming(component: ComponentSize, room: int | None, timing: Timing) -> Streaming | None:
    """How a component streams best within some room, or with all its blocks where room is None.

    None where that is not possible, or takes no less memory than the component itself.
    """
    blocks, rest_s = _timed(component, timing)
    candidates: list[Streaming] = []
    for largest in sorted({block.num_bytes for block in blocks}):
        allowed = [block for block in blocks if block.num_bytes <= largest]
        least = max(least_capacity(block.pieces) for block in allowed)
        for ring_bytes in sorted({max(least, int(factor * largest)) for factor in _RINGS}):
            for streamed in _choices(component, blocks, allowed, ring_bytes, room):
                kept = component.num_bytes - sum(b.num_bytes for b in blocks if b.path in streamed)
                if kept + ring_bytes < component.num_bytes:
                    seconds = pass_seconds(blocks, streamed, ring_bytes, timing.bus_bytes_s, rest_s)
                    candidates.append(Streaming(streamed, ring_bytes, kept, seconds))
    if not candidates:
        return None
    quickest = min(candidate.forward_s for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.forward_s <= quickest * _CLOSE]
    if room is None:
        return min(near, key=lambda candidate: (candidate.num_bytes, candidate.forward_s))
    return max(near, key=lambda candidate: (candidate.kept_bytes, -candidate.forward_s))


def _timed(component: ComponentSize, timing: Timing) -> tuple[list[TimedBlock], float]:
    """A component's blocks with the time of each, and that of what comes before them."""
    whole_s = timing.forward_s(component)
    if whole_s is None:  # Nothing known: as if it could hide two fifths of what crosses the bus, as FLUX on an H200.
        whole_s = 0.4 * component.num_bytes / timing.bus_bytes_s
    own = {block.path: timing.block_s.get(f"{component.name}.{block.path}") for block in component.blocks}
    left_s = max(whole_s - sum(seconds for seconds in own.values() if seconds is not None), 0.0)
    left_bytes = component.rest_bytes + sum(b.num_bytes for b in component.blocks if own[b.path] is None)
    blocks = []
    for block in component.blocks:
        seconds = own[block.path]
        share = left_s * block.num_bytes / left_bytes if left_bytes else 0.0
        blocks.append(TimedBlock(block.path, block.pieces, share if seconds is None else seconds))
    rest_s = left_s * component.rest_bytes / left_bytes if left_bytes else 0.0
    return blocks, rest_s


def _choices(
    component: ComponentSize,
    blocks: Sequence[TimedBlock],
    allowed: Sequence[TimedBlock],
    ring_bytes: int,
    room: int | None,
) -> set[frozenset[str]]:
    """The blocks that may stream beside a ring of some size; none if it does not fit."""
    if room is None:
        return {frozenset(block.path for block in blocks)} if len(allowed) == len(blocks) else set()
    needed = component.num_bytes + ring_bytes - room
    if needed > sum(block.num_bytes for block in allowed):
        return set()
    return {spread(blocks, {block.path for block in allowed}, needed, lead) for lead in _LEADS}


def spread(blocks: Sequence[TimedBlock], allowed: set[str], needed: int, lead: float = 0.5) -> frozenset[str]:
    """Blocks of at least so many bytes, spread so that at any time about as much was streamed as was computed.

    A copy is hidden by what is computed beside it; were all that streams at one end, the bus would idle at the other.
    `lead` is how much of a block must be due before it is picked.
    """
    is_timed = any(block.compute_s for block in blocks)
    weights = [max(block.compute_s, 1e-9) if is_timed else block.num_bytes for block in blocks]
    shares = [passed / sum(weights) for passed in itertools.accumulate(weights)]
    aim = float(needed)
    while True:
        picked: set[str] = set()
        streamed = 0
        for block, share in zip(blocks, shares, strict=True):
            if block.path in allowed and streamed + block.num_bytes * lead <= aim * share:
                picked.add(block.path)
                streamed += block.num_bytes
        if streamed >= needed or picked == allowed:
            return frozenset(picked)
        aim *= 1.01
