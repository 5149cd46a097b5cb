"""Phases of a run, each within the whole budget: what stays on the device, what leaves in between, what streams.

Nothing is moved and no device is used: sizes, memory, bus speed and compute times go in, a plan with its expected peaks
and times comes out.

Encoding, denoising and decoding come one after the other, so each has the whole budget. What is loaded for one phase
leaves in the next as far as that one needs room, and no further.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NoReturn

from ..core.errors import ModelError, SettingError
from ..core.files import check_names
from ..core.settings import parse_bytes
from ..trace.activations import Activations
from .config import OffloadConfig
from .sizes import ComponentSize, format_bytes
from .streaming import Streaming, Timing, choose_streaming, least_bytes

Placement = Literal["resident", "turns", "streams"]
PHASES = {"encoder": "encode", "denoiser": "denoise", "vae": "decode"}
"""By role, in the order of a run. Anything else is used all the time."""

_WORTH_CODING = 0.97
"""Weights are compressed if that takes a forward below this share of its time: it takes seconds to set up."""
_BUSY_BUS, _BUSY_BUS_LATE = 0.95, 0.5
"""Or if the bus were busy for more than this share of it; the second where the host has no time to spare, so that
copies begin late."""
_WORKSPACE = 1.0
"""What the convolutions of a VAE take beside its activations if they may choose freely, as a share of these: cuDNN took
1.7 GiB beside 1.9 GiB for FLUX.1 at 1024 px."""


@dataclass(frozen=True)
class ComponentPlan:
    """Where one component lives."""

    name: str
    role: str
    class_name: str
    placement: Placement
    """"resident": always on the device. "turns": on the device as a whole while in use. "streams": block by block."""
    num_bytes: int
    device_bytes: int
    """Device memory it takes while loaded, including its ring."""
    activation_bytes: int
    """What it needs beside its weights while it is called; 0 if that is unknown."""
    num_blocks: int
    streamed: frozenset[str]
    """Paths of the blocks that stream."""
    streamed_bytes: int
    """Bytes that cross the bus in one forward."""
    ring_bytes: int
    forward_s: float | None
    """Expected seconds of one forward."""
    resident_s: float | None
    """The same with all weights on the device."""
    ahead_bytes: int = 0
    """Bytes of layers that depend on time alone. They are computed ahead of the steps, and neither stay nor stream."""
    is_coded: bool = False
    """Whether what streams crosses the bus compressed, without loss."""
    graph_bytes: int = 0
    """Memory of its graphs, where its forwards are recorded; always taken."""
    in_groups: bool = False
    """Whether compressed weights are sent several at a time, because the host has no time to spare."""
    is_measured: bool = True
    """Whether it is known what it needs beside its weights; if not, the first run shows it."""
    beside_bytes: int = 0
    """Device memory that others which are not resident may keep while it is called."""
    peak_bytes: int = 0
    """Expected peak of device memory while it is called."""
    note: str = ""
    """What its phase does otherwise than on an empty card."""

    def _row(self) -> tuple[str, ...]:
        how = {"resident": "stays", "turns": "is loaded when it is called"}.get(self.placement) or (
            f"{len(self.streamed)} of {self.num_blocks} blocks stream through a ring of {format_bytes(self.ring_bytes)}"
        )
        if self.is_coded:
            how += ", compressed on the way"
        if self.ahead_bytes:
            how += f"; {format_bytes(self.ahead_bytes)} of layers that see time alone are computed ahead"
        if self.graph_bytes:
            how += f"; {format_bytes(self.graph_bytes)} more for graphs"
        return self.name, self.class_name, format_bytes(self.num_bytes), format_bytes(self.device_bytes), how


@dataclass(frozen=True)
class Phase:
    """A part of a run that has the whole budget."""

    name: str
    components: tuple[str, ...]
    peak_bytes: int
    note: str = ""

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        return f"{self.name}: {', '.join(self.components)}, at most {format_bytes(self.peak_bytes)}{note}"


@dataclass(frozen=True)
class OffloadPlan:
    """A decision about every component of a pipeline. `print` shows it as a table."""

    components: tuple[ComponentPlan, ...]
    peak_bytes: int
    """Expected peak of device memory, including activations."""
    budget_bytes: int | None
    bus_bytes_s: float
    notes: tuple[str, ...]
    skipped: float
    """The expected share of denoiser forwards that a cache skips."""

    @property
    def offloads_anything(self) -> bool:
        return any(component.placement != "resident" or component.ahead_bytes for component in self.components)

    @property
    def take_turns(self) -> bool:
        """Whether components that are not resident may be in one another's way."""
        return sum(component.placement != "resident" for component in self.components) > 1

    @property
    def other_kernels(self) -> bool:
        """Whether a VAE has less room than it takes on an empty card."""
        return any(component.note for component in self.components)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of a run, each with its peak."""
        found = []
        for role, name in PHASES.items():
            parts = [component for component in self.components if component.role == role]
            if parts:
                notes = dict.fromkeys(part.note for part in parts if part.note)
                peak = max(part.peak_bytes for part in parts)
                found.append(Phase(name, tuple(part.name for part in parts), peak, "; ".join(notes)))
        return tuple(found)

    @property
    def slow_down(self) -> float | None:
        """Time of a denoiser forward relative to everything on the device; None if unknown."""
        timed = [c for c in self.components if c.role == "denoiser" and c.forward_s and c.resident_s]
        return sum(c.forward_s or 0.0 for c in timed) / sum(c.resident_s or 0.0 for c in timed) if timed else None

    def component(self, name: str) -> ComponentPlan:
        """The plan of one component."""
        known = {component.name: component for component in self.components}
        check_names([name], known, "a component of the plan", param="name")
        return known[name]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        plain = asdict(self)
        for component in plain["components"]:
            component["streamed"] = sorted(component["streamed"])
        derived = ("take_turns", "slow_down", "offloads_anything")
        phases = [asdict(phase) for phase in self.phases]
        return plain | {name: getattr(self, name) for name in derived} | {"phases": phases}

    def __str__(self) -> str:
        rows = [("component", "class", "weights", "on the device", "how"), *(c._row() for c in self.components)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        phases = [f"  {phase}" for phase in self.phases] if len(self.phases) > 1 else []
        return "\n".join([*lines, "", self._summary(), *phases, *(f"Note: {note}." for note in self.notes)])

    def _summary(self) -> str:
        budget = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        parts = [f"Expected peak: {format_bytes(self.peak_bytes)}{budget}"]
        if not self.offloads_anything:
            parts.append("everything fits, nothing is offloaded")
        streamed = sum(component.streamed_bytes for component in self.components if component.role == "denoiser")
        if streamed:
            seconds, bus = streamed / self.bus_bytes_s, format_bytes(self.bus_bytes_s)
            parts.append(f"{format_bytes(streamed)} cross the bus in a forward: {seconds:.3f} s at {bus}/s")
        if self.slow_down is not None:
            parts.append(f"a forward takes {self.slow_down:.2f} times as long as with everything on the device")
        if streamed and self.skipped:
            average = format_bytes(round(streamed * (1 - self.skipped)))
            parts.append(f"{self.skipped:.0%} of the forwards are skipped and load nothing: {average} per step")
        return "; ".join(parts) + "."


def plan_offload(
    sizes: Sequence[ComponentSize], config: OffloadConfig, activations: Activations | None = None
) -> OffloadPlan:
    """Place each component so that every phase stays within the budget and takes the least time.

    "auto" offloads as little as it must. "model" lets denoisers and encoders take turns; "layerwise" streams their
    blocks, or with a budget as few of them as it allows. `activations`: those that `config` does not give.
    """
    if not any(size.num_bytes for size in sizes):
        raise ModelError(
            "There is nothing to offload: no denoiser, encoder or VAE with weights was found among what the pipeline "
            "declares (_dit_modules, _encoder_modules, _vae_modules), what diffusers lists as its components, and "
            "well-known names such as transformer, text_encoder and vae."
        )
    plan = _Planner(tuple(sizes), config, activations).plan()
    if config.graphs and any(one.role == "denoiser" and one.placement == "streams" for one in plan.components):
        # Weights that stay gain more than graphs, which streamed blocks do not have anyway.
        plan = _Planner(tuple(sizes), replace(config, graphs=False), activations).plan()
        plan = replace(plan, notes=(*plan.notes, "there is no room for graphs beside the weights"))
    return plan


class _Planner:
    """The choices for some sizes and a budget."""

    def __init__(self, sizes: tuple[ComponentSize, ...], config: OffloadConfig, known: Activations | None) -> None:
        self.sizes, self.config = sizes, config
        self.timing = config.timing or Timing()
        self.budget = parse_bytes(config.gpu_memory, "gpu_memory")
        self.notes: tuple[str, ...] = ()
        self.unknown: frozenset[str] = frozenset()
        """Components of which nobody knows what they need beside their weights."""
        self.activations = self._read_activations(known or Activations({}, ""))

    def _read_activations(self, seen: Activations) -> dict[str, int]:
        given, names = self.config.activations, [size.name for size in self.sizes]
        by_name = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
        check_names(by_name, names, "a component of this pipeline (in activations)", param="activations")
        said = {name: int(size) for name, size in by_name.items() if size is not None}
        if self.budget is None:
            return said
        seen_of = {name: num_bytes for name, num_bytes in seen.by_name.items() if name in names}
        self.unknown = frozenset(size.name for size in self.sizes if size.role in PHASES) - {*seen_of, *said}
        self.notes = (seen.note,) if seen.note and seen_of.keys() - said.keys() else ()
        if self.unknown:
            why = f" ({seen.problem})" if seen.problem else ""
            what = f"what {', '.join(n for n in names if n in self.unknown)} needs beside its weights is not known"
            note = f"{what}{why}: the first run measures it, and keeps as little else on the device as it can"
            self.notes = (*self.notes, note)
        return seen_of | said

    def plan(self) -> OffloadPlan:
        whole, config = self.sizes, self.config
        ahead = tuple(size.ahead or size for size in whole)
        choices = {True: [ahead], False: [whole], None: [whole, ahead]}[config.precompute]
        fitting = []
        for sizes in choices:
            self._use(sizes)
            resident = self._made((), {})
            if self.budget is not None and not self.unknown and resident.peak_bytes <= self.budget:
                fitting.append(resident)
        for resident in fitting:
            if not resident.other_kernels:
                return resident
        if config.mode == "auto" and self.budget is None:
            raise SettingError('mode="auto" needs a budget, such as gpu_memory="12GiB".', param="gpu_memory")
        self._check_mode()
        if self.budget is not None:
            streams = {taker.name: choice for taker in self.takers if (choice := self._fitted(taker))}
            plan = self._made(self.takers, streams)
            return fitting[0] if fitting and plan.other_kernels else plan
        return self._unlimited()

    def _unlimited(self) -> OffloadPlan:
        """As much off the device as the mode says."""
        movers = [size for size in self.takers if size.role != "vae"]
        if self.config.mode == "layerwise":
            return self._made(movers, {s.name: choice for s in movers if (choice := self._choose(s, None))})
        return self._made(movers if len(movers) > 1 else self.takers, {})

    def _use(self, sizes: tuple[ComponentSize, ...]) -> None:
        self.sizes = sizes
        self.takers = [size for size in sizes if size.role in PHASES and size.num_bytes]
        self.always = sum(size.num_bytes for size in sizes if size not in self.takers)
        self.graphs = sum(self._graph_bytes(size) for size in sizes)
        for size in sizes if self.budget is not None else ():
            if size.ahead_room and size.name not in self.unknown:
                self.activations[size.name] = max(self.activations.get(size.name, 0), size.ahead_room)
        # What is used all the time runs beside the others, and may need more than they do.
        self.least = max((self.activations.get(size.name, 0) for size in sizes if size.role not in PHASES), default=0)

    def _check_mode(self) -> None:
        found = ", ".join(f"{size.name} ({size.role}, {size.class_name})" for size in self.sizes)
        if self.config.mode == "model" and len(self.takers) < 2:
            raise ModelError(
                f"Nothing can take turns on the device: a denoiser and an encoder are needed, and {found} was found. "
                'Stream its blocks instead: mode="layerwise".'
            )
        if self.config.mode == "layerwise" and not any(size.blocks for size in self.takers):
            raise ModelError(
                f"No blocks to stream were found in {found}. Denoisers and encoders need lists of repeated blocks with "
                'attention. Declare yours with register_declaration, or use mode="model".'
            )

    def _need(self, size: ComponentSize) -> int:
        return max(self.activations.get(size.name, 0), self.least)

    def _fitted(self, taker: ComponentSize) -> Streaming | None:
        """How a component streams in the room that its phase has; None if it fits as a whole."""
        room = (self.budget or 0) - self.always - self.graphs - self._need(taker)
        may_stream = self.config.mode != "model" and bool(taker.blocks)
        if taker.name in self.unknown and may_stream:
            room = min(room, least_bytes(taker))
        if taker.num_bytes <= room:
            return None
        choice = self._choose(taker, room) if may_stream else None
        return choice or self._refuse(least_bytes if self.config.mode != "model" else lambda size: size.num_bytes)

    def _choose(self, size: ComponentSize, room: int | None) -> Streaming | None:
        """The best way to stream a component, with compressed weights if that saves time."""
        plain = choose_streaming(size.uncoded(), room, self.timing)
        coded = choose_streaming(size, room, self.timing) if self.config.compress != "none" else None
        if plain is None or coded is None or self.config.compress == "lossless":
            return coded or plain
        bus_s = sum(block.num_bytes for block in size.blocks if block.path in plain.streamed) / self.timing.bus_bytes_s
        busy = _BUSY_BUS_LATE if self.timing.is_host_bound(size) else _BUSY_BUS
        is_worth_it = coded.forward_s < _WORTH_CODING * plain.forward_s or bus_s > busy * plain.forward_s
        return coded if is_worth_it else plain

    def _made(self, takers: Sequence[ComponentSize], streams: Mapping[str, Streaming]) -> OffloadPlan:
        """The plan in which `takers` come and go, and some of them stream."""
        placed = [self._place(size, size in takers, streams.get(size.name)) for size in self.sizes]
        staying = self.graphs + sum(plan.device_bytes for plan in placed if plan.placement == "resident")
        moving = sum(plan.device_bytes for plan in placed if plan.placement != "resident")
        components = tuple(self._with_peak(plan, staying, moving) for plan in placed)
        peak = max(plan.peak_bytes for plan in components)
        return OffloadPlan(components, peak, self.budget, self.timing.bus_bytes_s, self.notes, self.config.skipped)

    def _with_peak(self, plan: ComponentPlan, staying: int, moving: int) -> ComponentPlan:
        """A component with what may stay beside it, and what is on the device then."""
        own = 0 if plan.placement == "resident" else plan.device_bytes
        need, others = max(plan.activation_bytes, self.least), moving - own
        if self.budget is None:
            others, room = (0 if plan.role in PHASES else moving), 0
        else:
            room = self.budget - staying - own - need
        spare = int(need * _WORKSPACE) if plan.role == "vae" else 0
        beside = max(min(others, room - spare), 0) if plan.name not in self.unknown else 0
        note = "the VAE decodes with other kernels, so images may differ from those of an empty card by rounding"
        is_tight = self.budget is not None and room < spare
        peak = staying + own + need + (beside if self.budget is not None else others)
        return replace(plan, beside_bytes=beside, peak_bytes=peak, note=note if is_tight else "")

    def _place(self, size: ComponentSize, takes_turns: bool, streaming: Streaming | None) -> ComponentPlan:
        resident_s = self.timing.forward_s(size)
        choice = streaming or Streaming(frozenset(), 0, size.num_bytes, resident_s or 0.0)
        streamed = (size if choice.area_bytes else size.uncoded()).blocks
        return ComponentPlan(
            size.name,
            size.role,
            size.class_name,
            placement="streams" if streaming else "turns" if takes_turns else "resident",
            num_bytes=size.num_bytes + size.ahead_bytes,
            device_bytes=choice.num_bytes,
            activation_bytes=self.activations.get(size.name, 0),
            num_blocks=len(size.blocks),
            streamed=choice.streamed,
            streamed_bytes=sum(sum(block.sent) for block in streamed if block.path in choice.streamed),
            ring_bytes=choice.ring_bytes,
            forward_s=choice.forward_s if resident_s is not None else None,
            resident_s=resident_s,
            ahead_bytes=size.ahead_bytes,
            is_coded=choice.area_bytes > 0,
            graph_bytes=self._graph_bytes(size) if streaming is None else 0,
            in_groups=self.timing.is_host_bound(size),
            is_measured=size.name not in self.unknown,
        )

    def _graph_bytes(self, size: ComponentSize) -> int:
        """A graph computes in memory of its own, and all graphs in the same."""
        return self.activations.get(size.name, 0) if self.config.graphs and size.role == "denoiser" else 0

    def _refuse(self, least: Callable[[ComponentSize], int]) -> NoReturn:
        fixed = self.always + self.graphs
        needs = {size.name: fixed + least(size) + self._need(size) for size in self.takers}
        most = max(self.takers, key=lambda size: needs[size.name])
        raise SettingError(
            f"gpu_memory={format_bytes(self.budget or 0)} is not enough: at least "
            f"{format_bytes(needs[most.name], up=True)} is needed, because of {most.name} "
            f"({format_bytes(least(most))} of weights at a time, {format_bytes(self._need(most))} of activations, "
            f"{format_bytes(fixed)} that stays). Allow more, or generate smaller images.",
            param="gpu_memory",
        )
