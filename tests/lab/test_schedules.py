"""Plans are what the cache does, and which is better is seen in pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.tiny import TASKS, MakeSession
from samovar.cache import TeaCacheConfig
from samovar.errors import SettingError
from samovar.lab import schedules
from samovar.lab.fitting import Products
from samovar.lab.methods import ours
from samovar.lab.schedules import SchedulePlanner, choose_planner, refine
from samovar.lab.session import Session
from samovar.lab.trajectory import Trajectory, watched_exact


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


def test_the_first_step_of_no_branch_is_moved() -> None:
    tried: list[str] = []
    refine("#.#. #.#.", lambda mask: tried.append(mask) or 0.0, attempts=50)  # type: ignore[func-returns-value]
    assert len(tried) == 5
    assert all(part[0] == "#" and part.count("#") == 2 for mask in tried for part in mask.split(" "))


def watched_run(session: Session) -> Trajectory:
    watched = watched_exact()
    session.exact(watched)
    return Trajectory.read(session.notes(watched))


def test_plans_are_what_the_cache_does(make_session: MakeSession) -> None:
    session = make_session(steps=8, tasks=TASKS[:1])
    seen = watched_run(session)
    planner = SchedulePlanner(seen.together)
    mask = planner.plan(5)
    settings = planner.settings(mask)
    made = session.measure(ours("tea_cache", settings))
    assert settings["forecast"] == "fitted"
    assert made.computed == mask.count("#") == 5
    assert set(made.notes.values()) == {mask}
    assert seen.by_branch is not None
    planner = SchedulePlanner(seen.by_branch)
    made = session.measure(planner.method(5))
    assert made.computed == 5
    assert " ".join(made.notes.values()) == planner.plan(5)
    row = TeaCacheConfig.read(planner.settings("#.#.#.## ####.###")).weights_for("uncond", 4)
    assert row is not None
    assert set(row) <= {0, 1, 2, 3}, "a schedule from elsewhere has weights fitted to it"


def test_branches_go_together_each_with_its_own_weights(make_session: MakeSession) -> None:
    seen = watched_run(make_session(steps=12, tasks=TASKS[:1]))
    assert seen.by_branch is not None
    planner = SchedulePlanner(seen.by_branch)
    one, other = planner.plan(7).split(" ")
    assert one == other
    assert one.count("#") == 7
    weights = planner.settings(f"{one} {other}")["forecast_weights"]
    assert weights["cond"] != weights["uncond"]


def test_hard_pictures_have_a_plan_that_the_others_pay_for(make_session: MakeSession) -> None:
    seen = watched_run(make_session(steps=12))
    assert seen.by_branch is not None
    assert seen.early is not None
    assert {name: rows.shape for name, rows in seen.early.items()} == {"cond": (3, 3, 3), "uncond": (3, 3, 3)}
    planner = SchedulePlanner(seen.by_branch, seen.early)
    mask, _ = planner.plan(8).split(" ")
    settings = planner.settings(planner.plan(8))
    more = settings["outliers"]["schedule"]["cond"]
    assert (mask.count("#"), more.count("#")) == (7, 12), "at most all"
    assert mask.startswith("###")
    assert (str(SchedulePlanner(seen.by_branch)), str(planner)) == ("fitted", "fitted, more for hard pictures")
    few = planner.plan(5)
    assert few == SchedulePlanner(seen.by_branch).plan(5), "of so few none can be spared"
    assert TeaCacheConfig.read(settings).outlier_plan is not None


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
    with pytest.raises(SettingError, match=f"{count!r} computed steps; a number from 2 to 12 was expected"):
        SchedulePlanner(products).plan(count)


def test_the_best_way_of_planning_is_the_one_with_the_best_pictures(
    make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "ENOUGH", 1)
    session = make_session(steps=12)
    choice = choose_planner(session, lambda row: row.nearness, computed=8)
    chosen = session.measure(choice.planner.method(8))
    assert chosen.nearness == max(row.nearness for _, row in choice.tried)
    worst = choose_planner(session, lambda row: -row.nearness, computed=8)
    assert session.measure(worst.planner.method(8)).nearness == min(row.nearness for _, row in choice.tried)
    assert len(choice.tried) == 2
    assert (worst.planner.early is None) != (choice.planner.early is None)


def test_few_pictures_do_not_tell_which_are_hard(make_session: MakeSession) -> None:
    choice = choose_planner(make_session(steps=12), lambda row: row.nearness, computed=8)
    assert choice.planner.early is None
    assert len(choice.tried) == 1
