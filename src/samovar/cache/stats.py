"""Which steps were computed and which skipped, and why?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..arch import Coverage

SKIP_COST = 0.01
"""What a skipped step costs, as a part of a computed one; about what benchmarks/gpu_cache.py measures."""


class StepRecord(NamedTuple):
    """What was done with one step of one branch."""

    step: int
    computed: bool
    reason: str
    distance: float | None = None
    """The relative change of the signal since the step before, where it was measured."""
    accumulated: float | None = None
    """The rescaled changes since the last computed step, this one included."""
    hard: tuple[bool, ...] = ()
    """Of each picture whether it is a hard one, at the step where that is told."""


@dataclass(frozen=True)
class BranchStats:
    """One guidance branch of one run."""

    steps: Sequence[StepRecord]

    @property
    def computed(self) -> int:
        return sum(record.computed for record in self.steps)

    @property
    def skipped(self) -> int:
        return len(self.steps) - self.computed

    @property
    def mask(self) -> str:
        """The steps as a schedule: `#` computed, `.` skipped."""
        return "".join("#" if record.computed else "." for record in self.steps)


@dataclass(frozen=True)
class CacheStats:
    """The most recent run of one denoiser."""

    model: str
    settings: str
    signal: str
    """What steps are judged by."""
    branches: Mapping[str, BranchStats] = field(default_factory=dict)
    problem: str | None = None
    """Why nothing is skipped, if something is wrong."""
    coverage: Coverage | None = None
    """How much of the model a skipped step leaves out; None where that is not known."""

    @property
    def computed(self) -> int:
        """Computed forwards of all branches."""
        return sum(branch.computed for branch in self.branches.values())

    @property
    def skipped(self) -> int:
        return sum(branch.skipped for branch in self.branches.values())

    @property
    def hard(self) -> tuple[bool, ...]:
        """Of each picture whether it was told to be a hard one; empty if that was not asked."""
        return next((record.hard for branch in self.branches.values() for record in branch.steps if record.hard), ())

    @property
    def expected_speedup(self) -> float:
        """How much faster the denoiser's part of the run is than without a cache, if time goes by weights: what a
        skipped step does not leave out counts."""
        forwards = self.computed + self.skipped
        cost = SKIP_COST if self.coverage is None else max(SKIP_COST, 1.0 - self.coverage.share)
        return forwards / (self.computed + cost * self.skipped) if forwards else 1.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "settings": self.settings,
            "signal": self.signal,
            "problem": self.problem,
            "covered": None if self.coverage is None else round(self.coverage.share, 4),
            "expected_speedup": round(self.expected_speedup, 3),
            "branches": {
                name: {
                    "computed": branch.computed,
                    "skipped": branch.skipped,
                    "mask": branch.mask,
                    "steps": [_plain(record) for record in branch.steps],
                }
                for name, branch in self.branches.items()
            },
        }

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.settings}", f"  judged by {self.signal}"]
        if self.problem:
            lines.append(f"  nothing is skipped: {self.problem}")
        if self.coverage is not None:
            lines.append(f"  a skipped step runs no block: {self.coverage}")
        width = max(map(len, self.branches), default=0)
        for name, branch in self.branches.items():
            counts = f"{branch.computed} computed, {branch.skipped} skipped"
            lines.append(f"  {name:<{width}}  {counts:<28} {branch.mask}")
        distances = [r.distance for b in self.branches.values() for r in b.steps if r.distance is not None]
        if distances:
            mean = sum(distances) / len(distances)
            lines.append(f"  change a step: {min(distances):.3f} to {max(distances):.3f}, {mean:.3f} on average")
        if self.hard:
            lines.append(f"  of {len(self.hard)} pictures {sum(self.hard)} are hard")
        if self.branches:
            lines.append(f"  expected speed-up of the denoiser: {self.expected_speedup:.2f}x")
        return "\n".join(lines)


def _plain(record: StepRecord) -> dict[str, Any]:
    """A record for JSON, which has no word for what is infinite or not a number: None."""
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record._asdict().items()
        if name != "hard"
    }
    return values | ({"hard": list(record.hard)} if record.hard else {})
