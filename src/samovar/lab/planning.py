"""Which steps should be computed, if so many may be? Found by dynamic programming over measured errors.

A gap is a row of skipped steps. Its errors add up, each as large as the sampler's step, before the model sees them: so
what a gap costs is the size of their sum. It depends on the computed steps that its forecasts rest on, which are the
state of the search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..cache import TeaCacheConfig
from ..cache.fitting import Products, fit_schedule, fit_weights
from ..cache.forecast import History
from ..errors import SettingError
from .trajectory import Trajectory

LONGEST_GAP = 12
"""No more steps in a row are skipped than this."""


class Family(Protocol):
    """A kind of forecast: what a skipped step is made of."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a cache is told, besides the schedule."""

    @property
    def depth(self) -> int:
        """On how many computed steps a forecast rests."""

    def weights(self, places: Sequence[float], computed: Sequence[int], step: int) -> torch.Tensor:
        """What each step's prediction counts for in the forecast of a skipped one, given the computed steps before
        it, the last `depth` of them, oldest first."""


@dataclass(frozen=True)
class CurveFamily:
    """Forecasts along a curve through the last computed steps, as the cache itself makes them."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return TeaCacheConfig.read(self.settings).order + 1

    def weights(self, places: Sequence[float], computed: Sequence[int], step: int) -> torch.Tensor:
        config = TeaCacheConfig.read(self.settings)
        history = History(config.order, config.forecast_damping)
        units = torch.eye(len(places), dtype=torch.float64)
        for number in computed:
            history.push(places[number], [units[number]])
        forecast = history.forecast(places[step]).value(0)
        assert forecast is not None
        return forecast


def _linear(damping: float) -> CurveFamily:
    settings = {"forecast": "linear", "forecast_of": "output", "forecast_damping": damping}
    return CurveFamily(f"linear, damped {damping}", settings)


FAMILIES: tuple[Family, ...] = (_linear(0.9), _linear(1.0))
"""What schedules are planned for."""


@dataclass(frozen=True)
class SchedulePlan:
    """Which steps are computed, and what that is expected to cost."""

    mask: str
    """`#` computed, `.` skipped; one for each branch, with a space between them, where they differ."""
    family: str
    settings: Mapping[str, Any]
    """Of the cache, with the schedule."""
    cost: float
    """The summed errors of all gaps; only plans of one model and one power can be compared by it."""

    @property
    def computed(self) -> float:
        """How many steps, on average over branches."""
        return self.mask.count("#") / len(self.mask.split(" "))


class SchedulePlanner(Protocol):
    """A way of planning schedules for one model and number of steps."""

    @property
    def fewest(self) -> int:
        """Of computed steps, that it can plan with."""

    def plan(self, computed: int) -> SchedulePlan:
        """The best schedule with so many computed steps."""

    def settings(self, mask: str) -> dict[str, Any]:
        """What a cache is told to go by a schedule that came from elsewhere."""


class Planner:
    """The best schedules of one kind of forecast, for every number of computed steps."""

    def __init__(
        self, trajectory: Trajectory, family: Family, power: float = 1.0, lasting: Sequence[float] | None = None
    ) -> None:
        """`power`: what errors of gaps are raised to before they are summed; 2 if they had nothing to do with each
        other, 1 if they all pointed the same way. `lasting`: how much of an error at each step is left in the end."""
        if family.depth > 2:
            raise SettingError(
                f"{family.name!r} rests on {family.depth} computed steps; schedules are planned for forecasts that "
                "rest on two at most."
            )
        self._trajectory, self._family, self._power = trajectory, family, power
        self._lasting = torch.tensor(lasting or [1.0] * trajectory.steps, dtype=torch.float64)
        self._costs: dict[tuple[int, int], list[float]] = {}
        self._best: list[dict[tuple[int, int], tuple[float, tuple[int, int] | None]]] = []
        self._search()

    @property
    def fewest(self) -> int:
        return next(number for number in range(1, self._trajectory.steps + 1) if self._ends(number))

    def gap_cost(self, state: tuple[int, int], skipped: int) -> float:
        """What it costs to skip so many steps after the last two computed ones."""
        return self._gap_costs(state)[skipped]

    def plan(self, computed: int) -> SchedulePlan:
        steps = self._trajectory.steps
        if type(computed) is not int or not self.fewest <= computed <= steps:
            raise SettingError(
                f"{computed!r} computed steps of {steps}; a number from {self.fewest} to {steps} was expected, as at "
                f"most {LONGEST_GAP} are skipped in a row."
            )
        cost, state = min(self._ends(computed))
        chosen = []
        for number in range(computed - 1, -1, -1):
            chosen.append(state[1])
            before = self._best[number][state][1]
            if before is not None:
                state = before
        mask = "".join("#" if step in chosen else "." for step in range(steps))
        return SchedulePlan(mask, self._family.name, self.settings(mask), cost)

    def settings(self, mask: str) -> dict[str, Any]:
        return {**self._family.settings, "schedule": mask}

    def _ends(self, computed: int) -> list[tuple[float, tuple[int, int]]]:
        """The states in which a run of so many computed steps may end, with its cost."""
        steps = self._trajectory.steps
        found = []
        for state, (cost, _) in self._best[computed - 1].items():
            gaps = self._gap_costs(state)
            skipped = steps - 1 - state[1]
            if skipped < len(gaps):
                found.append((cost + gaps[skipped], state))
        return found

    def _search(self) -> None:
        steps = self._trajectory.steps
        first = (-1, 0)  # The last two computed steps; at the start there is one.
        layer: dict[tuple[int, int], tuple[float, tuple[int, int] | None]] = {first: (0.0, None)}
        for _ in range(steps):
            self._best.append(layer)
            following: dict[tuple[int, int], tuple[float, tuple[int, int] | None]] = {}
            for state, (cost, _before) in layer.items():
                for skipped, gap in enumerate(self._gap_costs(state)):
                    step = state[1] + skipped + 1
                    if step >= steps:
                        break
                    total, reached = cost + gap, (state[1], step)
                    if total < following.get(reached, (math.inf, None))[0]:
                        following[reached] = total, state
            layer = following

    def _gap_costs(self, state: tuple[int, int]) -> list[float]:
        """What it costs to skip 0, 1, 2 ... steps after a state."""
        if state not in self._costs:
            places, sizes = self._trajectory.places, self._trajectory.sizes
            known = [step for step in state if step >= 0][-self._family.depth :]
            last = min(state[1] + LONGEST_GAP, len(places) - 1)
            total = torch.zeros(len(places), dtype=torch.float64)
            sums = [total.clone()]
            for step in range(state[1] + 1, last + 1):
                total += sizes[step] * self._family.weights(places, known, step)
                total[step] -= sizes[step]
                sums.append(total.clone())
            errors = self._trajectory.errors(torch.stack(sums)) * self._lasting[state[1] : last + 1, None]
            self._costs[state] = errors.pow(self._power).mean(-1).tolist()
        return self._costs[state]


class FittedPlanner:
    """Schedules with weights of their own at every skipped step (`samovar.cache.fitting`), for all branches together
    or for each one."""

    fewest = 2

    def __init__(self, products: Products) -> None:
        self._products = products

    def plan(self, computed: int) -> SchedulePlan:
        found = fit_schedule(self._products, computed * len(self._products.branches))
        mask = " ".join(found.schedules.values())
        return SchedulePlan(mask, "fitted", self.settings(mask), found.drift)

    def settings(self, mask: str) -> dict[str, Any]:
        masks = dict(zip(self._products.branches, mask.split(" "), strict=True))
        settings = fit_weights(self._products, masks).settings()
        return settings if len(masks) > 1 else {**settings, "schedule": mask}
