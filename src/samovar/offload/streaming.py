"""Which blocks of a component stream, and through how large a ring? The fastest choice that fits the room.

Pure: sizes, room, bus speed and compute times go in. Candidates differ in the largest block that streams, which the
ring must hold, in the size of the ring and in where the streamed blocks are. The real ring, run against a simulated
clock, decides between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.settings import Settings, is_number, kind, number, setting
from .ring import ASSUMED_BUS, Memory, Ring, Timeline, least_capacity
from .sizes import BlockSize, ComponentSize

_RINGS = (1.0, 1.25, 1.5, 5 / 3, 2.0, 2.5, 3.0, 4.0)
"""Ring sizes to try, as multiples of the largest block that streams."""
_LEADS = (0.0, 0.25, 0.5, 0.75, 1.0)
_CLOSE = 1.005
"""Times within this factor count as equal. Then the least memory wins; within a budget, the fewest bytes streamed."""
_BUSY_HOST = 0.75
"""The share of a forward beyond which the host has no time to spare: FLUX on an H200 takes 0.5, Qwen-Image 0.9."""
_HIDDEN = 0.4
"""The share of the copying that compute is assumed to hide where no time is known: that of FLUX on an H200."""


_SECONDS = kind("seconds by name", lambda value: isinstance(value, Mapping) and all(map(is_number, value.values())))


@dataclass(frozen=True)
class Timing(Settings, param="timing"):
    """Measured or assumed speeds of a machine and a model."""

    bus_bytes_s: float = setting(ASSUMED_BUS, number(0, above=True), "Bytes per second from the host to the device.")
    compute_s: Mapping[str, float] = setting(
        dict, _SECONDS, "By component name, seconds of one forward with all weights on the device."
    )
    block_s: Mapping[str, float] = setting(
        dict, _SECONDS, 'By "component.block_path", seconds of one block. By default in proportion to its bytes.'
    )
    rest_s: Mapping[str, float] = setting(
        dict, _SECONDS, "By component name, seconds of one forward outside of its blocks."
    )
    launch_s: Mapping[str, float] = setting(
        dict, _SECONDS, 'By "component.block_path", seconds in which the host enqueues one call of a block.'
    )
    send_s: float = setting(0.0, number(), "Seconds in which the host sends one block.")

    def is_host_bound(self, component: ComponentSize) -> bool:
        """Whether the host takes about as long to enqueue a forward as the device to compute it."""
        paths = [f"{component.name}.{block.path}" for block in component.blocks]
        launch_s = sum(self.launch_s.get(path, 0.0) for path in paths)
        return launch_s > _BUSY_HOST * sum(self.block_s.get(path, 0.0) for path in paths)

    def forward_s(self, component: ComponentSize) -> float | None:
        """Seconds of one forward of a component; None if unknown."""
        if component.name in self.compute_s:
            return self.compute_s[component.name]
        times = [self.block_s.get(f"{component.name}.{block.path}") for block in component.blocks]
        known = [seconds for seconds in times if seconds is not None]
        return sum(known) + self.rest_s.get(component.name, 0.0) if known and len(known) == len(times) else None


@dataclass(frozen=True)
class Streaming:
    """How a component streams."""

    streamed: frozenset[str]
    """Paths of the blocks that stream."""
    ring_bytes: int
    kept_bytes: int
    """Bytes that stay while the component is loaded."""
    forward_s: float
    area_bytes: int = 0
    """Bytes of the area where compressed weights arrive."""

    @property
    def num_bytes(self) -> int:
        return self.ring_bytes + self.kept_bytes + self.area_bytes


def least_bytes(component: ComponentSize) -> int:
    """The least memory that a component can run in."""
    streaming = component.rest_bytes + max((least_capacity(block.pieces) for block in component.blocks), default=0)
    return min(streaming, component.num_bytes)


def area_bytes(blocks: Iterable[BlockSize]) -> int:
    """Bytes of the area where the compressed pieces of some blocks arrive: two of the largest."""
    return 2 * max((sent for block in blocks for sent, piece in zip(block.sent, block.pieces, strict=True)
                    if sent != piece), default=0)  # fmt: skip


def choose_streaming(component: ComponentSize, room: int | None, timing: Timing) -> Streaming | None:
    """The fastest way to stream a component within some room, or to stream all its blocks if room is None.

    None if that is impossible, or takes no less memory than the whole component.
    """
    blocks, rest_s = _with_times(component, timing)

    def choices(allowed: Sequence[BlockSize], taken: int) -> set[frozenset[str]]:
        if room is None:
            return {frozenset(block.path for block in blocks)} if len(allowed) == len(blocks) else set()
        needed = component.num_bytes + taken - room
        if needed > sum(block.num_bytes for block in allowed):
            return set()
        return {spread(blocks, {block.path for block in allowed}, needed, lead) for lead in _LEADS}

    candidates: list[Streaming] = []
    for largest in sorted({block.num_bytes for block in blocks}):
        allowed = [block for block in blocks if block.num_bytes <= largest]
        least, area = max(least_capacity(block.pieces) for block in allowed), area_bytes(allowed)
        for ring_bytes in sorted({max(least, int(factor * largest)) for factor in _RINGS}):
            for streamed in choices(allowed, ring_bytes + area):
                kept = component.num_bytes - sum(b.num_bytes for b in blocks if b.path in streamed)
                if kept + ring_bytes + area < component.num_bytes:
                    waits = component.ahead_bytes > 0
                    seconds = pass_seconds(blocks, streamed, ring_bytes, timing, rest_s, waits=waits)
                    candidates.append(Streaming(streamed, ring_bytes, kept, seconds, area))
    if not candidates:
        return None
    fastest = min(candidate.forward_s for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.forward_s <= fastest * _CLOSE]
    if room is None:
        return min(near, key=lambda candidate: (candidate.num_bytes, candidate.forward_s))
    return max(near, key=lambda candidate: (candidate.kept_bytes, -candidate.forward_s))


def forward_seconds(component: ComponentSize, streamed: frozenset[str], ring_bytes: int, timing: Timing) -> float:
    """Seconds of one forward of a component of which these blocks stream."""
    blocks, rest_s = _with_times(component, timing)
    return pass_seconds(blocks, streamed, ring_bytes, timing, rest_s, waits=component.ahead_bytes > 0)


def _with_times(component: ComponentSize, timing: Timing) -> tuple[list[BlockSize], float]:
    """A component's blocks with their compute times, and the time of what runs before them."""
    whole_s = timing.forward_s(component)
    if whole_s is None:
        whole_s = _HIDDEN * component.num_bytes / timing.bus_bytes_s
    known = {block.path: timing.block_s.get(f"{component.name}.{block.path}") for block in component.blocks}
    left_s = max(whole_s - sum(seconds for seconds in known.values() if seconds is not None), 0.0)
    left_bytes = component.rest_bytes + sum(b.num_bytes for b in component.blocks if known[b.path] is None)
    byte_s = left_s / left_bytes if left_bytes else 0.0
    blocks = []
    for block in component.blocks:
        seconds, path = known[block.path], f"{component.name}.{block.path}"
        compute_s = byte_s * block.num_bytes if seconds is None else seconds
        blocks.append(replace(block, compute_s=compute_s, launch_s=timing.launch_s.get(path, 0.0)))
    return blocks, left_s if not left_bytes - component.rest_bytes else byte_s * component.rest_bytes


def spread(blocks: Sequence[BlockSize], allowed: set[str], needed: int, lead: float = 0.5) -> frozenset[str]:
    """Pick blocks of at least `needed` bytes so that, at any time, streamed bytes are in proportion to compute done.

    Compute hides the copies beside it; if all streamed blocks were at one end, the bus would idle at the other. A block
    is picked when the share `lead` of it is due.
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


class _SimulatedBlock:
    """A streamed block whose copies only take time."""

    def __init__(self, size: BlockSize, timeline: Timeline) -> None:
        self.pieces, self._sent, self._timeline = size.pieces, size.sent, timeline

    def prepare(self) -> None:
        pass

    def send(self, piece: int, memory: Memory, offset: int) -> None:
        self._timeline.copy(self._sent[piece])

    def forget_views(self) -> None:
        pass

    def edits(self) -> int:
        return 0

    fingerprint = edits


def pass_seconds(
    blocks: Sequence[BlockSize],
    streamed: Collection[str],
    ring_bytes: int,
    timing: Timing,
    rest_s: float = 0.0,
    *,
    waits: bool = False,
) -> float:
    """Seconds of one forward among many, if some blocks stream; `rest_s` runs before the blocks.

    `waits`: the host waits for the device at the start of each forward.
    """
    timeline = Timeline(timing.bus_bytes_s)
    moving = {block.path: _SimulatedBlock(block, timeline) for block in blocks if block.path in streamed}
    ring = Ring(timeline, ring_bytes, list(moving.values()), has_next_pass=lambda: True)
    ends = [0.0]
    for _ in range(3):  # The first pass starts with an empty ring.
        timeline.compute(rest_s)
        if waits:
            timeline.host_waits(timeline.mark_computed())
        ring.begin_pass()
        for block in blocks:
            timeline.launch(block.launch_s)
            if block.path in streamed:
                timeline.launch(timing.send_s)
                ring.acquire(moving[block.path])
            timeline.compute(block.compute_s)
            if block.path in streamed:
                ring.release()
        ring.end_pass()
        ends.append(timeline.computed_s)
    return ends[-1] - ends[-2]
