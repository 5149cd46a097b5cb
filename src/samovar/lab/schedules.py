"""Which steps should be computed, if so many may be, and what should the others be made of?

Planned by `samovar.lab.fitting` from exact runs that were watched on the prompts for tuning. What planning leaves out
is how the model answers to an error: one that has made up its mind corrects it, and one that has not may turn to
another picture. Such hard pictures are told early in the run, and have a plan of their own with twice the computed
steps, for which all others compute a little less. All branches of the guidance are computed at the same steps: with
steps of their own there is less of an error to begin with, and yet more pictures turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SettingError
from .fitting import OUTLIER_SHARE, Products, Vector, fit_outliers, fit_schedule, fit_weights, outlier_step
from .methods import Method, ours
from .session import Row, Session
from .trajectory import Trajectory, watched_exact

ENOUGH = 40
"""Among fewer pictures there are too few hard ones to tell which they are."""
DENSER = 2
"""So many times as many steps are computed for hard pictures."""
TRIED_SHARE = 0.4
"""Of all steps are computed by the plans that are compared, where nothing else is asked for."""


def scheduled(settings: Mapping[str, Any], backend: str = "tea_cache") -> Method:
    """A cache with a schedule, named by it."""
    long = ("schedule", "forecast_weights", "outliers")
    rest = ", ".join(f"{name.removeprefix('forecast_')} {v}" for name, v in settings.items() if name not in long)
    if "outliers" in settings:
        rest += f", of hard pictures {_written(settings['outliers']['schedule'])}"
    name = f"schedule {_written(settings['schedule'])} ({rest})"
    return ours(backend, settings, name=name, family="samovar schedule")


def _written(masks: Mapping[str, str] | str) -> str:
    """Once, if it is the same for all branches."""
    return " ".join(dict.fromkeys(masks.values())) if isinstance(masks, Mapping) else masks


@dataclass(frozen=True)
class SchedulePlanner:
    """Schedules with weights of their own at every skipped step and for each branch."""

    products: Products
    early: Mapping[str, Vector] | None = None
    """Of single pictures by branch (`Trajectory.early`), where hard ones are to have a plan of their own."""

    fewest = 2
    """Of computed steps, that it plans with."""

    def __str__(self) -> str:
        return "fitted" if self.early is None else "fitted, more for hard pictures"

    def plan(self, computed: int) -> str:
        """The best schedule with so many computed steps on average: `#` computed, `.` skipped; one for each branch,
        with a space between them. It is that of the pictures that are not hard."""
        steps = len(self.products.sizes)
        if type(computed) is not int or not self.fewest <= computed <= steps:
            raise SettingError(f"{computed!r} computed steps; a number from {self.fewest} to {steps} was expected.")
        if self.early is None:
            return self._best(computed, 1)
        exact = outlier_step(steps) + 1
        usual = int(computed / (1 + OUTLIER_SHARE * (DENSER - 1)))  # What hard pictures take, the others do without.
        return self._best(usual, exact) if usual >= 2 * exact else self._best(computed, 1)

    def _best(self, computed: int, exact: int) -> str:
        """With so many steps computed, the first few among them."""
        begin = dict.fromkeys(self.products.branches, "#" * exact)
        found = fit_schedule(self.products, computed * len(begin), together=True, begin=begin)
        return " ".join(found.schedules.values())

    def settings(self, mask: str) -> dict[str, Any]:
        """What a cache is told to go by a schedule."""
        masks = dict(zip(self.products.branches, mask.split(" "), strict=True))
        plan = fit_weights(self.products, masks)
        settings = plan.settings()
        if self.early is not None:
            count = min(round(DENSER * plan.forwards / len(masks)), len(self.products.sizes))
            hard = fit_outliers(self.products, plan, self.early, count * len(masks))
            settings |= {} if hard is None else {"outliers": hard}
        if len(masks) == 1:  # Whatever the branch is called.
            settings["schedule"] = mask
            if "outliers" in settings:
                settings["outliers"]["schedule"] = next(iter(settings["outliers"]["schedule"].values()))
        return settings

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
    if trajectory.early is not None and len(session.tasks) >= ENOUGH:
        planners.append(SchedulePlanner(products, trajectory.early))
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
