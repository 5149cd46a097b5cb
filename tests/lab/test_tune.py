"""Targets are about single images, the search ends at the fastest that meets them, and held-out prompts judge."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lab.tiny import TASKS, MakeSession, row
from samovar.core.errors import SettingError
from samovar.lab import Session, Task, plain
from samovar.lab.methods import read_method
from samovar.lab.metrics import Quality
from samovar.lab.tune import Target, Tuned, tune

TESTING = [Task("a horse", 100), Task("a tree", 101), Task("a hat", 102)]


def test_targets() -> None:
    target = Target("psnr", 30)
    assert [target.is_met_by(Quality(psnr, 1, 0)) for psnr in (30.0, 29.9)] == [True, False]
    assert target.is_met(row([40, 41, 42, 43]))
    assert not target.is_met(row([28, 41, 55, 60])), "the mean is not the target"
    assert [Target("lpips", value).is_met(row([1, 2, 3])) for value in (0.011, 0.009)] == [True, False]
    for few in (row([1.0], computed=10), row([1.0], computed=10, steps=10, family="plain steps")):
        assert [Target("speedup", value).is_met(few) for value in (2.0, 2.1)] == [True, False], "forwards are counted"
    assert str(target) == "PSNR of at least 30 dB"


@pytest.mark.parametrize(
    ("target", "value", "message"),
    [
        ("psnr", 0, "target_psnr=0; expected a number from 1 to 99"),
        ("speedup", float("nan"), "target_speedup=nan"),
        ("pnsr", 30, "'pnsr' cannot be a target.*'psnr'"),
    ],
)
def test_targets_that_make_no_sense_are_refused(target: Any, value: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Target(target, value)


@pytest.mark.parametrize(
    ("target", "held_out", "verdict", "is_met"),
    [
        (Target("speedup", 2.0), row([40.0], computed=8), "met, with 2.50 times fewer", True),
        (Target("speedup", 2.0), row([40.0], computed=12), "missed, with 1.67 times fewer", False),
        (Target("psnr", 30), row([40.0] * 4), "met by 100.0% of these images", True),
        (Target("psnr", 30), row([40.0, 20.0]), "met by 50.0% of these images, and 95% are asked for", False),
    ],
)
def test_held_out_prompts_judge(target: Target, held_out: Any, verdict: str, is_met: bool) -> None:
    found = Tuned(target, row([40.0], computed=8), held_out, held_out, [held_out])
    assert (found.verdict, found.is_met) == (verdict, is_met)


@pytest.mark.parametrize(("target", "value"), [("psnr", 30.0), ("lpips", 0.02), ("speedup", 2.0)])
def test_a_setting_that_plain_steps_beat_is_not_worth_it(target: Any, value: float) -> None:
    near, far = row([40, 41, 42], lpips=0.001), row([30, 31, 32])
    for held_out, plain_row, is_worth_it in ((near, far, True), (far, near, False)):
        found = Tuned(Target(target, value), held_out, held_out, plain_row, [held_out])
        assert (found.is_worth_it, found.to_dict()["is_worth_it"]) == (is_worth_it,) * 2


def test_plain_steps_are_saved_as_no_cache() -> None:
    few = row([40.0], computed=8, name="plain 8 steps", family="plain steps", steps=8)
    saved = Tuned(Target("psnr", 30), few, few, few, [few]).setting("a test", {})
    assert (saved["num_inference_steps"], saved["cache"]) == (8, {"backend": "none"})


def sessions(make_session: MakeSession, count: int) -> tuple[Session, Session]:
    return (make_session(tasks=TASKS[:count], batch=3), make_session(tasks=TESTING[:count], batch=3, name="testing"))


def test_the_fastest_that_meets_a_target(make_session: MakeSession) -> None:
    tuning, testing = sessions(make_session, 3)
    # What is asked for lies between what few and many computed steps give on this random model.
    target = tuning.measure(read_method({"backend": "tea_cache", "schedule": "##.#.#.#.#"})).quality.psnr - 8
    found = tune(tuning, testing, Target("psnr", target))
    assert found.target.is_met(found.row)
    faster = [tried for tried in found.tried if tried.computed < found.row.computed < 10]
    assert not any(found.target.is_met(tried) for tried in faster)
    assert found.held_out.images == testing.measure(read_method(found.row.method.settings)).images != found.row.images
    assert found.share_met == sum(q.psnr >= target for q in found.held_out.images) / 3
    assert found.plain.steps == round(found.row.computed)
    saved = found.setting("a test", {"height": 16})
    assert saved["num_inference_steps"] == 10
    assert read_method(saved["cache"]).settings == found.row.method.settings
    tried = found.to_dict()["tried"]
    assert len(tried) == len(found.tried) >= 5
    assert any(one["meets_target"] for one in tried)


def test_a_speedup_is_reached_by_what_is_nearest(make_session: MakeSession) -> None:
    """Plain steps are among what is tried: what they beat is never chosen."""
    found = tune(*sessions(make_session, 2), Target("speedup", 2.0))
    rivals = [tried for tried in found.tried if tried.saving >= 2]
    assert found.row.quality.psnr == max(tried.quality.psnr for tried in rivals)
    assert {tried.method.family for tried in found.tried} == {"samovar auto", "samovar schedule", "plain steps"}
    assert plain(round(found.row.computed)).name in [tried.method.name for tried in found.tried]


def test_a_target_out_of_reach_is_reported(make_session: MakeSession) -> None:
    with pytest.raises(SettingError, match=r"skips steps reaches a PSNR of at least 99 dB\. The best") as said:
        tune(*sessions(make_session, 1), Target("psnr", 99.0))
    computed = re.search(r"with ([\d.]+) of 10 steps computed, and 95 of 100 images like these reach", str(said.value))
    assert computed is not None
    assert float(computed[1]) < 10, "what skips nothing is not the best that skips"


def test_what_cannot_be_is_refused_before_anything_is_made(make_session: MakeSession) -> None:
    tuning, testing = sessions(make_session, 1)
    with pytest.raises(SettingError, match=r"44 images to tune with: 45 or more are .* 95% reach a PSNR of at least"):
        Target("psnr", 30).check_tasks([TASKS[0]] * 44)
    Target("psnr", 30).check_tasks([TASKS[0]] * 45)
    Target("speedup", 2.0).check_tasks(TASKS)
    with pytest.raises(SettingError, match=r"target_speedup=6 of 10 steps leaves fewer than 2 .* at most 5"):
        tune(tuning, testing, Target("speedup", 6.0))
    with pytest.raises(SettingError, match="'a cat' is in both lists"):
        tune(tuning, make_session(name="testing"), Target("psnr", 30))
    assert not len(tuning.journal)
