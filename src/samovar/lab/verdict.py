"""What figures of some images say of all images, in a sentence that a person can act on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from .metrics import HIGHEST_PSNR
from .session import Row
from .tasks import Task

SHARE = 0.95
"""Share of images for which a figure is promised."""
CONFIDENCE = 0.9
"""How certain that must be, given the number of images."""
NUM_WORST = 3


def lower_bound(values: Sequence[float], share: float = SHARE, confidence: float = CONFIDENCE) -> float:
    """The value that this share of all values exceeds, with this confidence.

    With enough values it is one of the lowest, whatever their distribution: most images are close to the exact ones,
    and a few are far off. With fewer, nothing is certain unless they are taken to be normally distributed (Natrella
    1963), and then the bound is at most the lowest of them.
    """
    count = len(values)
    allowed = values_below(count, share, confidence)
    if allowed >= 0:
        return sorted(values)[allowed]
    if count < 3:
        return min(values)
    z_share, z_confidence = NormalDist().inv_cdf(share), NormalDist().inv_cdf(confidence)
    a = 1 - z_confidence**2 / (2 * (count - 1))
    b = z_share**2 - z_confidence**2 / count
    factor = (z_share + math.sqrt(max(z_share**2 - a * b, 0.0))) / a
    return min(*values, fmean(values) - factor * stdev(values))


def values_below(count: int, share: float = SHARE, confidence: float = CONFIDENCE) -> int:
    """How many of `count` values may lie below a bound that this share of all values exceeds, with this confidence;
    -1 if there are too few values."""
    likely, allowed = 0.0, -1
    while allowed < count:
        likely += math.comb(count, allowed + 1) * (1 - share) ** (allowed + 1) * share ** (count - allowed - 1)
        if likely > 1 - confidence:
            break
        allowed += 1
    return allowed


def worst(row: Row) -> list[int]:
    """The numbers of the images that are furthest from the exact ones, the furthest first."""
    order = sorted(range(len(row.images)), key=lambda number: row.images[number].psnr)
    return order[:NUM_WORST]


def sentences(row: Row, tasks: Sequence[Task]) -> list[str]:
    """What to expect of a setting: how near images stay, what it saves, and which images are the worst."""
    values = [quality.psnr for quality in row.images]
    broken = sum(not quality.is_finite for quality in row.images)
    if broken:
        return [f"{row.method}: {broken} of {len(values)} images are NaN or infinite. Do not use it."]
    if min(values) >= HIGHEST_PSNR:
        return [f"{row.method}: all {len(values)} images are the exact ones; {_saved(row)}."]
    few = values_below(len(values)) < 0
    likely = f" (an estimate: 45 images would show it, and there are {len(values)})" if few else ""
    described = "; ".join(
        f"{tasks[number].prompt!r}, seed {tasks[number].seed}: {values[number]:.0f} dB" for number in worst(row)
    )
    kept = f"{SHARE:.0%} of images like these stay above {math.floor(lower_bound(values))} dB{likely}"
    return [f"{row.method}: {kept}; {_saved(row)}.", f"The worst: {described}."]


def _saved(row: Row) -> str:
    counts = f"{row.computed:g} of {row.exact_steps} steps computed"
    return counts if row.speedup is None or row.is_noise else f"{row.speedup:.1f} times as fast, {counts}"


def shown_speedup(row: Row) -> str:
    """A speed-up for a table, unless something else was running while it was measured."""
    return "-" if row.speedup is None else "disturbed" if row.is_noise else f"{row.speedup:.2f}x"
