"""Plans are what the cache does, and which is better is seen in images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.tiny import TASKS, MakeSession
from samovar.cache import TeaCacheConfig
from samovar.core.errors import SettingError
from samovar.lab import schedules
from samovar.lab.closed_loop import ClosedLoop, settings_of
from samovar.lab.fitting import Products, Vector
from samovar.lab.methods import cached
from samovar.lab.schedules import ClosedPlanner, SchedulePlanner, choose_planner, refine
from samovar.lab.session import Session
from samovar.lab.trajectory import WATCHED, early_products, read_products


def test_refining_moves_computed_steps_to_where_they_help() -> None:
    wanted = "#..#.#..#."
    tried = []

    def score(mask: str) -> float:
        tried.append(mask)
        return -sum(abs(a - b) for a, b in zip(places(mask), places(wanted), strict=True))

    assert refine("##.#.#....", score, attempts=200) == wanted
    assert len(set(tried)) == len(tried), "nothing is tried twice"
    assert all(mask[0] == "#" and mask.count("#") == 4 for mask in tried)
    assert refine("##.#.#....", score, attempts=0) == "##.#.#...."


def places(mask: str) -> list[int]:
    return [step for step, sign in enumerate(mask) if sign == "#"]


def watched_run(session: Session) -> tuple[Products, dict[str, Vector] | None]:
    session.exact(WATCHED)
    images = read_products(session.notes(WATCHED))
    return Products.mean(images), early_products(images)


def test_plans_are_what_the_cache_does(make_session: MakeSession) -> None:
    session = make_session(steps=8, tasks=TASKS[:1])
    products, _ = watched_run(session)
    planner = SchedulePlanner(products.mixed())
    mask = planner.plan(5)
    settings = planner.settings(mask)
    made = session.measure(cached("tea_cache", settings))
    assert settings["forecast"] == "fitted"
    assert made.computed == mask.count("#") == 5
    assert set(made.notes.values()) == {mask}
    planner = SchedulePlanner(products)
    made = session.measure(planner.method(planner.plan(5)))
    assert made.computed == 5
    assert set(made.notes.values()) == {planner.plan(5)}
    row = TeaCacheConfig.read(planner.settings("####.###")).weights_for("uncond", 4)
    assert row is not None
    assert set(row) <= {0, 1, 2, 3}, "a schedule from elsewhere gets weights fitted to it"


def test_branches_go_together_each_with_its_own_weights(make_session: MakeSession) -> None:
    products, _ = watched_run(make_session(steps=12, tasks=TASKS[:1]))
    planner = SchedulePlanner(products)
    mask = planner.plan(7)
    assert mask.count("#") == 7
    settings = planner.settings(mask)
    assert settings["schedule"] == {"cond": mask, "uncond": mask}
    weights = settings["forecast_weights"]
    assert weights["cond"] != weights["uncond"]


def test_outliers_have_a_plan_that_the_others_pay_for(make_session: MakeSession) -> None:
    products, early = watched_run(make_session(steps=12))
    assert early is not None
    assert {name: rows.shape for name, rows in early.items()} == {"cond": (3, 3, 3), "uncond": (3, 3, 3)}
    planner = SchedulePlanner(products, early)
    mask = planner.plan(8)
    settings = planner.settings(planner.plan(8))
    more = settings["outliers"]["schedule"]["cond"]
    assert (mask.count("#"), more.count("#")) == (7, 12), "at most all"
    assert mask.startswith("###")
    assert planner.method(mask).name.endswith("(fitted, more for outliers)")
    few = planner.plan(5)
    assert few == SchedulePlanner(products).plan(5), "of so few none can be spared"
    assert TeaCacheConfig.read(settings).outlier_plan is not None


def test_outliers_are_fitted_in_closed_loop_too(make_session: MakeSession) -> None:
    session = make_session(steps=16, batch=1, tasks=TASKS[:2])
    products, early = watched_run(session)
    loop = ClosedLoop(session)
    planner = ClosedPlanner(products, early, loop=loop, where="exact")
    mask = planner.plan(8)
    settings = planner.settings(mask)
    more = settings["outliers"]["schedule"]
    assert (mask.count("#"), more.count("#")) == (7, 14)
    assert settings["forecast_weights"] == settings_of(mask, loop.fit(mask))["forecast_weights"]
    assert settings["outliers"]["forecast_weights"] == settings_of(more, loop.fit(more))["forecast_weights"]
    rows = [
        session.measure(cached("tea_cache", {**settings, "outliers": {**settings["outliers"], "error": error}}))
        for error in (1e9, 0.0)
    ]
    assert [row.computed for row in rows] == [7, 14]
    assert rows[1].closeness > rows[0].closeness


def test_a_single_branch_goes_by_any_name() -> None:
    rows = np.random.default_rng(0).normal(size=(12, 40))
    products = Products(("only",), (1.0,), (1.0,) * 12, rows @ rows.T)
    planner = SchedulePlanner(products, {"only": (rows @ rows.T)[None, :3, :3]})
    config = TeaCacheConfig.read(planner.settings(planner.plan(8)))
    assert list(config.masks) == ["*"]
    assert config.outlier_plan is not None
    assert config.outlier_plan.mask_for("another") == config.outlier_plan.schedule


@pytest.mark.parametrize("count", [1, 13, 4.0, True])
def test_a_number_of_steps_that_cannot_be_is_refused(make_session: MakeSession, count: Any) -> None:
    products = Products(("*",), (1.0,), (1.0,) * 12, np.eye(12))
    with pytest.raises(SettingError, match=f"{count!r} computed steps; expected a number from 2 to 12"):
        SchedulePlanner(products).plan(count)


def test_the_best_way_of_planning_is_the_one_with_the_best_images(
    make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "ENOUGH_IMAGES", 1)
    session = make_session(steps=12)
    best, tried = choose_planner(session, lambda row: row.closeness, computed=8)
    chosen = session.measure(best.method(best.plan(8)))
    assert chosen.closeness == max(row.closeness for _, row in tried.values())
    worst, _ = choose_planner(session, lambda row: -row.closeness, computed=8)
    assert session.measure(worst.method(worst.plan(8))).closeness == min(row.closeness for _, row in tried.values())
    closed = [name for name in tried if "closed loop" in name]
    assert len(tried) - len(closed) == 2, "fitted to exact runs, without and with more for outliers"
    assert 2 < len(closed) <= 4, "two ways to find a schedule may find the same"
    assert sum("closed loop, more for outliers" in name for name in closed) == 1
    assert type(worst) is not type(best) or worst != best


def test_few_images_do_not_show_outliers(make_session: MakeSession) -> None:
    planner, tried = choose_planner(make_session(steps=12), lambda row: row.closeness, computed=8)
    assert getattr(planner, "early", None) is None
    assert sum("closed loop" not in name for name in tried) == 1
