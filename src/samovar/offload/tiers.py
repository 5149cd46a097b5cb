"""Which weights are kept in pinned memory, and which are read from where they are? Decided from sizes alone.

Pinned memory is copied at the speed of the bus. Anything else passes through a few pinned buffers: from pageable memory
at the speed of a copy on the host, from the model's own files at that of the disk. `host_memory` limits the memory that
holds weights, pinned or not. The page cache of files is not counted: the system takes it back when it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from ..core.errors import SettingError
from .planner import OffloadPlan
from .ring import ASSUMED_BUS
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
"""Bytes per second of a disk that nobody measured."""
ASSUMED_COPY = 10e9
"""Bytes per second of copies on the host, likewise."""
BOUNCE_BUFFERS, BOUNCE_BYTES = 3, 2**26
"""Pinned buffers that everything else passes through, and the most that each holds."""
_LEAST_BUFFER = 2**12


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

    def cost(self, can_spill: bool) -> int:
        """Memory that it takes to pin it, beside weights that are in memory wherever they go."""
        if self.coded_bytes:
            return self.coded_bytes + (self.anonymous_bytes if can_spill else 0)
        return self.num_bytes if can_spill else self.file_bytes


@dataclass(frozen=True)
class HostSpeeds:
    """Measured or assumed bytes per second."""

    bus: float = ASSUMED_BUS
    pageable: float = ASSUMED_COPY
    disk: float = ASSUMED_DISK
    is_disk_measured: bool = False


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
        often = {"forward": "in every forward", "run": "once in a run", "once": "once", "ahead": "ahead of the steps"}[
            self.crossing
        ]
        where = {"pinned": "pinned", "pageable": "in pageable memory", "disk": "in its file on disk"}[self.tier]
        why = {"pinned": "", "pageable": ": no more may be pinned", "disk": ": host_memory holds no more"}[self.tier]
        if self.coded_bytes:
            where = f"pinned as {format_bytes(self.coded_bytes)}, compressed"
        if self.crossing in ("once", "ahead"):
            why = ", and the device keeps it" if self.crossing == "once" else ", and then not needed"
        groups = f"{self.num_groups} groups, " if self.num_groups > 1 else ""
        return f"{self.component}: {groups}{format_bytes(self.num_bytes)} {where}, sent {often}{why}"


@dataclass(frozen=True)
class TierPlan:
    """Where every group of weights is kept. `print` shows it."""

    tiers: Mapping[Key, Tier]
    parts: tuple[Part, ...]
    held_bytes: int
    """Expected host memory that holds weights, pinned or not, with the buffers."""
    budget_bytes: int | None
    buffer_bytes: int
    """Bytes of each bounce buffer; 0 if none is needed."""
    spilled: frozenset[Key]
    """Groups whose weights must be written to a file first."""
    speeds: HostSpeeds
    plain: frozenset[Key] = frozenset()
    """Groups for whose compressed copies there is no room: they are pinned as they are."""
    may_pin_all: bool = False
    """Whether there is room for what is sent ahead of the steps, too, should it be sent often."""

    def tier(self, key: Key) -> Tier:
        return self.tiers.get(key, "pinned")

    def bytes_in(self, tier: Tier, *crossings: Crossing) -> int:
        return sum(p.num_bytes for p in self.parts if p.tier == tier and (not crossings or p.crossing in crossings))

    def read_seconds(self, crossing: Crossing) -> float:
        """Seconds that reading through the buffers takes, in a forward or in a run."""
        disk, memory = self.bytes_in("disk", crossing), self.bytes_in("pageable", crossing)
        return disk / self.speeds.disk + memory / self.speeds.pageable

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
        buffers = BOUNCE_BUFFERS * self.buffer_bytes
        through = f", {format_bytes(buffers)} of it as buffers" if buffers else ""
        lines = [f"Host memory: {format_bytes(self.held_bytes)}{budget}{through}.", *(f"  {p}" for p in self.parts)]
        how = "measured" if self.speeds.is_disk_measured else "assumed"
        in_a_run = ("run", "ahead") if self.budget_bytes is not None else ("run",)  # Else the page cache has room.
        for often, crossings in (("in every forward", ("forward",)), ("once in a run", in_a_run)):
            num_bytes = self.bytes_in("disk", *crossings)
            if num_bytes:
                speed, seconds = f"{self.speeds.disk / 1e9:.1f} GB/s ({how})", num_bytes / self.speeds.disk
                lines.append(f"{format_bytes(num_bytes)} are read from disk {often}: about {seconds:.3g} s at {speed}.")
        if self.spilled:
            lines.append(f"{len(self.spilled)} groups are written to spill_folder first: no file holds them.")
        return "\n".join(lines)


def uses_of(
    sizes: Sequence[ComponentSize],
    plan: OffloadPlan,
    anonymous: Callable[[Key], int] | None = None,
) -> list[WeightUse]:
    """The groups that a plan lets leave the device. By default, files hold all weights."""
    uses = []
    for size in sizes:
        placed = plan.component(size.name)
        if placed.ahead_bytes and size.ahead is not None:
            size = size.ahead
        stays = placed.placement == "streams" and not plan.take_turns
        every: Crossing = "forward" if size.role == "denoiser" else "run"
        groups = {"": size.rest_bytes, **{block.path: block.num_bytes for block in size.blocks}}
        sent = {block.path: block.sent for block in size.blocks}
        for path, num_bytes in groups.items() if placed.placement != "resident" else ():
            crossing: Crossing = every if path in placed.streamed else "once" if stays else "run"
            held = min(anonymous((size.name, path)), num_bytes) if anonymous else 0
            coded = sum(sent[path]) if placed.is_coded and path in placed.streamed else 0
            uses.append(WeightUse((size.name, path), num_bytes, crossing, held, coded))
        if placed.ahead_bytes:
            held = min(anonymous((size.name, TIME_LAYERS)), placed.ahead_bytes) if anonymous else 0
            uses.append(WeightUse((size.name, TIME_LAYERS), placed.ahead_bytes, "ahead", held))
    return uses


def plan_tiers(
    groups: Sequence[WeightUse],
    host_memory: int | None,
    speeds: HostSpeeds | None = None,
    *,
    host_bytes: int | None = None,
    can_spill: bool = False,
) -> TierPlan:
    """Pin what is sent most often, as far as the budget goes; read the rest from where it is.

    Without a budget, most of the host's memory (`host_bytes`) may be pinned and nothing is refused. With one, weights
    that no file holds must fit, unless they may be written to one (`can_spill`).
    """
    most_pinned = float("inf") if host_bytes is None else int(host_bytes * PINNABLE)
    budget = most_pinned if host_memory is None else float(host_memory)
    tiers: dict[Key, Tier] = {}
    whole = sum(g.anonymous_bytes + (g.cost(False) if g.crossing != "ahead" else 0) for g in groups)
    if whole <= min(budget, most_pinned):
        for group in groups:
            unpinned: Tier = "disk" if group.file_bytes else "pageable"
            tiers[group.key] = unpinned if group.crossing == "ahead" else "pinned"
        buffer = _buffer_bytes(groups, budget) if any(group.crossing == "ahead" for group in groups) else 0
        ahead = sum(group.cost(False) for group in groups if group.crossing == "ahead")
        made = _made(groups, tiers, host_memory, buffer, speeds, can_spill=False)
        return replace(made, may_pin_all=whole + ahead + BOUNCE_BUFFERS * buffer <= min(budget, most_pinned))
    buffer = _buffer_bytes(groups, budget)
    room = budget - BOUNCE_BUFFERS * buffer
    if not can_spill:
        room -= sum(group.anonymous_bytes for group in groups)
    if room < 0 and host_memory is not None:
        _refuse(groups, host_memory, buffer, can_spill)
    plain: dict[Key, WeightUse] = {}
    pinnable = most_pinned - BOUNCE_BUFFERS * buffer
    # Of what is sent equally often, weights that are in memory anyway come first: pinning them costs nothing more.
    kinds = [(crossing, has_file) for crossing in get_args(Crossing) for has_file in (False, True)]
    for kind in kinds:
        some = [group for group in groups if (group.crossing, group.file_bytes > 0) == kind]
        for group in _evenly(some, room, can_spill):
            tier, cost = _place(group, room, pinnable, can_spill)
            if tier == "pageable" and group.coded_bytes and not can_spill:  # There is no room for a second copy.
                group = plain[group.key] = group._replace(coded_bytes=0)
                tier, cost = _place(group, room, pinnable, can_spill)
            tiers[group.key] = tier
            room -= cost
            pinnable -= group.pinned_bytes if tier == "pinned" else 0
    groups = [plain.get(group.key, group) for group in groups]
    made = _made(groups, tiers, host_memory, buffer, speeds, can_spill)
    return replace(made, plain=frozenset(plain))


def _place(group: WeightUse, room: float, pinnable: float, can_spill: bool) -> tuple[Tier, int]:
    """The tier of a group and the room that it takes."""
    cost = group.cost(can_spill)
    if group.crossing in ("forward", "run") and (not cost or cost <= room) and group.pinned_bytes <= pinnable:
        return "pinned", cost
    if group.file_bytes or (can_spill and cost > room):
        return "disk", 0
    return "pageable", group.num_bytes if can_spill else 0


def _buffer_bytes(groups: Sequence[WeightUse], budget: float) -> int:
    """Bytes of a bounce buffer: a small part of a small budget, and no more than there is to read."""
    largest = max(group.num_bytes for group in groups)
    most = min(BOUNCE_BYTES, largest, int(min(budget, 2**62)) // 16)
    return max(most // _LEAST_BUFFER, 1) * _LEAST_BUFFER


def _evenly(groups: Sequence[WeightUse], room: float, can_spill: bool) -> Iterable[WeightUse]:
    """Groups in the order in which to pin them: those left out are spread evenly, so that reading never pauses."""
    costs = [group.cost(can_spill) for group in groups]
    whole = sum(costs)
    share = 1.0 if whole <= max(room, 0) else max(room, 0) / whole
    chosen, left, passed, used = [], [], 0, 0
    for group, cost in zip(groups, costs, strict=True):
        passed += cost
        if used + cost <= passed * share + 1e-6:
            used += cost
            chosen.append(group)
        else:
            left.append(group)
    return [*chosen, *left]


def _made(
    groups: Sequence[WeightUse],
    tiers: Mapping[Key, Tier],
    host_memory: int | None,
    buffer: int,
    speeds: HostSpeeds | None,
    can_spill: bool,
) -> TierPlan:
    held = BOUNCE_BUFFERS * buffer
    found: dict[tuple[str, Tier, Crossing], list[WeightUse]] = {}
    spilled = set()
    for group in groups:
        tier = tiers[group.key]
        is_spilled = tier == "disk" and can_spill and group.anonymous_bytes > 0
        if is_spilled:
            spilled.add(group.key)
        if tier == "pinned":
            held += group.coded_bytes + group.anonymous_bytes if group.coded_bytes else group.num_bytes
        else:
            held += 0 if is_spilled else group.anonymous_bytes
        found.setdefault((group.key[0], tier, group.crossing), []).append(group)
    parts = [
        Part(*key, len(some), sum(g.num_bytes for g in some), sum(g.coded_bytes for g in some if key[1] == "pinned"))
        for key, some in found.items()
    ]
    return TierPlan(tiers, tuple(parts), held, host_memory, buffer, frozenset(spilled), speeds or HostSpeeds())


def _refuse(groups: Sequence[WeightUse], host_memory: int, buffer: int, can_spill: bool) -> NoReturn:
    buffers = BOUNCE_BUFFERS * buffer
    anonymous = 0 if can_spill else sum(group.anonymous_bytes for group in groups)
    remedy = "Allow more."
    if anonymous:
        remedy = (
            "Allow more; load the model in the dtype of its files, so that it can be read from them again; or name a "
            'folder on disk that these weights may be written to: OffloadConfig(spill_folder="...").'
        )
    raise SettingError(
        f"host_memory={format_bytes(host_memory)} is not enough: at least {format_bytes(buffers + anonymous)} is "
        f"needed, {format_bytes(anonymous)} for weights that are in memory and in no file, and {format_bytes(buffers)} "
        f"for buffers. {remedy}",
        param="host_memory",
    )
