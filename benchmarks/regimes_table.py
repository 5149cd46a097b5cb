"""The table of regimes: per cell the best of the others at equal counts, our margins, the goals met.

    python benchmarks/regimes_table.py FILE              # Markdown, from the JSON that benchmarks/regimes.py writes
    python benchmarks/regimes_table.py FILE --methods    # and the figures of every method

Counts of methods differ, so curves are compared: each is interpolated between its own points, PSNR linearly, LPIPS by
its logarithm, and never beyond them. The best of the others is the best of each figure, whoever has it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

SHARES = (0.54, 0.4, 0.32)
"""Computed steps, as shares of all, at which curves are compared: those that schedules are planned for."""
AUTO, TUNED, PLAIN = "samovar auto", "samovar schedule", "plain steps"
OURS = "samovar"
"""Families of other names are the others: plain steps and peers."""
TUNED_MARGIN, TUNED_LPIPS = 3.0, 0.5
"""The goal of a tuned setting: dB above the best of the others, and the share of their LPIPS."""
INVISIBLE = 40.0
"""PSNR, in dB, above which nobody sees a difference."""
AUTO_SHARE = 0.9
"""The share of cells in which `auto` is to be at least as near as the best of the others."""
_LEAST_LPIPS = 1e-7
_OFF = 1.0
"""Computed steps, more or less, with which a schedule still belongs to the count that it was planned for."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """A curve at some count."""

    psnr: float
    psnr_worst: float
    lpips: float


def steps_of(cell: str) -> int:
    """The number of steps of a cell such as 50-2-pairs-euler."""
    return int(cell.split("-")[0])


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The measured rows of each family, in order of computed steps; of equal counts the nearest."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if "problem" not in row and row["family"] != "exact":
            found.setdefault(row["family"], []).append(row)
    return {family: _by_count(of) for family, of in found.items()}


def _by_count(rows: Sequence[Row]) -> list[Row]:
    ordered = sorted(rows, key=lambda row: (row["computed"], -row["psnr"]))
    return [next(group) for _, group in itertools.groupby(ordered, lambda row: row["computed"])]


def at(curve: Sequence[Row], computed: float) -> Point | None:
    """A curve at a count; None beyond its ends."""
    for left, right in itertools.pairwise([*curve, *curve[-1:]]):
        if left["computed"] <= computed <= right["computed"]:
            width = right["computed"] - left["computed"]
            share = (computed - left["computed"]) / width if width else 0.0

            def between(name: str) -> float:
                return float(left[name] + share * (right[name] - left[name]))  # noqa: B023 - It is called at once.

            low, high = (math.log(max(row["lpips"], _LEAST_LPIPS)) for row in (left, right))
            return Point(between("psnr"), between("psnr_worst"), math.exp(low + share * (high - low)))
    return None


@dataclass(frozen=True)
class Best:
    """The best of plain steps and peers at some count, figure by figure."""

    nearest: str
    """Whose mean PSNR is the highest."""
    point: Point


def best_of_others(found: Mapping[str, Sequence[Row]], computed: float) -> Best | None:
    """Of those that compute as many steps, or fewer: a method that has nothing at a count is what it is below it."""
    points = [(family, point) for family, curve in found.items() if not family.startswith(OURS)
              for point in (at(curve, computed), *(at(curve, row["computed"]) for row in curve
                                                   if row["computed"] <= computed)) if point is not None]  # fmt: skip
    if not points:
        return None
    nearest, best = max(points, key=lambda of: of[1].psnr)
    worst, lpips = max(of.psnr_worst for _, of in points), min(of.lpips for _, of in points)
    return Best(nearest, Point(best.psnr, worst, lpips))


@dataclass(frozen=True)
class Line:
    """One count of one cell."""

    cell: str
    computed: float
    best: Best
    auto: Point | None
    tuned: Point | None

    @property
    def auto_is_met(self) -> bool | None:
        """At least as near as the best of the others, and the worst image above theirs; None if not measured here."""
        if self.auto is None:
            return None
        return self.auto.psnr >= self.best.point.psnr and self.auto.psnr_worst > self.best.point.psnr_worst

    @property
    def tuned_is_met(self) -> bool | None:
        if self.tuned is None:
            return None
        best = self.best.point
        is_near = self.tuned.psnr >= best.psnr + TUNED_MARGIN and self.tuned.lpips <= TUNED_LPIPS * best.lpips
        return is_near and self.tuned.psnr_worst >= best.psnr_worst


def lines_of(cells: Mapping[str, Sequence[Row]]) -> list[Line]:
    """Every cell at every share, where the others were measured."""
    lines = []
    for cell, rows in cells.items():
        found = curves(rows)
        auto, tuned = found.get(AUTO, []), found.get(TUNED, [])
        counts = [_nearest(tuned, round(share * steps_of(cell))) for share in SHARES]
        if auto and not any(at(auto, count) for count in counts):  # It skips less here, and is compared where it ends.
            counts.append(auto[0]["computed"])
        for computed in counts:
            best = best_of_others(found, computed)
            if best is not None:
                lines.append(Line(cell, computed, best, at(auto, computed), at(tuned, computed)))
    return lines


def _nearest(tuned: Sequence[Row], aim: int) -> float:
    """What the schedule planned for a count computes on the average of images, which may be a little more or less."""
    own: float = min((row["computed"] for row in tuned), key=lambda count: abs(count - aim), default=aim)
    return own if abs(own - aim) <= _OFF else aim


def markdown(result: Mapping[str, Any]) -> str:
    """The summary: a table, and how many goals are met."""
    head = [
        "cell", "computed", "best other", "PSNR, worst, LPIPS", "auto: PSNR", "worst", "LPIPS", "tuned: PSNR", "worst",
        "LPIPS", "goals",
    ]  # fmt: skip
    lines = lines_of(result["cells"])
    table = [head, ["---"] * len(head), *map(_cells_of, lines)]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return "\n\n".join((text, verdict("auto", lines), verdict("tuned", lines)))


def _margins(ours: Point | None, best: Point) -> list[str]:
    if ours is None:
        return [""] * 3
    share = ours.lpips / max(best.lpips, _LEAST_LPIPS)
    return [f"{ours.psnr - best.psnr:+.1f}", f"{ours.psnr_worst - best.psnr_worst:+.1f}", f"x {share:.2f}"]


def _cells_of(line: Line) -> list[str]:
    best = line.best.point
    goals = [f"{name} {'yes' if is_met else 'no'}"
             for name, is_met in (("auto", line.auto_is_met), ("tuned", line.tuned_is_met))
             if is_met is not None]  # fmt: skip
    return [
        line.cell,
        f"{line.computed:g}",
        line.best.nearest,
        f"{best.psnr:.1f}, {best.psnr_worst:.1f}, {best.lpips:.2g}",
        *_margins(line.auto, best),
        *_margins(line.tuned, best),
        ", ".join(goals),
    ]


def verdict(name: str, lines: Sequence[Line]) -> str:
    """In how many cells a goal is met at every count that was measured."""
    by_cell: dict[str, list[bool]] = {}
    for line in lines:
        is_met = line.auto_is_met if name == "auto" else line.tuned_is_met
        if is_met is not None:
            by_cell.setdefault(line.cell, []).append(is_met)
    met = sum(map(all, by_cell.values()))
    asked = math.ceil((AUTO_SHARE if name == "auto" else 1.0) * len(by_cell))
    words = "which is the goal" if met >= asked else f"and the goal is {asked}"
    if not by_cell:
        return f"`{name}`: no cell."
    return f"`{name}` meets its goal in {met} of {len(by_cell)} cells, {words}; {_comparisons(name, lines)}"


def _comparisons(name: str, lines: Sequence[Line]) -> str:
    """Over all counts of all cells: how often, and by how much, one of ours is nearer than the best of the others."""
    pairs = [(line.cell, ours, line.best.point) for line in lines if (ours := getattr(line, name)) is not None]
    gains = [(cell, ours.psnr - best.psnr) for cell, ours, best in pairs]
    kinds = {kind: [gain for cell, gain in gains if f"-{kind}-" in cell] for kind in ("pairs", "free")}
    means = ", ".join(f"{kind} {fmean(of):+.1f}" for kind, of in kinds.items() if of)
    ahead = sum(gain >= 0 for _, gain in gains)
    worst = [ours.psnr_worst - best.psnr_worst for _, ours, best in pairs]
    halved = sum(ours.lpips <= TUNED_LPIPS * best.lpips for _, ours, best in pairs)
    return (
        f"it is ahead in {ahead} of {len(pairs)} comparisons, by {fmean(gain for _, gain in gains):.1f} dB on average "
        f"({means}); its worst image in {sum(gain > 0 for gain in worst)}, by {fmean(worst):.1f} dB; its LPIPS is at "
        f"most half of theirs in {halved}."
    )


def kept_by(tolerance: float, result: Mapping[str, Any]) -> str:
    """What a tolerance of `auto` holds in all cells in which it was measured."""
    rows = [(cell, row) for cell, of in result["cells"].items() for row in of
            if row["method"] == f"auto tolerance={tolerance:g}"]  # fmt: skip
    if not rows:
        return ""
    above = sum(row["psnr_worst"] > INVISIBLE for _, row in rows)
    share = fmean(row["computed"] / steps_of(cell) for cell, row in rows)
    lowest = min(row["psnr_worst"] for _, row in rows)
    return (
        f"With `tolerance={tolerance:g}`, the worst of {result['images']} images is above {INVISIBLE:g} dB, where "
        f"nobody sees a difference, in {above} of {len(rows)} cells, and the lowest has {lowest:.0f} dB; "
        f"{100 * share:.0f} % of the steps are computed on average."
    )


def times_alone(result: Mapping[str, Any]) -> str:
    """Of images made one at a time: which share of the speed-up that the counts promise each family reaches."""
    found: dict[str, list[float]] = {}
    for cell, rows in result["cells"].items():
        for row in rows:
            if "speedup" in row and row["computed"] < steps_of(cell):
                found.setdefault(row["family"], []).append(row["speedup"] * row["computed"] / steps_of(cell))
    shares = {family: (median(of), min(of), max(of)) for family, of in found.items()}
    ordered = sorted(shares.items(), key=lambda item: -item[1][0])
    return "\n".join(
        f"| {family} | {middle:.2f} | {low:.2f} to {high:.2f} |" for family, (middle, low, high) in ordered
    )


def all_methods(result: Mapping[str, Any]) -> str:
    """The figures of every method in every cell."""
    names = ("computed", "psnr", "psnr_5th", "psnr_worst", "lpips", "lpips_worst")
    head = ["cell", "method", "computed", "PSNR", "5th percentile", "worst", "LPIPS", "worst"]
    rows = [
        [cell, row["method"], *([row["problem"], *[""] * 5] if "problem" in row else [f"{row[n]:.5g}" for n in names])]
        for cell, of in result["cells"].items()
        for row in sorted(of, key=lambda row: (row["family"], row.get("computed", 0)))
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="what benchmarks/regimes.py wrote")
    parser.add_argument("--methods", action="store_true", help="also the figures of every method")
    options = parser.parse_args(arguments)
    result = json.loads(options.file.read_text(encoding="utf-8"))
    print(markdown(result))
    if options.methods:
        print(f"\n{all_methods(result)}")


if __name__ == "__main__":
    main()
