"""What guards and schedules say to a step before anybody looks at it."""

from __future__ import annotations

from typing import Any

import pytest

from samovar.cache import TeaCacheConfig
from samovar.cache.schedule import Step, Verdict, judge
from samovar.errors import SettingError

UNGUARDED: dict[str, Any] = {"last_steps": 0, "max_skips": None, "min_steps": 0}
ASK = Verdict("ask", "")


def verdict(settings: dict[str, Any], step: Step, skipped_in_a_row: int = 0) -> Verdict:
    """What one guard alone says."""
    return judge(TeaCacheConfig.read(UNGUARDED | settings), step, skipped_in_a_row)


def whole(number: int, total: int | None) -> Step:
    """A step of a run that goes through all of them."""
    return Step(number, total, total)


@pytest.mark.parametrize("total", [1, 10, None])
def test_without_guards_all_steps_but_the_first_are_left_to_the_signal(total: int | None) -> None:
    assert verdict({}, whole(0, total)) == Verdict("compute", "first_steps")
    for number in range(1, total or 20):
        assert verdict({}, whole(number, total), skipped_in_a_row=number) == ASK


@pytest.mark.parametrize(
    ("settings", "total", "computed"),
    [
        ({"first_steps": 3}, 10, {0, 1, 2}),
        ({"first_steps": 10}, 10, set(range(10))),
        ({"first_steps": 3}, None, {0, 1, 2}),
        ({"last_steps": 1}, 10, {0, 9}),
        ({"last_steps": 3}, 10, {0, 7, 8, 9}),
        ({"last_steps": 20}, 10, set(range(10))),
        ({"last_steps": 3}, None, {0}),
        ({"start": 0.25}, 8, {0, 1}),
        ({"start": 0.26}, 8, {0, 1, 2}),
        ({"end": 0.75}, 8, {0, 6, 7}),
        ({"end": 0.74}, 8, {0, 6, 7}),
        ({"end": 0.76}, 8, {0, 7}),
        ({"start": 0.25, "end": 0.75}, 8, {0, 1, 6, 7}),
        ({"start": 0.5, "end": 0.5}, 8, set(range(8))),
        ({"start": 1.0}, 8, set(range(8))),
        ({"end": 0.0}, 8, set(range(8))),
        ({"min_steps": 8}, 7, set(range(7))),
        ({"min_steps": 8}, 8, {0}),
        ({"min_steps": 8}, None, {0}),
    ],
)
def test_each_guard_alone(settings: dict[str, Any], total: int | None, computed: set[int]) -> None:
    reason = {"start": "window", "end": "window"}.get(name := next(iter(settings)), name)
    for number in range(total or 10):
        expected = Verdict("compute", reason) if number in computed else ASK
        found = verdict(settings, whole(number, total))
        assert found == expected or (number == 0 and found == Verdict("compute", "first_steps")), number


def test_at_most_so_many_skips_in_a_row() -> None:
    step = whole(5, 10)
    assert [verdict({"max_skips": 2}, step, skipped).action for skipped in range(4)] == ["ask", "ask"] + ["compute"] * 2
    assert verdict({"max_skips": 2}, step, 2).reason == "max_skips"
    assert verdict({"max_skips": None}, step, 1000) == ASK


def test_the_guards_that_are_on_by_default() -> None:
    """The mask of a run whose signal never moves."""

    def mask(total: int, **settings: Any) -> str:
        config, skipped, signs = TeaCacheConfig(**settings), 0, ""
        for number in range(total):
            is_computed = judge(config, whole(number, total), skipped).action == "compute"
            skipped = 0 if is_computed else skipped + 1
            signs += "#" if is_computed else "."
        return signs

    assert mask(7) == "#" * 7
    assert mask(8) == "#....#.#"
    assert mask(12) == "#....#....##"
    assert mask(12, max_skips=None, first_steps=2, last_steps=2) == "##........##"
    assert mask(12, rel_l1_thresh=0) == "#" * 12


def test_a_run_that_starts_half_way_has_first_steps_too() -> None:
    """Image to image: the scheduler has ten steps, and the run takes the last six of them."""
    computed = [number for number in range(4, 10) if verdict({"first_steps": 2}, Step(number, 10, 6)) != ASK]
    assert computed == [4, 5]


def test_the_length_of_the_run_and_not_of_the_scheduler_is_what_may_be_too_short() -> None:
    assert verdict({"min_steps": 8}, Step(15, 20, 7)) == Verdict("compute", "min_steps")
    assert verdict({"min_steps": 8}, Step(15, 20, 8)) == ASK


def test_settings_that_never_skip_come_first() -> None:
    for settings in ({"rel_l1_thresh": 0}, {"schedule": "#" * 10}):
        assert [verdict(settings, whole(n, 10)) for n in range(10)] == [Verdict("compute", "settings")] * 10


# ------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("total", [4, None])
def test_a_schedule_is_followed_whatever_the_guards_say(total: int | None) -> None:
    config = TeaCacheConfig(schedule="#..#", max_skips=1, min_steps=8, last_steps=2, first_steps=3, end=0.0)
    found = [judge(config, whole(number, total), skipped_in_a_row=3) for number in range(4)]
    assert found == [Verdict(action, "schedule") for action in ("compute", "skip", "skip", "compute")]


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (whole(0, 3), "for 4 steps, and this run has 3 steps"),
        (whole(0, 5), "for 4 steps, and this run has 5 steps"),
        (whole(3, 5), "for 4 steps, and this run has 5 steps"),
        (whole(4, None), "for 4 steps, and this run has a step number 5"),
        (whole(4, 4), "for 4 steps"),
    ],
)
def test_a_schedule_of_another_length_is_refused(step: Step, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        judge(TeaCacheConfig(schedule="#..#"), step, 0)


def test_a_schedule_of_another_length_is_refused_even_if_it_skips_nothing() -> None:
    with pytest.raises(SettingError, match="for 4 steps, and this run has 5 steps"):
        judge(TeaCacheConfig(schedule="####"), whole(0, 5), 0)


def test_each_branch_has_its_own_schedule() -> None:
    config = TeaCacheConfig(schedule={"cond": "#.#.", "uncond": "##.."})
    found = {
        branch: "".join("#" if judge(config, whole(n, 4), 0, branch).action == "compute" else "." for n in range(4))
        for branch in ("cond", "uncond", "other", None)
    }
    assert found == {"cond": "#.#.", "uncond": "##..", "other": "####", None: "####"}
    assert judge(config, whole(1, 4), 0, "other") == Verdict("compute", "no schedule for this branch")
    others = TeaCacheConfig(schedule={"cond": "#.#.", "*": "#..."})
    assert [judge(others, whole(2, 4), 0, branch).action for branch in ("cond", "other")] == ["compute", "skip"]


def test_a_branchs_schedule_of_another_length_is_refused() -> None:
    with pytest.raises(SettingError, match="schedule is for 4 steps, and this run has 5 steps"):
        judge(TeaCacheConfig(schedule={"*": "#..#"}), whole(0, 5), 0, "cond")
