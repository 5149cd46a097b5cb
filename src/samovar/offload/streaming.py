"""The blocks of a component that stream, and the ring that they stream through: the fastest choice that fits the room.

Pure: sizes, room, bus speed and compute times go in. Candidates differ in the largest block that streams, which the
ring must hold, in the size of the ring and in where the streamed blocks are. The real ring, run against a simulated
clock, decides between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.settings import Settings, is_number, kind, number, setting
from .ring import ASSUMED_BUS, Memory, Ring, Timeline, least_capacity
from .sizes import BlockSize, ComponentSize

_RINGS = (1.0, 1.25, 1.5, 5 / 3, 2.0, 2.5, 3.0, 4.0)
"""Ring sizes to try, as multiples of the largest block that streams."""
_LEADS = (0.0, 0.25, 0.5, 0.75, 1.0)
_CLOSE = 1.005
"""Times within this factor count as equal. Then the least memory wins; within a budget, the fewest bytes streamed."""
_HIDDEN = 0.4
"""The share of the copying that compute is assumed to hide where no time is known: that of FLUX on an H200."""
_WORTH_CODING, _BUSY_BUS = 0.97, 0.9
"""Weights are compressed if that takes a forward below this share of its time, as it takes seconds to set up; or if it
takes no longer, and the bus were busy for more than this share of it."""
SECONDS = kind("seconds by name", lambda value: isinstance(value, Mapping) and all(map(is_number, value.values())))


@dataclass(frozen=True)
class Timing(Settings, param="timing"):
    """Measured or assumed speeds of a machine and a model."""

    bus_bytes_s: float = setting(ASSUMED_BUS, number(0, above=True), "Bytes per second from the host to the device.")
    compute_s: Mapping[str, float] = setting(
        dict, SECONDS, "By component name, seconds of one forward with all weights on the device."
    )
    decoding_s: float = setting(0.0, number(0), "Seconds of compute that it takes to decode a GiB of weights.")
    block_s: Mapping[str, float] = setting(
        dict, SECONDS, 'By "component.block_path", seconds of one block. By default in proportion to its bytes.'
    )
    rest_s: Mapping[str, float] = setting(
        dict, SECONDS, "By component name, seconds of one forward outside of its blocks."
    )

    def forward_s(self, component: ComponentSize) -> float | None:
        """Seconds of one forward of a component; None if unknown."""
        if component.name in self.compute_s:
            return self.compute_s[component.name]
        times = [self.block_s.get(f"{component.name}.{block.path}", -1.0) for block in component.blocks]
        return sum(times) + self.rest_s.get(component.name, 0.0) if times and min(times) >= 0 else None


@dataclass(frozen=True)
class Streaming:
    """How a component streams."""

    streamed: frozenset[str]
    """Paths of the blocks that stream."""
    ring_bytes: int
    kept_bytes: int
    """Bytes that stay while the component is called."""
    sent_bytes: int
    """Bytes that cross the bus in a forward."""
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
    coded = (sent for block in blocks for sent, piece in zip(block.sent, block.pieces, strict=True) if sent != piece)
    return 2 * max(coded, default=0)


def best_streaming(component: ComponentSize, room: int | None, timing: Timing, compress: str) -> Streaming | None:
    """The best way to stream a component, with compressed weights if that saves time, or if `compress` is "lossless";
    never if it is "none"."""
    plain = choose_streaming(component.uncoded(), room, timing)
    coded = choose_streaming(component, room, timing) if compress != "none" and area_bytes(component.blocks) else None
    if plain is None or coded is None or compress == "lossless":
        return coded or plain
    is_busy = plain.sent_bytes > _BUSY_BUS * plain.forward_s * timing.bus_bytes_s
    return coded if coded.forward_s < (1 if is_busy else _WORTH_CODING) * plain.forward_s else plain


def choose_streaming(component: ComponentSize, room: int | None, timing: Timing) -> Streaming | None:
    """The fastest way to stream a component within some room, or to stream all its blocks if room is None.

    None if that is impossible, or takes no less memory than the whole component.
    """
    candidates = list(_candidates(component, room, timing))
    fastest = min((candidate.forward_s for candidate in candidates), default=0.0)
    near = [candidate for candidate in candidates if candidate.forward_s <= fastest * _CLOSE]
    if room is None:
        return min(near, key=lambda candidate: (candidate.num_bytes, candidate.forward_s), default=None)
    return max(near, key=lambda candidate: (candidate.kept_bytes, -candidate.forward_s), default=None)


def _candidates(component: ComponentSize, room: int | None, timing: Timing) -> Iterator[Streaming]:
    blocks, rest_s = with_times(component, timing)
    for largest in sorted({block.num_bytes for block in blocks}):
        allowed = [block for block in blocks if block.num_bytes <= largest]
        least, area = max(least_capacity(block.pieces) for block in allowed), area_bytes(allowed)
        for ring_bytes in sorted({max(least, int(factor * largest)) for factor in _RINGS}):
            needed = (
                sum(b.num_bytes for b in blocks) if room is None else component.num_bytes + ring_bytes + area - room
            )
            for streamed in _choices(blocks, allowed, needed):
                moving = [block for block in blocks if block.path in streamed]
                kept = component.num_bytes - sum(block.num_bytes for block in moving)
                if kept + ring_bytes + area < component.num_bytes:
                    timed = [_with_decoding(block, timing) if block.path in streamed else block for block in blocks]
                    seconds = pass_seconds(timed, streamed, ring_bytes, timing, rest_s, waits=component.ahead_bytes > 0)
                    sent = sum(sum(block.sent) for block in moving)
                    yield Streaming(streamed, ring_bytes, kept, sent, seconds, area)


def _with_decoding(block: BlockSize, timing: Timing) -> BlockSize:
    """A block with the time that decoding its weights takes from compute, which it runs beside."""
    return replace(block, compute_s=block.compute_s + decoding_seconds([block], timing))


def decoding_seconds(blocks: Iterable[BlockSize], timing: Timing) -> float:
    """Seconds of compute that it takes to decode blocks that cross the bus compressed."""
    pairs = ((piece, sent) for block in blocks for piece, sent in zip(block.pieces, block.sent, strict=True))
    return timing.decoding_s * sum(piece for piece, sent in pairs if piece != sent) / 2**30


def _choices(blocks: Sequence[BlockSize], allowed: Sequence[BlockSize], needed: int) -> set[frozenset[str]]:
    """Ways to pick streamed blocks of at least `needed` bytes."""
    if needed > sum(block.num_bytes for block in allowed):
        return set()
    return {spread(blocks, {block.path for block in allowed}, needed, lead) for lead in _LEADS}


def with_times(component: ComponentSize, timing: Timing) -> tuple[list[BlockSize], float]:
    """A component's blocks with their compute times, and the time of what runs before them, as known or assumed."""
    whole_s = timing.forward_s(component)
    if whole_s is None:
        whole_s = _HIDDEN * component.num_bytes / timing.bus_bytes_s
    known = [timing.block_s.get(f"{component.name}.{block.path}") for block in component.blocks]
    left_s = max(whole_s - sum(seconds or 0.0 for seconds in known), 0.0)
    pairs = list(zip(component.blocks, known, strict=True))
    unknown = sum(block.num_bytes for block, seconds in pairs if seconds is None)
    byte_s = left_s / max(component.rest_bytes + unknown, 1)
    blocks = [replace(block, compute_s=byte_s * block.num_bytes if s is None else s) for block, s in pairs]
    return blocks, byte_s * component.rest_bytes if unknown else left_s


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

    def prepare(self) -> int:
        return 0

    edits = prepare

    def send(self, piece: int, memory: Memory, offset: int) -> None:
        self._timeline.copy(self._sent[piece])


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
            if block.path in streamed:
                ring.acquire(moving[block.path])
            timeline.compute(block.compute_s)
            ring.release()
        ring.end_pass()
        ends.append(timeline.computed_s)
    return ends[-1] - ends[-2]
