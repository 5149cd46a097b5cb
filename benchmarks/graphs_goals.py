"""The goals that the figures of `gpu_graphs.py` meet, as a table, from its result or from a file with it.

python benchmarks/graphs_goals.py FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

STEPS = 28
"""Steps of an image, where one is reckoned from its steps."""
PICTURE_MS = 120.0
"""A picture of the built-in model, with guidance."""
Found = Mapping[str, Any]


class Goal(NamedTuple):
    """A figure, and what it should be."""

    part: str
    what: str
    figure: float | None
    """None if it was not measured."""
    limit: float
    at_least: bool = False
    unit: str = "%"

    @property
    def verdict(self) -> str:
        if self.figure is None:
            return "not measured"
        return "met" if (self.figure >= self.limit if self.at_least else self.figure <= self.limit) else "MISSED"

    def __str__(self) -> str:
        figure = "-" if self.figure is None else f"{self.figure:.3f}{self.unit}"
        sign = ">=" if self.at_least else "<="
        limit = f"{sign} {self.limit:g}{self.unit}"
        return f"{self.part:10} {self.what:63} {figure:>10}  {limit:8}  {self.verdict}"


def goals(parts: Found) -> Iterator[Goal]:
    """All goals, in the order of their importance."""
    for part in ("flux-1024", "qwen-1024"):
        found = parts.get(part, {})
        limits = {"output schedule + graphs": 0.1, "schedule + graphs": 0.1, "signal + graphs": 0.3}
        for contestant, limit in limits.items():
            skipped = found.get("skipped", {}).get(contestant, {})
            for kind in ("in a row", "behind a computed one"):
                figure = skipped.get(f"{kind.replace(' ', '_')}_percent")
                if kind == "in a row" or "schedule" in contestant:
                    yield Goal(part, f"skipped, {contestant}, {kind}, of a forward", figure, limit)
        for contestant in ("graphs", "schedule + graphs", "signal + graphs", "auto + graphs"):
            yield Goal(part, f"computed, {contestant}, over the bare graph", over_bare(found, contestant), 0.1)
    for part in ("flux-256", "flux-512", "qwen-512", "wan-480"):
        yield Goal(part, "computed, graphs, over the bare graph", over_bare(parts.get(part, {}), "graphs"), 3.0)
    for part in ("flux-512", "qwen-512"):
        for contestant in ("schedule + graphs", "signal + graphs", "auto + graphs"):
            run = parts.get(part, {}).get("runs", {}).get(contestant, {})
            what = f"run, {contestant}, of what the counts promise"
            yield Goal(part, what, run.get("of_promise"), 0.97, at_least=True, unit="")
    for contestant in ("graphs", "auto + graphs"):
        picture = parts.get("builtin", {}).get("pictures", {}).get(contestant, {}).get("picture_ms")
        yield Goal("builtin", f"a picture, {contestant}", picture, PICTURE_MS, unit="ms")


def over_bare(found: Found, contestant: str) -> float | None:
    figure: float | None = found.get("computed", {}).get(contestant, {}).get("over_bare_percent")
    return figure


def images(parts: Found) -> Iterator[str]:
    """How long the first and the second image take, and later ones."""
    for part, found in parts.items():
        for contestant, of in found.get("computed", {}).items():
            if "first_ms" in of:
                first, later = sum(of["first_ms"]) + (STEPS - len(of["first_ms"])) * of["ms"], STEPS * of["ms"]
                bits = "same bits" if of["same_bits"] else "other bits"
                yield f"{part:10} {contestant:26} {first / 1e3:9.2f} {later / 1e3:9.2f}  {of['ms']:9.2f}  {bits}"
            elif "failed" in of:
                yield f"{part:10} {contestant:26} {of['failed'][:90]}"


def summary(parts: Found) -> str:
    """Both tables."""
    heading = f"{'':10} {f'{STEPS} steps, all computed':26} {'first s':>9} {'later s':>9}  {'step ms':>9}"
    return "\n".join((*map(str, goals(parts)), "", heading, *images(parts)))


if __name__ == "__main__":
    print(summary(json.loads(Path(sys.argv[1]).read_text())["parts"]))
