"""Statistics of a run: which steps were computed, which skipped, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..arch import Coverage

WITHIN = "within the tolerance"
"""Why the cache "auto" skips a step."""
SKIP_COST = 0.01
"""Cost of a skipped step, relative to a computed one; roughly what benchmarks/gpu_cache.py measures."""


class StepRecord(NamedTuple):
    """One step of one branch."""

    step: int
    computed: bool
    reason: str
    distance: float | None = None
    """Relative change of the signal since the step before, if measured. With the cache "auto", the error of
    the sample, per step, if a forecast had taken the place of the last computed step."""
    accumulated: float | None = None
    """Sum of the rescaled changes since the last computed step, including this one. With the cache "auto", the
    estimated error of all skipped steps so far."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict() | {"distance": _finite(self.distance), "accumulated": _finite(self.accumulated)}


def _finite(number: float | None, digits: int | None = None) -> float | None:
    """For JSON, where None stands for infinity and NaN."""
    if number is None or not math.isfinite(number):
        return None
    return number if digits is None else round(number, digits)


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
        return "".join(".#"[record.computed] for record in self.steps)

    def reasons(self) -> Counter[str]:
        """Why steps were computed, and how often."""
        return Counter(record.reason for record in self.steps if record.computed and record.reason)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        steps = [record.to_dict() for record in self.steps]
        return {"computed": self.computed, "skipped": self.skipped, "mask": self.mask, "steps": steps}

    def __repr__(self) -> str:
        return f"BranchStats({self.mask})"


@dataclass(frozen=True)
class CacheStats:
    """The most recent run of one denoiser."""

    model: str
    settings: str
    signal: str
    """What decides whether a step is skipped."""
    branches: Mapping[str, BranchStats] = field(default_factory=dict)
    problem: str | None = None
    """Why nothing is skipped, if that is so."""
    coverage: Coverage | None = None
    """How much of the model a skipped step leaves out, where that is known."""
    judges_error: bool = False
    """Whether steps are judged by the error of forecasts, and not by a change."""

    @property
    def error(self) -> float | None:
        """Estimated relative error of the worst image by all skipped steps, if known."""
        last = [record.accumulated or 0.0 for branch in self.branches.values() for record in branch.steps[-1:]]
        return max(last, default=0.0) if self.judges_error else None

    @property
    def computed(self) -> int:
        """Computed forwards of all branches."""
        return sum(branch.computed for branch in self.branches.values())

    @property
    def skipped(self) -> int:
        return sum(branch.skipped for branch in self.branches.values())

    @property
    def expected_speedup(self) -> float:
        """Expected speed-up of the denoiser, assuming time is proportional to weights: a skipped step pays for what it
        does not leave out."""
        cost = SKIP_COST if self.coverage is None else max(SKIP_COST, 1.0 - self.coverage.share)
        forwards = self.computed + self.skipped
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
            **({"error": _finite(self.error, 6)} if self.judges_error else {}),
            "branches": {name: branch.to_dict() for name, branch in self.branches.items()},
        }

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.settings}", f"  judged by {self.signal}"]
        if self.problem:
            lines.append(f"  nothing is skipped: {self.problem}")
        if self.coverage is not None:
            lines.append(f"  a skipped step leaves out all blocks: {self.coverage}")
        width = max(map(len, self.branches), default=0)
        for name, branch in self.branches.items():
            counts = f"{branch.computed} computed, {branch.skipped} skipped"
            lines.append(f"  {name:<{width}}  {counts:<28} {branch.mask}")
        if why := self._why():
            lines.append(f"  why steps were computed: {why}")
        distances = [r.distance for b in self.branches.values() for r in b.steps if r.distance is not None]
        if distances:
            what = "error of a forecast step" if self.judges_error else "change per step"
            mean = sum(distances) / len(distances)
            lines.append(f"  {what}: {min(distances):.3f} to {max(distances):.3f}, {mean:.3f} on average")
        if self.error is not None:
            lines.append(f"  estimated error of all skipped steps: {self.error:.3f} of the sample's size")
        if self.branches:
            lines.append(f"  expected speed-up of the denoiser: {self.expected_speedup:.2f}x")
        return "\n".join(lines)

    def _why(self) -> str:
        """Why steps were computed, and how often: by branch if that is the same for each, else together."""
        each = [branch.reasons() for branch in self.branches.values()]
        are_alike = all(one == each[0] for one in each)
        total = sum(each[:1] if are_alike else each, Counter[str]())
        counts = ", ".join(f"{reason} ({count})" for reason, count in total.items())
        return counts if are_alike else f"{counts}; in {len(each)} branches"

    def __repr__(self) -> str:
        return f"CacheStats({self.model}: {self.computed} computed, {self.skipped} skipped)"
