"""What runs have shown of a pipeline on a card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.settings import NAMES, Kind, Settings, count, kind, setting, settings_of
from .streaming import SECONDS, Timing

_BYTES = kind("bytes by name", lambda value: isinstance(value, dict) and all(type(v) is int for v in value.values()))
_PAIRS = Kind("pairs of names", lambda value: tuple(NAMES.read(pair) for pair in value))


@dataclass(frozen=True)
class History(Settings, param="figures"):
    """Figures of earlier runs at one size."""

    needs: Mapping[str, int] = setting(dict, _BYTES, "What components took beside their weights, workspaces included.")
    narrow: tuple[str, ...] = setting(
        (), NAMES, "Components whose convolutions took other kernels, because there was too little room even so."
    )
    timing: Timing | None = setting(None, settings_of(Timing), "Speeds.")
    order: tuple[str, ...] = setting((), NAMES, "Components in the order in which a run calls them.")
    together: tuple[tuple[str, ...], ...] = setting((), _PAIRS, "Pairs that are called in turns.")
    steps: int | None = setting(None, count(1), "Those of the last run.")
    visit_s: Mapping[str, float] = setting(
        dict, SECONDS, "By component: seconds in which layers that depend on time alone are computed ahead."
    )

    def are_together(self, one: str, other: str, assumed: bool) -> bool:
        """Whether two components are called in turns; as `assumed` if no run has shown both."""
        if one in self.order and other in self.order:
            return (one, other) in self.together or (other, one) in self.together
        return assumed
