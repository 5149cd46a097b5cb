"""What figures of some images say of all images, in a sentence that a person can act on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .metrics import HIGHEST_PSNR
from .session import Row
from .tasks import Task

SHARE = 0.95
"""Share of images for which a figure is promised."""
CONFIDENCE = 0.9
"""How certain that must be, given the number of images."""
NUM_WORST = 3


def lower_bound(values: Sequence[float]) -> float:
    """The value that 95 of 100 values like these exceed, with 90 % confidence, whatever their distribution: most images
    are close to the exact ones, and a few are far off. Of fewer than 45, the lowest."""
    return sorted(values)[max(0, values_below(len(values)))]


def values_below(count: int) -> int:
    """How many of `count` values may lie below a bound that the share of all values exceeds, with confidence; -1 if
    there are too few values."""
    likely, allowed = SHARE**count, -1
    while likely <= 1 - CONFIDENCE:
        allowed += 1
        likely += math.comb(count, allowed + 1) * (1 - SHARE) ** (allowed + 1) * SHARE ** (count - allowed - 1)
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
        return [f"{row.method.name}: {broken} of {len(values)} images are NaN or infinite. Do not use it."]
    if min(values) >= HIGHEST_PSNR:
        return [f"{row.method.name}: all {len(values)} images are the exact ones; {_saved(row)}."]
    bound = f"stay above {math.floor(lower_bound(values))} dB"
    if values_below(len(values)) < 0:
        kept = f"all {len(values)} images {bound} (45 or more would show what {SHARE:.0%} keep)"
    else:
        kept = f"{SHARE:.0%} of images like these {bound}"
    described = "; ".join(
        f"{tasks[number].prompt!r}, seed {tasks[number].seed}: {values[number]:.0f} dB" for number in worst(row)
    )
    return [f"{row.method.name}: {kept}; {_saved(row)}.", f"The worst: {described}."]


def _saved(row: Row) -> str:
    counts = f"{row.computed:g} of {row.exact_steps} steps computed"
    return counts if row.speedup is None or row.is_noise else f"{row.speedup:.1f} times as fast, {counts}"


def shown_speedup(row: Row) -> str:
    """A speed-up for a table, unless something else was running while it was measured."""
    return "-" if row.speedup is None else "disturbed" if row.is_noise else f"{row.speedup:.2f}x"
