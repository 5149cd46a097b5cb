"""The planned schedule is the best there is, as far as its costs go, and forecasts are those of the cache."""

from __future__ import annotations

import itertools

import pytest
import torch

from lab.tiny import TASKS, MakeSession
from samovar.cache import TeaCacheConfig
from samovar.errors import SettingError
from samovar.lab.methods import ours
from samovar.lab.planning import FAMILIES, LONGEST_GAP, CurveFamily, Family, FittedPlanner, Planner
from samovar.lab.schedules import scheduled
from samovar.lab.trajectory import Trajectory, watched_exact

REUSE = CurveFamily("reuse", {"forecast": "reuse", "forecast_of": "output"})
LINEAR = CurveFamily("linear", {"forecast": "linear", "forecast_of": "output"})


def trajectory(steps: int, pictures: int = 3, seed: int = 0) -> Trajectory:
    torch.manual_seed(seed)
    predictions = torch.randn(pictures, steps, 11, dtype=torch.float64).cumsum(1)
    places = torch.rand(steps, dtype=torch.float64).cumsum(0).tolist()
    sizes = (torch.rand(steps, dtype=torch.float64) + 0.1).tolist()
    return Trajectory(tuple(places), tuple(sizes), predictions @ predictions.mT)


def cost_of(mask: str, found: Trajectory, family: Family, power: float) -> float:
    """By hand: for each gap, the size of the sum of its weighted errors."""
    total, computed = 0.0, [0]
    weights = torch.zeros(len(mask), dtype=torch.float64)
    for step in range(1, len(mask) + 1):
        if step == len(mask) or mask[step] == "#":
            total += found.errors(weights).pow(power).mean().item()
            weights = torch.zeros(len(mask), dtype=torch.float64)
            computed.append(step)
        else:
            known = computed[-family.depth :]
            weights += found.sizes[step] * family.weights(found.places, known, step)
            weights[step] -= found.sizes[step]
    return total


@pytest.mark.parametrize("family", [REUSE, LINEAR], ids=lambda family: family.name)
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_no_schedule_is_better(family: CurveFamily, power: float) -> None:
    found = trajectory(9)
    planner = Planner(found, family, power)
    for count in (2, 4, 5, 8):
        plan = planner.plan(count)
        masks = []
        for chosen in itertools.combinations(range(1, 9), count - 1):
            masks.append("".join("#" if step in (0, *chosen) else "." for step in range(9)))
        best = min(cost_of(mask, found, family, power) for mask in masks)
        assert plan.computed == count
        assert plan.cost == pytest.approx(best)
        assert cost_of(plan.mask, found, family, power) == pytest.approx(best)


def test_more_computed_steps_never_cost_more_and_all_cost_nothing() -> None:
    planner = Planner(trajectory(12), LINEAR)
    costs = [planner.plan(count).cost for count in range(planner.fewest, 13)]
    assert costs == sorted(costs, reverse=True)
    assert planner.plan(12).mask == "#" * 12
    assert costs[-1] == 0


def test_where_errors_last_more_is_computed() -> None:
    found = trajectory(16)
    late = Planner(found, LINEAR, lasting=[0.01] * 8 + [1.0] * 8).plan(9).mask
    early = Planner(found, LINEAR, lasting=[1.0] * 8 + [0.01] * 8).plan(9).mask
    assert late[8:].count("#") > 5 > late[:8].count("#")
    assert early[:8].count("#") > early[8:].count("#")


def test_gaps_are_bounded_and_wrong_counts_refused() -> None:
    planner = Planner(trajectory(30), REUSE)
    assert planner.fewest == 3
    assert "." * (LONGEST_GAP + 1) not in planner.plan(3).mask
    for count in (2, 31, 4.0):
        with pytest.raises(SettingError, match=f"{count!r} computed steps of 30; a number from 3 to 30"):
            planner.plan(count)  # type: ignore[arg-type]


def test_a_forecast_that_rests_on_more_is_refused() -> None:
    taylor = CurveFamily("taylor", {"forecast": "taylor", "forecast_order": 2})
    with pytest.raises(SettingError, match="'taylor' rests on 3 computed steps"):
        Planner(trajectory(8), taylor)


def test_forecasts_are_what_the_cache_does(make_session: MakeSession) -> None:
    """One skipped step changes what the scheduler is given by just what the family says."""
    session = make_session(steps=6, tasks=TASKS[:1])
    watched = watched_exact()
    session.exact(watched)
    exact = Trajectory.read(session.notes(watched))
    for family in (*FAMILIES, REUSE):
        predictions: list[torch.Tensor] = []
        scheduler = session.studio.pipeline.scheduler
        own = scheduler.step

        def step(model_output: torch.Tensor, *args: object, **kwargs: object) -> object:
            predictions.append(model_output.double())  # noqa: B023
            return own(model_output, *args, **kwargs)  # noqa: B023

        method = ours("tea_cache", {**family.settings, "schedule": "####.#"})
        with session.studio.under(method) as make:
            vars(scheduler)["step"] = step
            try:
                make(session.tasks)
            finally:
                del vars(scheduler)["step"]
        weights = family.weights(exact.places, [2, 3][-family.depth :], 4)
        forecast = sum(weight * prediction for weight, prediction in zip(weights, predictions, strict=True))
        torch.testing.assert_close(predictions[4], forecast, atol=1e-5, rtol=1e-4)


def test_fitted_weights_go_with_their_schedule(make_session: MakeSession) -> None:
    found = trajectory(12)
    planner = FittedPlanner(found.together)
    plan = planner.plan(6)
    assert plan.computed == 6
    assert plan.settings["forecast"] == "fitted"
    config = TeaCacheConfig.read(plan.settings)
    assert config.mask is not None
    assert planner.settings(plan.mask) == plan.settings, "a schedule from elsewhere has weights fitted to it"
    line = Planner(found, LINEAR).plan(6)
    fitted_to_line = TeaCacheConfig.read(planner.settings(line.mask))
    last = line.mask.rindex(".")
    row = fitted_to_line.weights_for("cond", last)
    assert row is not None
    assert all(line.mask[step] == "#" and step < last for step in row)
    session = make_session(steps=8, tasks=TASKS[:1])
    watched = watched_exact()
    session.exact(watched)
    seen = Trajectory.read(session.notes(watched))
    settings = FittedPlanner(seen.together).plan(5).settings
    made = session.measure(ours("tea_cache", settings))
    assert made.computed == 5
    assert set(made.notes.values()) == {settings["schedule"]}
    assert seen.by_branch is not None
    plan = FittedPlanner(seen.by_branch).plan(5)
    made = session.measure(scheduled(plan.settings))
    assert made.computed == plan.computed == 5
    assert " ".join(made.notes.values()) == plan.mask, "each branch goes by its own"
