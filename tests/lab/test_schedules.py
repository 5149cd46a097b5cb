"""What lasts of an error is seen in pictures, and so is which schedule is better."""

from __future__ import annotations

import pytest

from lab.tiny import TASKS, MakeSession
from samovar.lab.planning import FAMILIES
from samovar.lab.schedules import PROBED_GAP, PROBES, between, choose_planner, probe, refine, scheduled
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


def test_values_between_known_ones() -> None:
    values = between({2: 1.0, 4: 4.0}, 7)
    assert values == pytest.approx([1, 1, 1, 2, 4, 4, 4])


def test_few_steps_are_not_probed(make_session: MakeSession) -> None:
    session = make_session(steps=8, tasks=TASKS[:1])
    watched = watched_exact()
    session.exact(watched)
    assert probe(session, Trajectory.read(session.notes(watched)), FAMILIES[0]) == [1.0] * 8


def test_what_lasts_is_what_is_seen_of_single_gaps(make_session: MakeSession) -> None:
    steps = PROBES + PROBED_GAP + 4
    session = make_session(steps=steps, tasks=TASKS[:1])
    watched = watched_exact()
    session.exact(watched)
    found = probe(session, Trajectory.read(session.notes(watched)), FAMILIES[0])
    assert len(found) == steps
    assert len(set(found)) > 2
    assert all(value > 0 for value in found)
    mask = "##" + "." * PROBED_GAP + "#" * (steps - 2 - PROBED_GAP)
    known = session.measure(scheduled({**FAMILIES[0].settings, "schedule": mask}))
    assert known.computed == steps - PROBED_GAP


def test_the_best_way_of_planning_is_the_one_with_the_best_pictures(make_session: MakeSession) -> None:
    session = make_session(steps=10, tasks=TASKS[:1])
    choice = choose_planner(session, computed=5)
    best = max((row for _, row in choice.tried), key=lambda row: row.quality.psnr)
    chosen = session.measure(scheduled(choice.planner.plan(5).settings))
    assert chosen.quality.psnr == best.quality.psnr
    assert {row.computed for _, row in choice.tried} == {5}
    assert any(row.settings["forecast"] == "fitted" for _, row in choice.tried)
