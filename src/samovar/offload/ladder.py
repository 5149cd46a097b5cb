"""Which quantisation is the fastest within a budget, of those that lose no more than allowed?

Each rung is a plan of its own: exact weights first, then each kind of quantised ones. Nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..arch.quantised import Kind, as_stored, quantised_layers, quantised_parts
from ..arch.skeleton import Part, Parts
from ..core.errors import ModelError, SettingError
from ..core.settings import parse_bytes
from ..trace.activations import Activations
from ..trace.compute import operations_of
from .ahead import with_time_layers
from .config import OffloadConfig
from .planner import OffloadPlan, plan_offload
from .ring import ASSUMED_BUS
from .sizes import ComponentSize, format_bytes, measure_components, split_parts
from .streaming import Timing, forward_seconds
from .tiers import TierPlan, plan_tiers, uses_of

EXACT = "exact"
_CLOSE = 1.03
"""Times within this factor count as equal; then the rung that loses less is taken."""


@dataclass(frozen=True)
class Speeds:
    """Of a card and its bus; by default those of a large consumer card."""

    operations_s: float = 100e12
    """Multiplications and additions per second in 16 bit, as reached."""
    memory_bytes_s: float = 1e12
    bus_bytes_s: float = ASSUMED_BUS

    def __str__(self) -> str:
        return (
            f"{self.operations_s / 1e12:g} TFLOP/s, {format_bytes(self.bus_bytes_s)}/s over the bus and "
            f"{self.memory_bytes_s / 1e12:g} TB/s of GPU memory"
        )


@dataclass(frozen=True)
class Rung:
    """What one choice would take."""

    name: str
    """"exact", or a kind."""
    weight_bytes: int
    """Of all components."""
    plan: OffloadPlan | None = None
    tiers: TierPlan | None = None
    forward_s: float | None = None
    """Expected seconds of one forward of the denoiser; None if nothing shows how it is called."""
    problem: str = ""
    """Why it is no choice."""

    @property
    def bus_bytes(self) -> int:
        """Bytes of denoisers that cross the bus in a forward."""
        parts = self.plan.components if self.plan is not None else ()
        return sum(part.streamed_bytes for part in parts if part.role == "denoiser")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        peak = None if self.plan is None else self.plan.peak_bytes
        return {"name": self.name, "weight_bytes": self.weight_bytes, "peak_bytes": peak, "bus_bytes": self.bus_bytes,
                "forward_s": self.forward_s, "problem": self.problem}  # fmt: skip


class Ladder:
    """The rungs for a model that was read without weights."""

    def __init__(self, parts: Parts, seen: Activations, config: OffloadConfig, speeds: Speeds | None = None) -> None:
        self.speeds = speeds or Speeds()
        self._parts, self._seen, self._config = parts, seen, config
        self._components, _ = with_time_layers(split_parts(parts, config.exclude), seen.calls)
        self._operations = {name: _operations(parts, name, seen) for name in self.denoisers}

    @property
    def denoisers(self) -> list[str]:
        return [name for name, part in self._parts.items() if part.role == "denoiser" and part.module is not None]

    def changes(self, kind: Kind) -> bool:
        """Whether there is anything in each denoiser that a kind would quantise."""
        modules = [
            part.module for name, part in self._parts.items() if name in self.denoisers and part.module is not None
        ]
        return all(quantised_layers(module, kind) for module in modules)

    def rung(self, name: str) -> Rung:
        """What a choice would take; the problem if it cannot be had within the budgets."""
        kinds = {} if name == EXACT else dict.fromkeys(self.denoisers, name)
        parts = quantised_parts(self._parts, kinds)
        with as_stored(parts):
            sizes = measure_components(self._components, coded=True)
        weights = sum(size.num_bytes for size in sizes)
        try:
            return self._planned(name, sizes, weights, parts)
        except (SettingError, ModelError) as error:
            return Rung(name, weights, problem=str(error))

    def _planned(self, name: str, sizes: Sequence[ComponentSize], weights: int, parts: Parts) -> Rung:
        config = self._config
        is_counted = config.gpu_memory is not None and config.activations is None
        plan = plan_offload(sizes, config, self._seen if is_counted else None)
        tiers = plan_tiers(uses_of(sizes, plan), parse_bytes(config.host_memory, "host_memory"))
        times = [self._forward_s(size, plan, parts[size.name]) for size in sizes if size.name in self.denoisers]
        known = [seconds for seconds in times if seconds is not None]
        forward = max(sum(known) / len(known), tiers.read_seconds("forward")) if known else None
        return Rung(name, weights, plan, tiers, forward)

    def _forward_s(self, size: ComponentSize, plan: OffloadPlan, part: Part) -> float | None:
        """Seconds of one forward of a denoiser as it is planned."""
        seconds, placed = self._compute_s(size.name, part), plan.component(size.name)
        if seconds is None or not placed.streamed:
            return seconds
        timing = Timing(self.speeds.bus_bytes_s, {size.name: seconds})
        sent = size.ahead if placed.ahead_bytes and size.ahead is not None else size
        return forward_seconds(sent if placed.is_coded else sent.uncoded(), placed.streamed, placed.ring_bytes, timing)

    def _compute_s(self, name: str, part: Part) -> float | None:
        """Seconds of one forward with all weights on the card: quantised ones are first written in 16 bit, and read."""
        operations, module = self._operations[name], part.module
        if operations is None or module is None:
            return None
        layers = [module.get_submodule(path) for path in part.stored]
        weights = sum(layer.weight.numel() for layer in layers if isinstance(layer, torch.nn.Linear))
        return operations / self.speeds.operations_s + 5 * weights / self.speeds.memory_bytes_s


def _operations(parts: Parts, name: str, seen: Activations) -> int | None:
    module, call = parts[name].module, seen.calls.get(name)
    return None if call is None or module is None else operations_of(module, call)


def choose_rung(rungs: Sequence[Rung]) -> tuple[Rung, str]:
    """The fastest of some rungs, the one that loses least first, and why it is taken."""
    possible = [rung for rung in rungs if rung.plan is not None]
    if not possible:
        raise SettingError(rungs[-1].problem, param="gpu_memory")
    exact = rungs[0]
    if any(rung.forward_s is None for rung in possible):  # Nothing shows how it is called: bytes decide.
        best = min(possible, key=lambda rung: rung.bus_bytes)
        return best, f"{best.name}: {format_bytes(best.bus_bytes)} cross the bus in a forward"
    fastest = min(rung.forward_s or 0.0 for rung in possible)
    best = next(rung for rung in possible if (rung.forward_s or 0.0) <= fastest * _CLOSE)
    times = ", ".join(f"{rung.name} {rung.forward_s:.3g} s" for rung in possible)
    if best is exact:
        return best, f"exact weights are the fastest within the budget, or as fast (expected for a forward: {times})"
    why = "exact weights do not fit" if exact.plan is None else f"{format_bytes(exact.bus_bytes)} of exact ones would "
    why += "" if exact.plan is None else "cross the bus in a forward"
    return best, f"{best.name} weights are the fastest within the budget (expected for a forward: {times}): {why}"


def table_of(rungs: Sequence[Rung], notes: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Rows for people: each choice with its memory and its expected time. `notes` by the name of a rung."""
    rows: list[tuple[str, ...]] = [("weights", "size", "expected peak", "cross the bus", "a forward", "")]
    for rung in rungs:
        size, note = format_bytes(rung.weight_bytes), notes.get(rung.name, "")
        if rung.plan is None:
            rows.append((rung.name, size, "does not fit", "", "", note))
            continue
        seconds = "unknown" if rung.forward_s is None else f"{rung.forward_s:.3g} s"
        rows.append((rung.name, size, format_bytes(rung.plan.peak_bytes), format_bytes(rung.bus_bytes), seconds, note))
    return rows
