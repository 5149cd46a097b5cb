"""What runs have shown of a pipeline on a card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.settings import NAMES, Settings, count, kind, setting, settings_of
from .streaming import Timing

_BYTES = kind("bytes by name", lambda value: isinstance(value, dict) and all(type(v) is int for v in value.values()))


@dataclass(frozen=True)
class History(Settings, param="figures"):
    """Figures of earlier runs at one size."""

    needs: Mapping[str, int] = setting(dict, _BYTES, "What components took beside their weights, workspaces included.")
    narrow: tuple[str, ...] = setting(
        (), NAMES, "Components whose convolutions took other kernels, because there was too little room even so."
    )
    timing: Timing | None = setting(None, settings_of(Timing), "Speeds.")
    steps: int | None = setting(None, count(1), "Those of the last run.")
