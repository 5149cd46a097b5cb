"""Which components stay on the device, which take turns, and which stream? Decided from sizes alone.

Nothing is moved and no device is used: sizes, memory, bus speed and compute times go in, a plan with its expected peak
and time comes out.
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

_WORTH_CODING = 0.97
"""Weights are compressed if that takes a forward below this share of its time: it takes seconds to set up."""
_BUSY_BUS, _BUSY_BUS_LATE = 0.95, 0.5
"""Or if the bus were busy for more than this share of it; the second where the host has no time to spare, so that
copies begin late."""
ASSUMED_ACTIVATIONS = 2**30
"""Bytes that a component is assumed to need beside its weights until they are measured."""


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
        """Whether components that are not resident unload each other."""
        return sum(component.placement != "resident" for component in self.components) > 1

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
        return plain | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        rows = [("component", "class", "weights", "on the device", "how"), *(c._row() for c in self.components)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", self._summary(), *(f"Note: {note}." for note in self.notes)])

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
    """Place each component so that everything stays within the budget and takes the least time.

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
        self.sizes, self.config, self._known = sizes, config, known
        self._ahead = tuple(size.ahead or size for size in sizes)
        self.timing = config.timing or Timing()
        self.budget = parse_bytes(config.gpu_memory, "gpu_memory")
        self.activations = self._read_activations()
        self._use(sizes)

    def _use(self, sizes: tuple[ComponentSize, ...]) -> None:
        self.sizes = sizes
        movers = [size for size in sizes if size.role in ("denoiser", "encoder") and size.num_bytes]
        everyone = [*movers, *(size for size in sizes if size.role == "vae" and size.num_bytes)]
        self.movers, self.everyone = movers, everyone
        for size in sizes:
            self.activations[size.name] = max(self.activations[size.name], size.ahead_room if self.budget else 0)

    def _read_activations(self) -> dict[str, int]:
        given, names = self.config.activations, [size.name for size in self.sizes]
        by_name = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
        check_names(by_name, names, "a component of this pipeline (in activations)", param="activations")
        computing = [size.name for size in self.sizes if size.role != "resident"]
        needs = dict.fromkeys(names, 0) | {n: parse_bytes(by_name.get(n), "activations") or 0 for n in computing}
        unknown = [n for n in computing if by_name.get(n) is None and self.budget is not None]
        known = self._known.by_name if self._known is not None else {}
        assumed = [name for name in unknown if name not in known]
        self._notes = (self._known.note,) if self._known is not None and len(assumed) < len(unknown) else ()
        if assumed:
            which = "per component" if len(assumed) == len(computing) else f"for {', '.join(assumed)}"
            why = f" ({self._known.problem})" if self._known is not None and self._known.problem else ""
            note = f"activations are assumed to be {format_bytes(ASSUMED_ACTIVATIONS)} {which}{why}"
            self._notes = (*self._notes, note)
        stay = {n: known[n] for n in names if n in known and n not in computing and self.budget is not None}
        return needs | stay | {name: known.get(name, ASSUMED_ACTIVATIONS) for name in unknown}

    def plan(self) -> OffloadPlan:
        mode = self.config.mode
        choices = {True: [self._ahead], False: [self.sizes], None: [self.sizes, self._ahead]}
        for sizes in choices[self.config.precompute]:
            self._use(sizes)
            resident = self._try([], {}) if self.budget is not None else None
            if resident is not None:
                return resident
        if mode == "auto" and self.budget is None:
            raise SettingError('mode="auto" needs a budget, such as gpu_memory="12GiB".', param="gpu_memory")
        self._check_mode()
        if mode == "layerwise" and self.budget is None:
            streams = {s.name: choice for s in self.movers if (choice := self._choose(s, None))}
            plan = self._try(self.movers, streams)
            assert plan is not None, "nothing is refused without a budget"
            return plan
        for takers in (self.movers, self.everyone):
            whole = self._try(takers, {}) if len(takers) > 1 else None
            if whole is not None:
                return whole
        return self._stream() if mode != "model" else self._refuse(lambda size: size.num_bytes)

    def _check_mode(self) -> None:
        found = ", ".join(f"{size.name} ({size.role}, {size.class_name})" for size in self.sizes)
        if self.config.mode == "model" and len(self.everyone) < 2:
            raise ModelError(
                f"Nothing can take turns on the device: a denoiser and an encoder are needed, and {found} was found. "
                'Stream its blocks instead: mode="layerwise".'
            )
        if self.config.mode == "layerwise" and not any(size.blocks for size in self.movers):
            raise ModelError(
                f"No blocks to stream were found in {found}. Denoisers and encoders need lists of repeated blocks with "
                'attention. Declare yours with register_declaration, or use mode="model".'
            )

    def _stream(self) -> OffloadPlan:
        """Stream the components that do not fit alone."""
        found = []
        for takers in (self.movers, self.everyone):
            rooms = {taker.name: self._room(taker, takers) for taker in takers}
            streams = {
                taker.name: choice
                for taker in takers
                if taker.num_bytes > rooms[taker.name] and (choice := self._choose(taker, rooms[taker.name]))
            }
            plan = self._try(takers, streams)
            if plan is not None:
                found.append((self._seconds(streams), len(takers), plan))
        return min(found, key=lambda item: item[:2])[2] if found else self._refuse(least_bytes)

    def _choose(self, size: ComponentSize, room: int | None) -> Streaming | None:
        """The best way to stream a component, with compressed weights if that saves time."""
        plain = choose_streaming(size.uncoded(), room, self.timing) if self.config.compress != "lossless" else None
        coded = choose_streaming(size, room, self.timing) if self.config.compress != "none" else None
        if plain is None or coded is None:
            return plain or coded
        bus_s = sum(block.num_bytes for block in size.blocks if block.path in plain.streamed) / self.timing.bus_bytes_s
        busy = _BUSY_BUS_LATE if self.timing.is_host_bound(size) else _BUSY_BUS
        is_worth_it = coded.forward_s < _WORTH_CODING * plain.forward_s or bus_s > busy * plain.forward_s
        return coded if is_worth_it else plain

    def _seconds(self, streams: Mapping[str, Streaming]) -> float:
        """Time of the streaming components, each weighted by how often it computes."""
        denoisers = {size.name for size in self.sizes if size.role == "denoiser"}
        computed = 1 - self.config.skipped
        return sum(s.forward_s * (computed if name in denoisers else 1) for name, s in streams.items())

    def _room(self, taker: ComponentSize, takers: Sequence[ComponentSize]) -> int:
        """Device memory for a component that takes turns; a VAE that stays may run while it is still loaded."""
        staying = [size for size in self.sizes if size not in takers]
        beside = max(self.activations[size.name] for size in (taker, *staying))
        return (self.budget or 0) - sum(size.num_bytes for size in staying) - beside

    def _try(self, takers: Sequence[ComponentSize], streams: Mapping[str, Streaming]) -> OffloadPlan | None:
        """The plan in which `takers` take turns and some of them stream; None if it is over the budget."""
        plans = tuple(self._place(size, size in takers, streams.get(size.name)) for size in self.sizes)
        staying = [plan for plan in plans if plan.placement == "resident"]
        moving = [plan for plan in plans if plan.placement != "resident"]
        largest = max((plan.device_bytes for plan in moving), default=0)
        peaks = [plan.device_bytes + plan.activation_bytes for plan in moving]
        peaks += [largest + plan.activation_bytes for plan in staying]
        peak = sum(plan.device_bytes for plan in staying) + max(peaks, default=0)
        peak += sum(plan.graph_bytes for plan in plans)
        if self.budget is not None and peak > self.budget:
            return None
        return OffloadPlan(plans, peak, self.budget, self.timing.bus_bytes_s, self._notes, self.config.skipped)

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
            activation_bytes=self.activations[size.name],
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
        )

    def _graph_bytes(self, size: ComponentSize) -> int:
        """A graph computes in memory of its own, and all graphs in the same."""
        return self.activations[size.name] if self.config.graphs and size.role == "denoiser" else 0

    def _refuse(self, least: Callable[[ComponentSize], int]) -> NoReturn:
        always = sum(size.num_bytes for size in self.sizes if size.role == "resident")
        needs = {size.name: always + least(size) + self.activations[size.name] for size in self.everyone}
        most = max(needs, key=lambda name: needs[name])
        weights = format_bytes(needs[most] - always - self.activations[most])
        raise SettingError(
            f"gpu_memory={format_bytes(self.budget or 0)} is not enough: at least {format_bytes(needs[most])} is "
            f"needed, because of {most} ({weights} of weights at a time, {format_bytes(self.activations[most])} of "
            f"activations, {format_bytes(always)} that stays). Allow more, or generate smaller images.",
            param="gpu_memory",
        )
