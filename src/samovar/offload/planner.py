"""Plans of a run within a budget: what stays on the device, what leaves between the phases, what streams.

Nothing is moved and no device is used: sizes, memory, bus speed, compute times and steps go in, a plan with its
expected peaks and times comes out.

Encoding, denoising and decoding come one after the other, so each has the whole budget. What is loaded for one phase
leaves in the next as far as that one needs room, and no further. Denoisers choose first, since their bytes cross the
bus in every step. An encoder, whose blocks are called once in a run, may stream them through a little room even where
it would fit as a whole: then nothing has to leave for it and come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, NoReturn

from ..core.errors import ModelError, SettingError
from ..core.files import check_names
from ..core.settings import parse_bytes
from ..trace.activations import Activations
from .config import OffloadConfig
from .history import History
from .sizes import ComponentSize, format_bytes, format_least
from .streaming import Streaming, Timing, area_bytes, best_streaming, decoding_seconds, least_bytes, with_times

Placement = Literal["resident", "turns", "streams"]
PHASES = {"encoder": "encode", "companion": "denoise", "denoiser": "denoise", "vae": "decode"}
"""By role, in the order of a run. Anything else is used all the time."""
ASSUMED_COPY = 10e9
"""Bytes per second of copies on the host."""

_CHOOSING = ("companion", "denoiser", "vae", "encoder")
"""Roles in the order in which room is given to them."""
_SHARES = (0.3, 0.6, 1)
"""Shares of the encoders that room may be left for while a denoiser runs."""
_WORTH_CHOOSING = 0.99
"""The simplest plan is taken unless another one takes a run below this share of its time."""
_ASSUMED_STEPS = 28
"""Where nobody says how many steps a run has."""
_WORKSPACE = 1.0
"""What the convolutions of a VAE are assumed to take beside its activations if they may choose freely, as a share of
these, until a run has shown it."""
_HOLES = 0.1
"""What torch's allocator may leave unused, as a share of what a component needs beside its weights."""
OTHER_KERNELS = "the VAE decodes with other kernels, so images may differ from those of an empty card by rounding"
_RUNS_OF_A_SCHEDULE = 8
"""Runs for which outputs that depend on the time alone are assumed to be used."""


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
    """Device memory it takes while it is called, including its ring."""
    activation_bytes: int
    """What it needs beside its weights while it is called; 0 if that is unknown."""
    num_blocks: int
    streamed: frozenset[str]
    """Paths of the blocks that stream."""
    streamed_bytes: int
    """Bytes that cross the bus in one forward."""
    ring_bytes: int
    kept_bytes: int
    """Bytes that may stay while others are called."""
    forward_s: float | None
    """Expected seconds of one forward."""
    resident_s: float | None
    """The same with all weights on the device."""
    ahead_bytes: int = 0
    """Bytes of layers that depend on time alone. They are computed ahead of the steps, and neither stay nor stream."""
    is_coded: bool = False
    """Whether what streams crosses the bus compressed, without loss."""
    decoding_s: float = 0.0
    """Seconds that decoding it takes from compute in one forward."""
    graph_bytes: int = 0
    """Memory of its graphs, where its forwards are recorded; always taken."""
    is_known: bool = True
    """Whether it is known what it needs beside its weights; if not, the first run shows it."""
    beside_bytes: int = 0
    """Device memory that others may keep while it is called."""
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
    steps: int = _ASSUMED_STEPS
    """For which it was made."""
    moved_bytes: int = 0
    """Bytes that cross the bus in a run beside those of the denoisers' forwards."""
    step_s: float = 0.0
    """Expected seconds of a step of the denoisers."""
    once_s: float = 0.0
    """Expected seconds of what is done once in a run."""
    others: tuple[OffloadPlan, ...] = field(default=(), repr=False, compare=False)
    """Plans within the same budget that may be quicker for another number of steps."""

    def run_s(self, steps: int) -> float:
        """Expected seconds of a run with a number of steps."""
        return steps * self.step_s + self.once_s

    def at(self, steps: int, worth: float = 1.0) -> OffloadPlan:
        """The plan for another number of steps: this one, or one of the others whose runs take less than a share of its
        time."""
        plans = [self, *self.others]
        best = min(plans, key=lambda plan: plan.run_s(steps))
        best = best if best.run_s(steps) < worth * self.run_s(steps) else self
        return replace(best, steps=steps, others=tuple(plan for plan in plans if plan is not best))

    @property
    def offloads_anything(self) -> bool:
        return any(component.placement != "resident" or component.ahead_bytes for component in self.components)

    @property
    def take_turns(self) -> bool:
        """Whether components make room for others."""
        return len([component for component in self.components if component.placement != "resident"]) > 1

    @property
    def computes_ahead(self) -> bool:
        return any(component.ahead_bytes for component in self.components)

    @property
    def other_kernels(self) -> bool:
        """Whether images may differ from those of an empty card, by rounding."""
        return any(component.note for component in self.components)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of a run, each with its peak."""
        found = []
        for name in dict.fromkeys(PHASES.values()):
            parts = [component for component in self.components if PHASES.get(component.role) == name]
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
        plain = asdict(replace(self, others=()))
        del plain["others"]
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
        streamed, bus = self._streamed_bytes, format_bytes(self.bus_bytes_s)
        if streamed:
            seconds = streamed / self.bus_bytes_s
            parts.append(f"{format_bytes(streamed)} cross the bus in a forward: {seconds:.3f} s at {bus}/s")
        if self.slow_down is not None:
            parts.append(f"a forward takes {self.slow_down:.2f} times as long as with everything on the device")
        if streamed and self.skipped:
            average = format_bytes(round(streamed * (1 - self.skipped)))
            parts.append(f"{self.skipped:.0%} of the forwards are skipped and load nothing: {average} per step")
        if self.moved_bytes:
            seconds = self.moved_bytes / self.bus_bytes_s
            parts.append(f"{format_bytes(self.moved_bytes)} between the phases of a run: {seconds:.3f} s")
        return "; ".join(parts) + "."

    @property
    def _streamed_bytes(self) -> int:
        return sum(component.streamed_bytes for component in self.components if component.role == "denoiser")


def plan_offload(
    sizes: Sequence[ComponentSize],
    config: OffloadConfig,
    activations: Activations | None = None,
    history: History | None = None,
) -> OffloadPlan:
    """Place each component so that every phase stays within the budget and a run takes the least time.

    "auto" offloads as little as it must. "model" lets components take turns; "layerwise" streams their blocks, or with
    a budget as few of them as it allows. `activations`: those that `config` does not give. `history`: what earlier runs
    have shown.
    """
    if not any(size.num_bytes for size in sizes):
        raise ModelError(
            "There is nothing to offload: no denoiser, encoder or VAE with weights was found among what the pipeline "
            "declares (_dit_modules, _encoder_modules, _vae_modules), what diffusers lists as its components, and "
            "well-known names such as transformer, text_encoder and vae."
        )
    known = sizes, activations or Activations({}, ""), history or History()
    plan = _Planner(config, *known).plan()
    if config.graphs and any(one.role == "denoiser" and one.placement == "streams" for one in plan.components):
        # Weights that stay gain more than graphs, which streamed blocks do not have anyway.
        plan = _Planner(replace(config, graphs=False), *known).plan()
        plan = replace(plan, notes=(*plan.notes, "there is no room for graphs beside the weights"))
    return plan


class _Placed(NamedTuple):
    """A component and how it is placed."""

    size: ComponentSize
    moves: bool
    """Whether it comes and goes."""
    streaming: Streaming | None = None

    @property
    def device_bytes(self) -> int:
        return self.size.num_bytes if self.streaming is None else self.streaming.num_bytes

    @property
    def kept_bytes(self) -> int:
        """What may stay of it while others are called."""
        return self.size.num_bytes if self.streaming is None else self.streaming.kept_bytes


Sizes = Sequence[ComponentSize]


class _Planner:
    """The choices for some sizes and a budget."""

    def __init__(self, config: OffloadConfig, sizes: Sizes, known: Activations, history: History) -> None:
        self.sizes, self.config, self.history = sizes, config, history
        self.timing = config.timing or history.timing or Timing()
        self.budget = parse_bytes(config.gpu_memory, "gpu_memory")
        self.steps = config.steps or history.steps or _ASSUMED_STEPS
        self.notes: tuple[str, ...] = ()
        self.unknown: frozenset[str] = frozenset()
        """Components of which nobody knows what they need beside their weights."""
        self.spares: dict[str, int] = {}
        """What is assumed for the workspaces of convolutions."""
        self.needs = self._read_needs(known)
        self._found: dict[tuple[str, int, int | None], Streaming | None] = {}
        """The best ways to stream, by component, its bytes and the room for it."""

    def _read_needs(self, seen: Activations) -> dict[str, int]:
        given, names = self.config.activations, [size.name for size in self.sizes]
        by_name = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
        check_names(by_name, names, "a component of this pipeline (in activations)", param="activations")
        said = {name: int(size) for name, size in by_name.items() if size is not None}
        if self.budget is None:
            return said
        said |= {n: max(need, said.get(n, 0)) for n, need in self.history.needs.items() if n in names}
        counted = {name: num_bytes for name, num_bytes in seen.by_name.items() if name in names and name not in said}
        self.unknown = frozenset(size.name for size in self.sizes if size.role in PHASES) - {*counted, *said}
        vaes = [size.name for size in self.sizes if size.role == "vae" and size.name in counted]
        self.spares = {name: int(counted[name] * _WORKSPACE) for name in vaes}
        self.notes += (seen.note,) if counted and seen.note else ()
        self._note_doubts(seen.problem)
        return counted | said

    def _note_doubts(self, problem: str | None) -> None:
        if self.spares:
            share = f"as much again is assumed for the workspaces of {', '.join(self.spares)}"
            self.notes += (f"{share}, until a run has shown what they take",)
        if self.unknown:
            why = f" ({problem})" if problem else ""
            names = ", ".join(size.name for size in self.sizes if size.name in self.unknown)
            what = f"what {names} needs beside its weights is not known{why}"
            self.notes += (f"{what}: the first run measures it, and keeps as little else on the device as it can",)

    # ------------------------------------------------------------------------------------------------ the choice

    def plan(self) -> OffloadPlan:
        whole, ahead = self.sizes, [size.ahead or size for size in self.sizes]
        variants: list[Sizes] = [whole, ahead]
        if self.config.precompute is not None:
            variants = [ahead if self.config.precompute else whole]
        self._leave_holes(variants)
        fitting: list[OffloadPlan] = []
        if self.budget is not None and not self.unknown:
            resident = (self._made([_Placed(size, moves=False) for size in sizes]) for sizes in variants)
            fitting = [plan for plan in resident if plan.peak_bytes <= self.budget]
        best = next((plan for plan in fitting if not plan.other_kernels), None)
        if best is not None:
            return best
        self._check_mode()
        plans = [plan for sizes in self._possible(variants) for plan in self._offloaded(sizes)]
        if fitting and all(plan.other_kernels for plan in plans):
            return fitting[0]
        return replace(plans[0], others=tuple(plans[1:])).at(self.steps, _WORTH_CHOOSING)

    def _leave_holes(self, variants: list[Sizes]) -> None:
        """Count what torch's allocator leaves unused, to what was measured, where that does not make a call impossible:
        without room for it, the allocator gives memory back and takes it again, and everything waits meanwhile."""
        for name in self.history.needs if self.budget is not None else ():
            if name in self.needs:
                need, self.needs[name] = self.needs[name], int(self.needs[name] * (1 + _HOLES))
                if all(self._least(sizes).get(name, 0) > (self.budget or 0) for sizes in variants):
                    self.needs[name] = need

    def _possible(self, variants: list[Sizes]) -> list[Sizes]:
        """Those that can run within the budget. Refused if none can."""
        least = [max(self._least(sizes).values()) for sizes in variants]
        if self.budget is None:
            return variants
        if min(least) > self.budget:
            self._refuse(variants[least.index(min(least))])
        return [sizes for sizes, needed in zip(variants, least, strict=True) if needed <= self.budget]

    def _with_times(self, plan: OffloadPlan) -> OffloadPlan:
        """The plan with the times that are expected of it."""
        step_s, once_s = 0.0, plan.moved_bytes / plan.bus_bytes_s
        denoisers = [(plan.component(size.name), size) for size in self.sizes if size.role == "denoiser"]
        for part, size in denoisers:
            blocks, rest_s = with_times(size, self.timing)
            bus_s = part.streamed_bytes / plan.bus_bytes_s
            forward_s = max(sum(block.compute_s for block in blocks) + rest_s, bus_s, part.forward_s or 0.0)
            step_s += forward_s * (1 - self.config.skipped) / len(denoisers)
            if part.ahead_bytes and size.ahead is not None:
                runs = 1 if size.ahead.reads_text else _RUNS_OF_A_SCHEDULE
                speed = plan.bus_bytes_s if runs == 1 else min(ASSUMED_COPY, plan.bus_bytes_s)
                once_s += part.ahead_bytes / speed / runs
        return replace(plan, step_s=step_s, once_s=once_s)

    def _check_mode(self) -> None:
        takers = _takers(self.sizes)
        found = ", ".join(f"{size.name} ({size.role}, {size.class_name})" for size in self.sizes)
        if self.config.mode == "auto" and self.budget is None:
            raise SettingError('mode="auto" needs a budget, such as gpu_memory="12GiB".', param="gpu_memory")
        if self.config.mode == "model" and len(takers) < 2:
            raise ModelError(
                f"Nothing can take turns on the device: a denoiser and an encoder are needed, and {found} was found. "
                'Stream its blocks instead: mode="layerwise".'
            )
        if self.config.mode == "layerwise" and not any(size.blocks for size in takers):
            raise ModelError(
                f"No blocks to stream were found in {found}. Denoisers and encoders need lists of repeated blocks with "
                'attention. Declare yours with register_declaration, or use mode="model".'
            )

    # ------------------------------------------------------------------------------------------------ memory

    def _fixed(self, sizes: Sizes) -> int:
        """What is always on the device."""
        return sum((size.num_bytes if size.role not in PHASES else 0) + self._graph_bytes(size) for size in sizes)

    def _graph_bytes(self, size: ComponentSize) -> int:
        """A graph computes in memory of its own, and all graphs in the same."""
        return self.needs.get(size.name, 0) if self.config.graphs and size.role == "denoiser" else 0

    def _need(self, size: ComponentSize) -> int:
        """What is needed beside weights while a component is called. What is used all the time computes then, too."""
        always = [self.needs.get(other.name, 0) for other in self.sizes if other.role not in PHASES]
        room = size.ahead_room if self.budget is not None and size.name not in self.unknown else 0
        return max(self.needs.get(size.name, 0), room, *always, 0)

    def _partners(self, size: ComponentSize, sizes: Sizes) -> list[ComponentSize]:
        """Those that are called in turns with a component in each step, so that they must be on the device together:
        companions with each other, and with denoisers."""
        roles = {"denoiser": ("companion",), "companion": ("companion", "denoiser")}.get(size.role, ())
        return [other for other in _takers(sizes) if other is not size and other.role in roles]

    def _least(self, sizes: Sizes) -> dict[str, int]:
        """The least memory in which each component can be called."""
        least = least_bytes if self.config.mode != "model" else lambda size: size.num_bytes
        fixed = self._fixed(sizes)
        return {
            size.name: fixed + self._need(size) + sum(map(least, (size, *self._partners(size, sizes))))
            for size in _takers(sizes)
        } or {"": fixed}

    def _refuse(self, sizes: Sizes) -> NoReturn:
        needs, fixed = self._least(sizes), self._fixed(sizes)
        name = max(needs, key=lambda name: needs[name])
        beside = sum(self._need(size) for size in sizes if size.name == name)
        raise SettingError(
            f"gpu_memory={format_bytes(self.budget or 0)} is not enough: at least {format_least(needs[name])} is "
            f"needed, because of {name} ({format_bytes(needs[name] - beside - fixed)} of weights at a time, "
            f"{format_bytes(beside)} of activations, {format_bytes(fixed)} that stays). Allow more, or generate "
            "smaller images.",
            param="gpu_memory",
        )

    # ------------------------------------------------------------------------------------------------ placement

    def _offloaded(self, sizes: Sizes) -> list[OffloadPlan]:
        """Plans in which components come and go as far as they must. What a denoiser streams while it computes takes no
        time up to a point, if its time is known, and leaves room in which encoders stay, which have nothing to hide
        their way behind."""
        plans = [self._leaving(sizes, 0)]
        denoisers = [size for size in sizes if size.role == "denoiser"]
        if self.budget is not None and not self.config.graphs and all(map(self.timing.forward_s, denoisers)):
            encoders = sum(size.num_bytes for size in _takers(sizes) if size.role == "encoder")
            plans += [self._leaving(sizes, int(share * encoders)) for share in _SHARES if encoders]
        return [plan for plan in plans if plan is not None]

    def _leaving(self, sizes: Sizes, room: int) -> OffloadPlan | None:
        """The plan in which denoisers leave some room to encoders; None if they cannot."""
        placed = {size.name: _Placed(size, moves=size in _takers(sizes)) for size in sizes}
        chosen: list[_Placed] = []
        for size in sorted(_takers(sizes), key=lambda size: _CHOOSING.index(size.role)):
            left = room if size.role == "denoiser" else 0
            choices = list(self._ways(size, sizes, chosen, left))
            if left and not choices:
                return None
            if len(choices) > 1:
                choices.sort(key=lambda way: self._made([*({**placed, size.name: way}).values()]).moved_bytes)
            placed[size.name] = choices[0]
            chosen.append(choices[0])
        return self._made(list(placed.values()))

    def _ways(self, size: ComponentSize, sizes: Sizes, chosen: Sequence[_Placed], left: int = 0) -> Iterator[_Placed]:
        """The ways in which a component can be called: as a whole, or streaming through the room that its phase has. An
        encoder may do with less, such as what is free while all others stay."""
        may_stream = self.config.mode != "model" and bool(size.blocks)
        if self.budget is None:
            streaming = self._streaming(size, None) if may_stream and self.config.mode == "layerwise" else None
            yield _Placed(size, True, streaming)
            return
        partners, sizes_of = self._partners(size, sizes), {one.size.name: one.device_bytes for one in chosen}
        room = self.budget - self._fixed(sizes) - max(map(self._need, (size, *partners)))
        room -= sum(sizes_of.get(partner.name, least_bytes(partner)) for partner in partners) + left
        least = least_bytes(size)
        room = min(room, least) if size.name in self.unknown and self.config.mode != "model" else room
        if size.num_bytes <= room:
            yield _Placed(size, True)
        is_encoder = size.role == "encoder" and may_stream
        free = room - sum(one.kept_bytes for one in chosen)
        rooms = [free, least, least + area_bytes(size.blocks), room] if is_encoder else [room]
        for each in rooms if is_encoder or size.num_bytes > room else ():
            streaming = self._streaming(size, each) if each <= room else None
            if streaming is not None:
                yield _Placed(size, True, streaming)

    def _streaming(self, size: ComponentSize, room: int | None) -> Streaming | None:
        key = size.name, size.num_bytes, room
        if key not in self._found:
            self._found[key] = best_streaming(size, room, self.timing, self.config.compress)
        return self._found[key]

    def _made(self, placed: Sequence[_Placed]) -> OffloadPlan:
        """The plan in which components are placed so."""
        sizes = [one.size for one in placed]
        staying = sum(one.device_bytes for one in placed if not one.moves) + sum(map(self._graph_bytes, sizes))
        components = tuple(self._part(one, placed, staying) for one in placed)
        peak, moved = max(part.peak_bytes for part in components), _moved_bytes(components)
        how = self.timing.bus_bytes_s, self.notes, self.config.skipped, self.steps, moved
        return self._with_times(OffloadPlan(components, peak, self.budget, *how))

    def _part(self, one: _Placed, placed: Sequence[_Placed], staying: int) -> ComponentPlan:
        size, resident_s = one.size, self.timing.forward_s(one.size)
        way = one.streaming or Streaming(frozenset(), 0, size.num_bytes, 0, resident_s or 0.0)
        taken = staying + self._need(size) + (one.device_bytes if one.moves else 0)
        others = [other for other in placed if other.moves and other is not one]
        spare = self.spares.get(size.name, 0)
        is_tight = size.name in self.history.narrow or (self.budget is not None and self.budget - taken < spare)
        beside = self._beside(size, others, taken + spare)
        moving = [block for block in size.blocks if block.path in way.streamed]
        return ComponentPlan(
            size.name,
            size.role,
            size.class_name,
            placement="streams" if one.streaming else "turns" if one.moves else "resident",
            num_bytes=size.num_bytes + size.ahead_bytes,
            device_bytes=one.device_bytes,
            activation_bytes=self.needs.get(size.name, 0),
            num_blocks=len(size.blocks),
            streamed=way.streamed,
            streamed_bytes=way.sent_bytes,
            ring_bytes=way.ring_bytes,
            kept_bytes=way.kept_bytes,
            forward_s=way.forward_s if resident_s is not None else None,
            resident_s=resident_s,
            ahead_bytes=size.ahead_bytes,
            is_coded=way.area_bytes > 0,
            decoding_s=decoding_seconds(moving, self.timing) if way.area_bytes else 0.0,
            graph_bytes=self._graph_bytes(size) if one.streaming is None else 0,
            is_known=size.name not in self.unknown,
            beside_bytes=beside,
            peak_bytes=taken + min(beside, sum(other.kept_bytes for other in others)),
            note=OTHER_KERNELS if is_tight else "",
        )

    def _beside(self, size: ComponentSize, others: Sequence[_Placed], taken: int) -> int:
        """What others may keep on the device while a component is called that needs so much."""
        if self.budget is not None:
            return 0 if size.name in self.unknown else max(self.budget - taken, 0)
        partners = {partner.name for partner in self._partners(size, [other.size for other in others])}
        # VAEs are small, and leave only where there is a budget.
        stay = [other for other in others if other.size.role == "vae" or other.size.name in partners]
        return sum(other.device_bytes for other in stay)


def _takers(sizes: Sizes) -> list[ComponentSize]:
    """Those that may come and go."""
    return [size for size in sizes if size.role in PHASES and size.num_bytes]


def _moved_bytes(components: Sequence[ComponentPlan]) -> int:
    """Bytes that cross the bus in a run, beside those of the denoisers' forwards: what components have left since the
    last run and what encoders stream. Those leave first that are needed last."""
    takers = [part for part in components if part.placement != "resident"]
    takers.sort(key=lambda part: [*PHASES].index(part.role))
    held = dict.fromkeys((part.name for part in takers), 0)
    moved = 0
    for _ in range(2):  # The first run begins with an empty device.
        moved = sum(part.streamed_bytes for part in takers if part.role == "encoder")
        for at, part in enumerate(takers):
            others = [*takers[at + 1 :], *takers[:at]]
            excess = sum(held[other.name] for other in others) - part.beside_bytes
            for other in reversed(others):
                leaving = min(max(excess, 0), held[other.name])
                held[other.name] -= leaving
                excess -= leaving
            moved += part.kept_bytes - held[part.name]
            held[part.name] = part.kept_bytes
    return moved
