"""Choose a quantisation: of what loses no more than allowed and fits, what sends the fewest bytes over the bus.

Each rung is a plan of its own: exact weights first, then each kind of quantised ones. Nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arch.quantised import Kind, as_stored, quantised_layers, quantised_parts
from ..arch.skeleton import Parts
from ..core.errors import ModelError, SettingError
from ..core.settings import parse_bytes
from ..trace.activations import Activations
from .config import OffloadConfig
from .host_tiers import TierPlan, plan_tiers, uses_of
from .planner import OffloadPlan, plan_offload
from .sizes import format_bytes, measure_components, split_parts
from .time_layers import with_time_layers

EXACT = "exact"
_CLOSE = 1.03
"""Traffic within this factor counts as equal; then the rung that loses less is taken."""


@dataclass(frozen=True)
class Rung:
    """What one choice would take."""

    name: str
    """"exact", or a kind."""
    weight_bytes: int
    """Of all components."""
    plan: OffloadPlan | None = None
    tiers: TierPlan | None = None
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
                "problem": self.problem}  # fmt: skip


class Ladder:
    """The rungs for a model that was read without weights."""

    def __init__(self, parts: Parts, seen: Activations, config: OffloadConfig) -> None:
        self._parts, self._config = parts, config
        self._seen = seen if config.gpu_memory is not None and config.activations is None else None
        self._components, _ = with_time_layers(split_parts(parts, config.exclude), seen.calls)
        self._denoisers = {
            name: part.module for name, part in parts.items() if part.role == "denoiser" and part.module is not None
        }

    def changes(self, kind: Kind) -> bool:
        """Whether there is anything in each denoiser that a kind would quantise."""
        return all(quantised_layers(module, kind) for module in self._denoisers.values())

    def rung(self, name: str) -> Rung:
        """What a choice would take; the problem if it cannot be had within the budgets."""
        parts = quantised_parts(self._parts, {} if name == EXACT else dict.fromkeys(self._denoisers, name))
        with as_stored(parts):
            sizes = measure_components(self._components, coded=True)
        weights = sum(size.num_bytes for size in sizes)
        try:
            plan = plan_offload(sizes, self._config, self._seen)
            tiers = plan_tiers(uses_of(sizes, plan), parse_bytes(self._config.host_memory, "host_memory"))
        except (SettingError, ModelError) as error:
            return Rung(name, weights, problem=str(error))
        return Rung(name, weights, plan, tiers)


def choose_rung(rungs: Sequence[Rung]) -> tuple[Rung, str]:
    """The rung to take, of some of which the first loses least, and why."""
    possible = [rung for rung in rungs if rung.plan is not None]
    if not possible:
        raise SettingError(rungs[-1].problem, param="gpu_memory")
    fewest = min(rung.bus_bytes for rung in possible)
    best = next(rung for rung in possible if rung.bus_bytes <= _CLOSE * fewest)
    left_out = [rung.name for rung in rungs if rung.plan is None]
    if not best.bus_bytes:
        why = f"{best.name} weights stay on the GPU, and lose least of those that do"
    else:
        sent = ", ".join(f"{rung.name} {format_bytes(rung.bus_bytes)}" for rung in possible)
        why = f"{best.name} weights send the fewest bytes over the bus in a forward ({sent})"
    return best, why + (f"; {', '.join(left_out)} weights do not fit" if left_out else "")


def table_of(rungs: Sequence[Rung], notes: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Rows for people: each choice with its memory and traffic. `notes` by the name of a rung."""
    rows: list[tuple[str, ...]] = [("weights", "size", "expected peak", "cross the bus", "")]
    for rung in rungs:
        plan = rung.plan
        cells = ("does not fit", "") if plan is None else tuple(map(format_bytes, (plan.peak_bytes, rung.bus_bytes)))
        rows.append((rung.name, format_bytes(rung.weight_bytes), *cells, notes.get(rung.name, "")))
    return rows
