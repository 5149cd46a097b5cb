"""Which steps should be computed if only a given number may be, and what are the others made of?

Planned by `samovar.lab.fitting` from exact runs on the tuning prompts. That leaves out how the model reacts to an
error: usually it corrects it, but while it has not settled on an image it may turn to another one. Such outliers are
recognised early in the run and get a plan with twice the computed steps; all other images compute a little less in
return. With strong guidance all images react: `samovar.lab.closed_loop` fits weights on the way that they make. Images
decide which of these is used. All branches are computed at the same steps: with steps of their own their errors are
smaller, and yet more images change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..core.errors import SettingError
from .closed_loop import ClosedLoop, even_mask, settings_of
from .fitting import OUTLIER_SHARE, Products, Vector, fit_outliers, fit_schedule, fit_weights, outlier_step
from .methods import OUTLIERS, Method, cached
from .session import Row, Session
from .trajectory import WATCHED, early_products, read_products

ENOUGH_IMAGES = 40
"""With fewer there are too few outliers to learn how to recognise them."""
_DENSER = 2
"""How many times as many steps are computed for outliers."""
Where = Literal["exact", "even", "loop"]
_TRIAL_SHARE = 0.4
"""Share of steps that plans compute when they are compared, unless a number is given."""


@dataclass(frozen=True)
class SchedulePlanner:
    """Plans schedules with fitted weights at every skipped step of each branch."""

    products: Products
    early: Mapping[str, Vector] | None = None
    """The products of the first steps of each image, if outliers are to get their own plan."""
    fewest = 2
    """Fewest computed steps of a plan."""
    fitted = "fitted"
    """How its weights are found, in the names of its methods."""

    def plan(self, computed: int) -> str:
        """The best mask with this many computed steps on average: `#` computed, `.` skipped. Outliers have another."""
        steps = len(self.products.sizes)
        if type(computed) is not int or not self.fewest <= computed <= steps:
            raise SettingError(f"{computed!r} computed steps; expected a number from {self.fewest} to {steps}.")
        exact = 1
        if self.early is not None:
            usual = int(computed / (1 + OUTLIER_SHARE * (_DENSER - 1)))  # Outliers take the difference.
            first = outlier_step(steps) + 1
            if usual >= 2 * first:
                computed, exact = usual, first
        begin = dict.fromkeys(self.products.branches, "#" * exact)
        found = fit_schedule(self.products, computed * len(begin), together=True, begin=begin)
        return next(iter(found.schedules.values()))

    def settings(self, mask: str) -> dict[str, Any]:
        """A cache's settings for a mask."""
        branches = self.products.branches
        plan = fit_weights(self.products, dict.fromkeys(branches, mask))
        settings = plan.settings()
        if self.early is not None:
            computed = min(_DENSER * mask.count("#"), len(mask))
            outliers = fit_outliers(self.products, plan, self.early, computed * len(branches))
            settings |= {} if outliers is None else {OUTLIERS: outliers}
        if len(branches) == 1:  # Then its name does not matter.
            for part in filter(None, (settings, settings.get(OUTLIERS))):
                (part["schedule"],) = part["schedule"].values()
        return settings

    def method(self, mask: str) -> Method:
        """A cache with this mask, named after it."""
        settings = self.settings(mask)
        name = f"schedule {mask} ({self.fitted}{', more for outliers' if OUTLIERS in settings else ''})"
        return cached("tea_cache", settings, name, family="samovar schedule")


@dataclass(frozen=True, kw_only=True)
class ClosedPlanner(SchedulePlanner):
    """Plans schedules with weights fitted along the cached run itself: what the model answers to a drift is in them.
    Outliers have their own plan where exact runs say which steps are computed."""

    loop: ClosedLoop
    where: Where
    """Steps are computed where exact runs say, at even distances, or where the cached run itself says."""
    fitted = "fitted in closed loop"

    def plan(self, computed: int) -> str:
        """A mask with this many computed steps; where the cached run says, it may have a few less."""
        if self.where == "exact":
            return super().plan(computed)
        return self.loop.seek(computed) if self.where == "loop" else even_mask(len(self.products.sizes), computed)

    def settings(self, mask: str) -> dict[str, Any]:
        """A cache's settings for a mask. How outliers are recognised follows from exact runs, as all images begin like
        these; the weights of their schedule are fitted on the way that it makes."""
        settings = settings_of(mask, self.loop.fit(mask))
        found = super().settings(mask).get(OUTLIERS) if self.early else None
        if found is not None:
            schedule = found["schedule"]
            more = schedule if isinstance(schedule, str) else next(iter(schedule.values()))
            weights = settings_of(more, self.loop.fit(more))["forecast_weights"]
            settings[OUTLIERS] = {**found, "schedule": more, "forecast_weights": weights}
        return settings


def choose_planner(
    session: Session, score: Callable[[Row], float], computed: int | None = None
) -> tuple[SchedulePlanner, dict[str, tuple[Method, Row]]]:
    """The planner whose plan for this number of computed steps scores highest; and the plans tried, by name."""
    session.exact(WATCHED)
    images = read_products(session.notes(WATCHED))
    products, early = Products.mean(images), early_products(images)
    loop = ClosedLoop(session)
    planners: list[SchedulePlanner] = [SchedulePlanner(products)]
    planners += [ClosedPlanner(products, loop=loop, where=where) for where in get_args(Where)]
    if early is not None and len(session.tasks) >= ENOUGH_IMAGES:
        planners += [SchedulePlanner(products, early), ClosedPlanner(products, early, loop=loop, where="exact")]
    count = max(computed or round(_TRIAL_SHARE * session.runner.steps), SchedulePlanner.fewest)
    methods = [planner.method(planner.plan(count)) for planner in planners]
    tried = {method.name: (method, session.measure(method)) for method in methods}
    scores = [score(tried[method.name][1]) for method in methods]
    return planners[scores.index(max(scores))], tried


def refine(mask: str, score: Callable[[str], float], attempts: int) -> str:
    """A mask with as many computed steps that scores higher, found by moving one of them by one step at a time."""
    best, tried = score(mask) if attempts else 0.0, {mask}
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
    """The masks with the computed step at this place moved to a skipped neighbour; the first step stays."""
    return [
        "".join({place: ".", other: "#"}.get(index, sign) for index, sign in enumerate(mask))
        for other in (place - 1, place + 1)
        if mask[place] == "#" and 0 < other < len(mask) and mask[other] == "."
    ]
