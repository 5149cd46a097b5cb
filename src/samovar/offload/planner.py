"""What is on the device all the time, what takes turns, and what streams? Decided from sizes alone.

Nothing is moved and no device is asked: sizes, memory, the speed of the bus and the time of computing go in, and a
plan comes out that says what it expects. `apply` follows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ..errors import ModelError, SettingError, nearest
from .sizes import ComponentSize, format_bytes
from .streaming import Streaming, Timing, choose_streaming, least_bytes

Mode = Literal["auto", "model", "layerwise"]
Placement = Literal["resident", "turns", "streams"]

ASSUMED_ACTIVATIONS = 2**30
"""What a component is taken to need beside its weights where nobody measured it."""


@dataclass(frozen=True)
class ComponentPlan:
    """Where one component lives."""

    name: str
    role: str
    class_name: str
    placement: Placement
    """"resident": on the device all the time. "turns": whole, while it is used. "streams": its blocks come and go."""
    num_bytes: int
    device_bytes: int
    """What it takes of the device while it is there, its ring included."""
    activation_bytes: int = 0
    num_blocks: int = 0
    streamed: frozenset[str] = frozenset()
    """The blocks that stream, by path."""
    streamed_bytes: int = 0
    """What crosses the bus in one forward."""
    ring_bytes: int = 0
    blocks_at_once: int = 0
    """The most streamed blocks that are on the device at any time, the one that is coming in included."""
    forward_s: float | None = None
    """Seconds expected of one forward."""
    resident_s: float | None = None
    """The same if all of it were on the device."""


@dataclass(frozen=True)
class OffloadPlan:
    """A decision about every component of a pipeline."""

    components: tuple[ComponentPlan, ...]
    peak_bytes: int
    """The most that is expected on the device, activations included."""
    budget_bytes: int | None
    bus_bytes_s: float
    notes: tuple[str, ...] = ()
    take_turns: bool = False
    """Whether those that are not resident send each other off."""
    skipped: float = 0.0
    """The share of the denoisers' forwards that is expected to be skipped."""

    @property
    def offloads_anything(self) -> bool:
        return any(component.placement != "resident" for component in self.components)

    def component(self, name: str) -> ComponentPlan:
        """The plan of one component."""
        for component in self.components:
            if component.name == name:
                return component
        known = [component.name for component in self.components]
        raise SettingError(f"The plan has no component {name!r}. {nearest(name, known)}")

    @property
    def slow_down(self) -> float | None:
        """How many times as long a forward of the denoisers takes; None where no time is known."""
        timed = [c for c in self.components if c.role == "denoiser" and c.forward_s and c.resident_s]
        if not timed:
            return None
        return sum(c.forward_s or 0.0 for c in timed) / sum(c.resident_s or 0.0 for c in timed)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = asdict(self)
        for component in plain["components"]:
            component["streamed"] = sorted(component["streamed"])
        return plain | {"slow_down": self.slow_down, "offloads_anything": self.offloads_anything}

    def __str__(self) -> str:
        from .report import table

        return table(self)


def plan_offload(
    sizes: Sequence[ComponentSize],
    *,
    mode: Mode = "auto",
    gpu_memory: int | None = None,
    activations: int | Mapping[str, int] | None = None,
    timing: Timing | None = None,
    skipped: float = 0.0,
) -> OffloadPlan:
    """Where to put each component, so that everything stays within `gpu_memory` and the time is least.

    "auto" offloads as little as it must. "model" lets denoisers and encoders take turns, "layerwise" streams their
    blocks; with a budget, as few of them as it allows. `activations` is what each component needs beside its weights.
    `skipped` is the share of the denoisers' forwards that a cache is expected to skip: their time counts for less.
    """
    if mode not in get_args(Mode):
        raise SettingError(f"mode is {mode!r}. {nearest(str(mode), get_args(Mode))}")
    if not 0.0 <= skipped < 1.0:
        raise SettingError(f"skipped is {skipped!r}; a share of the forwards, from 0 to below 1, was expected.")
    planner = _Planner(tuple(sizes), gpu_memory, activations, timing or Timing(), skipped)
    if not any(size.num_bytes for size in sizes):
        raise ModelError(
            "There is nothing to offload: no denoiser, encoder or VAE with weights was found. Looked for were what the "
            "pipeline declares (_dit_modules, _encoder_modules, _vae_modules), what diffusers lists as its components, "
            "and well-known names such as transformer, text_encoder and vae."
        )
    return planner.plan(mode)


class _Planner:
    """The choices for some sizes and a budget."""

    def __init__(
        self,
        sizes: tuple[ComponentSize, ...],
        budget: int | None,
        activations: int | Mapping[str, int] | None,
        timing: Timing,
        skipped: float,
    ) -> None:
        self.sizes, self.budget, self.timing, self.skipped = sizes, budget, timing, skipped
        given = activations if isinstance(activations, Mapping) else {}
        unknown = [name for name in given if name not in {size.name for size in sizes}]
        if unknown:
            raise SettingError(f"activations names {unknown[0]!r}. {nearest(unknown[0], [s.name for s in sizes])}")
        default = activations if isinstance(activations, int) else ASSUMED_ACTIVATIONS if budget is not None else 0
        self.activations = {s.name: given.get(s.name, default) if s.role != "resident" else 0 for s in sizes}
        self.is_assumed = budget is not None and activations is None
        self.movers = [size for size in sizes if size.role in ("denoiser", "encoder") and size.num_bytes]
        self.vaes = [size for size in sizes if size.role == "vae" and size.num_bytes]

    def plan(self, mode: Mode) -> OffloadPlan:
        resident = self._try([], {})
        if self.budget is not None and resident is not None:
            return resident
        if mode == "auto":
            if self.budget is None:
                raise SettingError('mode "auto" needs a budget: gpu_memory="12GiB", for example.')
            return self._fit()
        return self._take_turns() if mode == "model" else self._stream()

    def _take_turns(self) -> OffloadPlan:
        takers = self.movers if len(self.movers) > 1 else [*self.movers, *self.vaes]
        if len(takers) < 2:
            found = ", ".join(f"{size.name} ({size.role})" for size in self.sizes) or "nothing"
            raise ModelError(
                f"Nothing can take turns on the device: a denoiser and an encoder are needed, and {found} was found. "
                'Stream its blocks instead: mode="layerwise".'
            )
        plans = (self._try(some, {}) for some in (takers, [*self.movers, *self.vaes]))
        return next((plan for plan in plans if plan is not None), None) or self._refuse(lambda size: size.num_bytes)

    def _stream(self) -> OffloadPlan:
        if not any(size.blocks for size in self.movers):
            found = ", ".join(f"{size.name} ({size.class_name})" for size in self.sizes) or "nothing"
            raise ModelError(
                f"No blocks to stream were found in {found}: lists of repeated blocks with attention were looked for "
                'in denoisers and encoders. Declare them with register_declaration, or use mode="model".'
            )
        if self.budget is not None:
            return self._fit()
        streams = {s.name: choice for s in self.movers if (choice := choose_streaming(s, None, self.timing))}
        plan = self._try(self.movers, streams)
        assert plan is not None, "nothing is refused without a budget"
        return plan

    def _fit(self) -> OffloadPlan:
        """The first of: taking turns, the VAEs too, streaming what does not fit alone."""
        everyone = [*self.movers, *self.vaes]
        if len(self.movers) > 1 or self.vaes:
            for takers in (self.movers, everyone):
                whole = self._try(takers, {}) if len(takers) > 1 else None
                if whole is not None:
                    return whole
        found = []
        for takers in (self.movers, everyone):
            rooms = {taker.name: self._room(taker, takers) for taker in takers}
            streams = {
                taker.name: choice
                for taker in takers
                if taker.num_bytes > rooms[taker.name]
                and (choice := choose_streaming(taker, rooms[taker.name], self.timing))
            }
            plan = self._try(takers, streams)
            if plan is not None:
                found.append((self._seconds(streams), len(takers), plan))
        if not found:
            return self._refuse(least_bytes)
        return min(found, key=lambda item: item[:2])[2]

    def _seconds(self, streams: Mapping[str, Streaming]) -> float:
        """What streaming takes, each component counted as often as it computes."""
        denoisers = {size.name for size in self.sizes if size.role == "denoiser"}
        return sum(s.forward_s * (1 - self.skipped if name in denoisers else 1) for name, s in streams.items())

    def _room(self, taker: ComponentSize, takers: Sequence[ComponentSize]) -> int:
        """What a taker may have of the device: a VAE that stays may run while the taker is still there."""
        staying = [size for size in self.sizes if size not in takers]
        beside = max(self.activations[size.name] for size in (taker, *staying))
        return (self.budget or 0) - sum(size.num_bytes for size in staying) - beside

    def _try(self, takers: Sequence[ComponentSize], streams: Mapping[str, Streaming]) -> OffloadPlan | None:
        """The plan in which these take turns and some of them stream; None if it does not fit."""
        plans = tuple(self._place(size, size in takers, streams.get(size.name)) for size in self.sizes)
        staying = [plan for plan in plans if plan.placement == "resident"]
        coming = [plan for plan in plans if plan.placement != "resident"]
        always = sum(plan.device_bytes for plan in staying)
        peaks = [plan.device_bytes + plan.activation_bytes for plan in coming]
        most = max((plan.device_bytes for plan in coming), default=0)
        peaks += [most + plan.activation_bytes for plan in staying]
        peak = always + max(peaks, default=0)
        if self.budget is not None and peak > self.budget:
            return None
        notes = (
            (f"activations are assumed: {format_bytes(ASSUMED_ACTIVATIONS)} a component",) if self.is_assumed else ()
        )
        turns = len(coming) > 1
        return OffloadPlan(plans, peak, self.budget, self.timing.bus_bytes_s, notes, turns, self.skipped)

    def _place(self, size: ComponentSize, takes_turns: bool, streaming: Streaming | None) -> ComponentPlan:
        placement: Placement = "streams" if streaming else "turns" if takes_turns else "resident"
        resident_s = self.timing.forward_s(size)
        common = {"num_bytes": size.num_bytes, "activation_bytes": self.activations[size.name],
                  "num_blocks": len(size.blocks), "resident_s": resident_s}  # fmt: skip
        about = (size.name, size.role, size.class_name, placement)
        if streaming is None:
            return ComponentPlan(*about, device_bytes=size.num_bytes, forward_s=resident_s, **common)  # type: ignore[arg-type]
        return ComponentPlan(
            *about,
            device_bytes=streaming.num_bytes,
            streamed=streaming.streamed,
            streamed_bytes=size.num_bytes - streaming.kept_bytes,
            ring_bytes=streaming.ring_bytes,
            blocks_at_once=_at_once(size, streaming),
            forward_s=streaming.forward_s if resident_s is not None else None,
            **common,  # type: ignore[arg-type]
        )

    def _refuse(self, least: Callable[[ComponentSize], int]) -> OffloadPlan:
        always = sum(size.num_bytes for size in self.sizes if size.role == "resident")
        takers = [*self.movers, *self.vaes]
        needs = {size.name: always + least(size) + self.activations[size.name] for size in takers}
        most = max(needs, key=lambda name: needs[name])
        weights = format_bytes(needs[most] - always - self.activations[most])
        raise SettingError(
            f"{format_bytes(self.budget or 0)} of GPU memory is not enough: the least is {format_bytes(needs[most])}, "
            f"because of {most} ({weights} of weights at a time, {format_bytes(self.activations[most])} of "
            f"activations, {format_bytes(always)} that stays). Give more, or "
            "make smaller pictures."
        )


def _at_once(size: ComponentSize, streaming: Streaming) -> int:
    sizes = sorted(block.num_bytes for block in size.blocks if block.path in streaming.streamed)
    whole = sum(1 for total in itertools.accumulate(sizes) if total < streaming.ring_bytes)
    return min(whole + 1, len(sizes))
