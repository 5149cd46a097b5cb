"""Which weights are kept in pinned memory, and which are read from where they are: decided from sizes alone.

Pinned memory is copied at the speed of the bus. Anything else passes through a few pinned buffers: from pageable memory
at the speed of a copy on the host, from the model's own files at that of the disk. `host_memory` limits the memory that
holds weights, pinned or not. The page cache of files is not counted: the system takes it back when it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from ..core.errors import SettingError
from .planner import ASSUMED_COPY, OffloadPlan
from .sizes import ComponentSize, format_bytes

Tier = Literal["pinned", "pageable", "disk"]
Crossing = Literal["forward", "run", "once", "ahead"]
"""How often weights are sent to the device, most often first. "ahead": before the steps of a run, and then left out."""
TIME_LAYERS = "layers that see time alone"
"""They stand for a block's path."""
Key = tuple[str, str]
"""A component and the path of a block in it, or "" for what is outside its blocks."""

PINNABLE = 0.85
"""The share of the host's memory that may be pinned by default."""
ASSUMED_DISK = 2e9
"""Bytes per second of a disk: what a plan expects."""
NUM_BUFFERS, MAX_BUFFER = 3, 2**26
"""Pinned buffers that everything else passes through, and the most that each holds."""
_MIN_BUFFER = 2**12


class WeightUse(NamedTuple):
    """A group of weights that leaves the device."""

    key: Key
    num_bytes: int
    crossing: Crossing
    anonymous_bytes: int = 0
    """Bytes of it that are in memory alone; the rest is mapped from files."""
    coded_bytes: int = 0
    """Bytes of its pinned copy, if that is compressed; the weights themselves stay where they are."""

    @property
    def file_bytes(self) -> int:
        return self.num_bytes - self.anonymous_bytes

    @property
    def pinned_bytes(self) -> int:
        return self.coded_bytes or self.num_bytes

    @property
    def cost(self) -> int:
        """Memory that it takes to pin it, beside weights that are in memory wherever they go."""
        return self.coded_bytes or self.file_bytes


@dataclass(frozen=True)
class Part:
    """Groups of one component in one tier."""

    component: str
    tier: Tier
    crossing: Crossing
    num_groups: int
    num_bytes: int
    coded_bytes: int
    """Bytes of the pinned copies that are compressed."""

    def __str__(self) -> str:
        often = {"forward": "in every forward", "run": "once in a run", "once": "once", "ahead": "ahead of the steps"}
        where = {"pinned": "pinned", "pageable": "in pageable memory", "disk": "in its file on disk"}[self.tier]
        why = {"pinned": "", "pageable": ": no more may be pinned", "disk": ": host_memory holds no more"}[self.tier]
        if self.coded_bytes:
            where = f"pinned as {format_bytes(self.coded_bytes)}, compressed"
        if self.crossing in ("once", "ahead"):
            why = ", and the device keeps it" if self.crossing == "once" else ", and then not needed"
        groups = f"{self.num_groups} groups, " if self.num_groups > 1 else ""
        return f"{self.component}: {groups}{format_bytes(self.num_bytes)} {where}, sent {often[self.crossing]}{why}"


@dataclass(frozen=True)
class TierPlan:
    """Where every group of weights is kept. `print` shows it."""

    tiers: Mapping[Key, Tier]
    parts: tuple[Part, ...]
    held_bytes: int
    """Expected host memory that holds weights, pinned or not, with the buffers."""
    budget_bytes: int | None
    buffer_bytes: int
    """Bytes of each buffer that unpinned weights pass through; 0 if none is needed."""
    coded: frozenset[Key] = frozenset()
    """Groups that are pinned compressed. There may be no room for more, which are then pinned as they are."""

    def tier(self, key: Key) -> Tier:
        return self.tiers.get(key, "pinned")

    def bytes_in(self, tier: Tier, *crossings: Crossing) -> int:
        return sum(p.num_bytes for p in self.parts if p.tier == tier and (not crossings or p.crossing in crossings))

    def read_seconds(self, crossing: Crossing) -> float:
        """Expected seconds of reading through the buffers, in a forward or in a run."""
        return self.bytes_in("disk", crossing) / ASSUMED_DISK + self.bytes_in("pageable", crossing) / ASSUMED_COPY

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return {
            "parts": [asdict(part) for part in self.parts],
            "held_bytes": self.held_bytes,
            "budget_bytes": self.budget_bytes,
            "buffer_bytes": self.buffer_bytes,
            "disk_bytes_per_forward": self.bytes_in("disk", "forward"),
            "read_seconds_per_forward": self.read_seconds("forward"),
            "read_seconds_per_run": self.read_seconds("run") + self.read_seconds("ahead"),
        }

    def __str__(self) -> str:
        budget = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        buffers = NUM_BUFFERS * self.buffer_bytes
        through = f", {format_bytes(buffers)} of it as buffers" if buffers else ""
        lines = [f"Host memory: {format_bytes(self.held_bytes)}{budget}{through}.", *(f"  {p}" for p in self.parts)]
        in_a_run = ("run", "ahead") if self.budget_bytes is not None else ("run",)  # Else the page cache has room.
        for often, crossings in (("in every forward", ("forward",)), ("once in a run", in_a_run)):
            num_bytes = self.bytes_in("disk", *crossings)
            if num_bytes:
                speed, seconds = f"{ASSUMED_DISK / 1e9:.1f} GB/s (assumed)", num_bytes / ASSUMED_DISK
                lines.append(f"{format_bytes(num_bytes)} are read from disk {often}: about {seconds:.3g} s at {speed}.")
        return "\n".join(lines)


def uses_of(
    sizes: Sequence[ComponentSize],
    plan: OffloadPlan,
    anonymous: Callable[[Key], int] | None = None,
) -> list[WeightUse]:
    """The groups that a plan lets leave the device. By default, files hold all weights."""
    uses = []

    def use(key: Key, num_bytes: int, crossing: Crossing, coded_bytes: int = 0) -> None:
        held = min(anonymous(key), num_bytes) if anonymous else 0
        uses.append(WeightUse(key, num_bytes, crossing, held, coded_bytes))

    for size in sizes:
        placed = plan.component(size.name)
        if placed.ahead_bytes:
            size = size.ahead or size
            use((size.name, TIME_LAYERS), placed.ahead_bytes, "run" if size.reads_text else "ahead")
        if placed.placement == "resident":
            continue
        kept: Crossing = "once" if placed.placement == "streams" and not plan.take_turns else "run"
        use((size.name, ""), size.rest_bytes, kept)
        for block in size.blocks:
            is_streamed = block.path in placed.streamed
            every: Crossing = "forward" if size.role == "denoiser" else "run"
            coded = sum(block.sent) if placed.is_coded and is_streamed else 0
            use((size.name, block.path), block.num_bytes, every if is_streamed else kept, coded)
    return uses


def plan_tiers(groups: Sequence[WeightUse], host_memory: int | None, *, host_bytes: int | None = None) -> TierPlan:
    """Pin what is sent most often, as far as the budget goes; read the rest from where it is.

    Without a budget, most of the host's memory (`host_bytes`) may be pinned and nothing is refused. With one, weights
    that no file holds must fit.
    """
    pinnable = float("inf") if host_bytes is None else int(host_bytes * PINNABLE)
    budget = pinnable if host_memory is None else float(host_memory)
    anonymous = sum(group.anonymous_bytes for group in groups)
    copies = sum(group.cost for group in groups if group.crossing != "ahead")
    fits = anonymous + copies <= min(budget, pinnable)
    is_buffered = not fits or any(group.crossing == "ahead" for group in groups)
    buffer = _buffer_bytes(groups, budget) if is_buffered else 0
    buffers = NUM_BUFFERS * buffer
    if not fits and host_memory is not None and buffers + anonymous > budget:
        raise SettingError(
            f"host_memory={format_bytes(host_memory)} is not enough: at least {format_bytes(buffers + anonymous)} is "
            f"needed, {format_bytes(anonymous)} for weights that are in memory and in no file, and "
            f"{format_bytes(buffers)} for buffers. Allow more, or load the model in the dtype of its files, so that "
            "its weights can be read from them again.",
            param="host_memory",
        )
    pinned = _pinned(groups) if fits else _pinned(groups, max(budget - buffers - anonymous, 0), pinnable - buffers)
    tiers: dict[Key, Tier] = {use.key: _unpinned(use) for use in groups} | dict.fromkeys(pinned, "pinned")
    used = [pinned.get(group.key, group) for group in groups]
    coded = frozenset(use.key for use in pinned.values() if use.coded_bytes)
    held = anonymous + buffers + sum(use.cost for use in pinned.values())
    return TierPlan(tiers, _parts(used, tiers), held, host_memory, buffer, coded)


def _unpinned(use: WeightUse) -> Tier:
    return "disk" if use.file_bytes else "pageable"


def _pinned(
    groups: Sequence[WeightUse], room: float = float("inf"), pinnable: float = float("inf")
) -> dict[Key, WeightUse]:
    """The groups that are pinned within some room for copies. Some cannot be compressed there.

    Of what is sent equally often, weights that are in memory anyway come first: pinning them costs nothing more.
    """
    wanted: list[Crossing] = ["forward", "run", *(["once"] if room == float("inf") else [])]  # type: ignore[list-item]
    found = {}
    for group in sorted(groups, key=lambda use: (get_args(Crossing).index(use.crossing), use.file_bytes > 0)):
        for use in (group, group._replace(coded_bytes=0)) if group.crossing in wanted else ():
            if use.cost <= room and use.pinned_bytes <= pinnable:
                found[use.key] = use
                room, pinnable = room - use.cost, pinnable - use.pinned_bytes
                break
    return found


def _buffer_bytes(groups: Sequence[WeightUse], budget: float) -> int:
    """Bytes of a buffer: a small part of a small budget, and no more than there is to read."""
    largest = max(group.num_bytes for group in groups)
    most = min(MAX_BUFFER, largest, int(min(budget, 2**62)) // 16)
    return max(most // _MIN_BUFFER, 1) * _MIN_BUFFER


def _parts(groups: Sequence[WeightUse], tiers: Mapping[Key, Tier]) -> tuple[Part, ...]:
    found: dict[tuple[str, Tier, Crossing], list[WeightUse]] = {}
    for group in groups:
        found.setdefault((group.key[0], tiers[group.key], group.crossing), []).append(group)
    return tuple(
        Part(*key, len(some), sum(g.num_bytes for g in some), sum(g.coded_bytes for g in some if key[1] == "pinned"))
        for key, some in found.items()
    )
