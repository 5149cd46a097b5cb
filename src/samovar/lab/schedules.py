"""Which way of planning schedules is best for this model? Told by pictures, on the prompts for tuning.

Planning sums errors where they are made. How much of one is left in the picture depends on when it was made: a model
that is sure of its picture corrects what went wrong early, and another makes it worse. So a few single gaps are tried
first, and what is left of each is weighed against what it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .methods import Method, ours
from .planning import FAMILIES, Family, FittedPlanner, Planner, SchedulePlanner
from .session import Row, Session
from .trajectory import Trajectory, watched_exact

PROBES = 8
"""Single gaps that are tried."""
PROBED_GAP = 3
"""Steps that each of them skips: enough to be seen in the picture."""
POWERS = (1.0, 2.0)
"""How errors of gaps may be summed. Which is nearer to the truth depends on the model."""


def scheduled(settings: Mapping[str, Any], backend: str = "tea_cache") -> Method:
    """A cache with a schedule, named by it."""
    long = ("schedule", "forecast_weights")
    rest = ", ".join(f"{name.removeprefix('forecast_')} {v}" for name, v in settings.items() if name not in long)
    masks = settings["schedule"]
    mask = " ".join(masks.values()) if isinstance(masks, Mapping) else masks
    return ours(backend, settings, name=f"schedule {mask} ({rest})", family="samovar schedule")


@dataclass(frozen=True)
class PlannerChoice:
    """The best way of planning, and what it was chosen by."""

    planner: SchedulePlanner
    words: str
    tried: tuple[tuple[Method, Row], ...]
    trajectory: Trajectory


def choose_planner(
    session: Session, families: Sequence[Family] = FAMILIES, computed: int | None = None
) -> PlannerChoice:
    """Try all ways at one number of computed steps; two fifths of all, if none is given."""
    watched = watched_exact()
    session.exact(watched)
    trajectory = Trajectory.read(session.notes(watched))
    lasting = probe(session, trajectory, families[0])
    tried: list[tuple[Method, Row]] = []
    ways: list[tuple[SchedulePlanner, str]] = [(FittedPlanner(trajectory.together), "fitted weights")]
    if trajectory.by_branch is not None and len(trajectory.by_branch.branches) > 1:
        ways.append((FittedPlanner(trajectory.by_branch), "fitted weights by branch"))
    for family in families:
        for power in POWERS:
            for weights, words in ((None, "errors as they are made"), (lasting, "errors as they last")):
                if weights is None or set(weights) != {1.0}:
                    ways.append(
                        (Planner(trajectory, family, power, weights), f"{family.name}, power {power:g}, {words}")
                    )
    count = computed or round(0.4 * trajectory.steps)
    scores = []
    for planner, _ in ways:
        method = scheduled(planner.plan(max(count, planner.fewest)).settings)
        row = session.measure(method)
        scores.append(row.quality.psnr)
        tried.append((method, row))
    best = max(range(len(ways)), key=scores.__getitem__)
    return PlannerChoice(*ways[best], tuple(tried), trajectory)


def probe(session: Session, trajectory: Trajectory, family: Family) -> list[float]:
    """For each step, how much of an error made there is left in the picture; only the proportions mean something.
    All ones where there are too few steps to try."""
    steps, first = trajectory.steps, family.depth
    last = steps - PROBED_GAP - 1
    if last - first < PROBES:
        return [1.0] * steps
    planner = Planner(trajectory, family)
    found: dict[int, float] = {}
    for number in range(PROBES):
        start = first + round(number * (last - first) / (PROBES - 1))
        mask = "#" * start + "." * PROBED_GAP + "#" * (steps - start - PROBED_GAP)
        row = session.measure(scheduled({**family.settings, "schedule": mask}))
        left = fmean(10 ** (-quality.psnr / 20) for quality in row.pictures)
        made = planner.gap_cost((start - 2, start - 1), PROBED_GAP)
        found[start + PROBED_GAP // 2] = left / max(made, 1e-30)
    return between(found, steps)


def between(found: Mapping[int, float], steps: int) -> list[float]:
    """A value for every step, from those of some: in proportion between two, and level at the ends."""
    places = sorted(found)
    values = []
    for step in range(steps):
        left = max((place for place in places if place <= step), default=places[0])
        right = min((place for place in places if place >= step), default=places[-1])
        part = 0.0 if left == right else (step - left) / (right - left)
        values.append(math.exp((1 - part) * math.log(found[left]) + part * math.log(found[right])))
    return values


def refine(mask: str, score: Callable[[str], float], attempts: int) -> str:
    """A schedule of as many computed steps that scores higher, found by moving one of them by one step at a time."""
    best, tried = score(mask), {mask}
    place, failures = 1, 0
    while attempts > 0 and failures < 2 * len(mask):
        candidates = [moved for moved in _moves(mask, place) if moved not in tried]
        place = place % (len(mask) - 1) + 1
        failures += 1
        for candidate in candidates[:attempts]:
            tried.add(candidate)
            attempts -= 1
            found = score(candidate)
            if found > best:
                mask, best, failures = candidate, found, 0
                break
    return mask


def _moves(mask: str, place: int) -> list[str]:
    """The computed step at a place, moved to a skipped neighbour; the first of each branch stays."""
    if mask[place] != "#" or mask[place - 1] == " ":
        return []
    found = []
    for other in (place - 1, place + 1):
        if 0 < other < len(mask) and mask[other] == ".":
            moved = list(mask)
            moved[place], moved[other] = ".", "#"
            found.append("".join(moved))
    return found
