"""Which steps should be computed, if so many may be, and what should the others be made of?

Planned by `samovar.cache.fitting` from exact runs that were watched on the prompts for tuning. What planning leaves out
is how the model answers to an error: one that has made up its mind corrects it, and one that has not may turn to
another picture. Where each branch of the guidance skips steps of its own, there is less of an error to begin with, and
yet more pictures turn; perhaps because at most steps one branch answers to it and the other does not. So branches go
together, unless there are pictures enough to tell that apart is better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..cache.fitting import Products, fit_schedule, fit_weights
from ..errors import SettingError
from .methods import Method, ours
from .session import Row, Session
from .trajectory import Trajectory, watched_exact

ENOUGH = 45
"""Of fewer pictures there may be none of the kind that turns, and apart would seem better."""
TRIED_SHARE = 0.4
"""Of all steps are computed by the plans that are compared, where nothing else is asked for."""


def scheduled(settings: Mapping[str, Any], backend: str = "tea_cache") -> Method:
    """A cache with a schedule, named by it."""
    long = ("schedule", "forecast_weights")
    rest = ", ".join(f"{name.removeprefix('forecast_')} {v}" for name, v in settings.items() if name not in long)
    masks = settings["schedule"]
    mask = " ".join(masks.values()) if isinstance(masks, Mapping) else masks
    return ours(backend, settings, name=f"schedule {mask} ({rest})", family="samovar schedule")


@dataclass(frozen=True)
class SchedulePlanner:
    """Schedules with weights of their own at every skipped step and for each branch."""

    products: Products
    together: bool = True
    """Whether all branches are computed at the same steps."""

    fewest = 2
    """Of computed steps, that it plans with."""

    def __str__(self) -> str:
        return "fitted" if self.together else "fitted, branches apart"

    def plan(self, computed: int) -> str:
        """The best schedule with so many computed steps: `#` computed, `.` skipped; one for each branch, with a space
        between them."""
        steps = len(self.products.sizes)
        if type(computed) is not int or not self.fewest <= computed <= steps:
            raise SettingError(f"{computed!r} computed steps; a number from {self.fewest} to {steps} was expected.")
        found = fit_schedule(self.products, computed * len(self.products.branches), together=self.together)
        return " ".join(found.schedules.values())

    def settings(self, mask: str) -> dict[str, Any]:
        """What a cache is told to go by a schedule."""
        masks = dict(zip(self.products.branches, mask.split(" "), strict=True))
        settings = fit_weights(self.products, masks).settings()
        return settings if len(masks) > 1 else {**settings, "schedule": mask}

    def method(self, computed: int) -> Method:
        """The best schedule with so many computed steps, to be measured."""
        return scheduled(self.settings(self.plan(computed)))


@dataclass(frozen=True)
class PlannerChoice:
    """The best way of planning, and what it was chosen by."""

    planner: SchedulePlanner
    tried: tuple[tuple[Method, Row], ...]


def choose_planner(session: Session, score: Callable[[Row], float], computed: int | None = None) -> PlannerChoice:
    """Try all ways at one number of computed steps, and take the one that scores highest."""
    watched = watched_exact()
    session.exact(watched)
    trajectory = Trajectory.read(session.notes(watched))
    products = trajectory.by_branch or trajectory.together
    planners = [SchedulePlanner(products)]
    if len(products.branches) > 1 and len(session.tasks) >= ENOUGH:
        planners.append(SchedulePlanner(products, together=False))
    count = max(computed or round(TRIED_SHARE * trajectory.steps), SchedulePlanner.fewest)
    methods = [planner.method(count) for planner in planners]
    tried = [(method, session.measure(method)) for method in {method.name: method for method in methods}.values()]
    scores = {method.name: score(row) for method, row in tried}
    best = max(range(len(planners)), key=lambda number: scores[methods[number].name])
    return PlannerChoice(planners[best], tuple(tried))


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
