"""Targets are about single images, the search ends at the fastest that meets them, and held-out prompts judge."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lab.tiny import TASKS, MakeSession, row
from samovar.core.errors import SettingError
from samovar.lab.methods import plain, read_method
from samovar.lab.metrics import Quality
from samovar.lab.tasks import Task
from samovar.lab.tune import Target, Tuned, tune


def test_targets() -> None:
    target = Target("psnr", 30)
    assert target.is_met_by(Quality(30.0, 0, 1))
    assert not target.is_met_by(Quality(29.9, 1, 0))
    assert target.is_met(row([40, 41, 42, 43]))
    assert not target.is_met(row([28, 41, 55, 60])), "the mean is not the target"
    assert Target("lpips", 0.011).is_met(row([1, 2, 3]))
    assert not Target("lpips", 0.009).is_met(row([1, 2, 3]))
    assert row([1.0], computed=10).saving == 2.0
    assert Target("speedup", 2.0).is_met(row([1.0], computed=10)), "forwards are counted"
    assert not Target("speedup", 2.1).is_met(row([1.0], computed=10))
    assert str(target) == "PSNR of at least 30 dB"


def test_a_speedup_is_judged_on_held_out_prompts() -> None:
    chosen = row([40.0], computed=8)
    for computed, share in ((8, 1.0), (12, 0.0)):
        found = Tuned(Target("speedup", 2.0), chosen, row([40.0], computed=computed), chosen, [chosen])
        assert (found.share_met, found.is_met) == (share, share == 1.0)
        assert found.verdict == {8: "met, with 2.50 times fewer", 12: "missed, with 1.67 times fewer"}[computed]


def test_a_verdict_says_how_many_images_meet_a_quality() -> None:
    near, mixed = row([40.0] * 4), row([40.0, 20.0, 40.0, 40.0])
    verdicts = [Tuned(Target("psnr", 30), near, one, near, [near]).verdict for one in (near, mixed)]
    assert verdicts == ["met by 100.0% of these images", "met by 75.0% of these images, and 95% are asked for"]


@pytest.mark.parametrize(
    ("target", "value", "message"),
    [
        ("psnr", 0, "target_psnr=0; expected a number from 1.0 to 99.0"),
        ("lpips", 2.0, "target_lpips=2.0"),
        ("speedup", float("nan"), "target_speedup=nan"),
        ("speedup", 0.5, "target_speedup=0.5"),
        ("psnr", True, "target_psnr=True"),
        ("pnsr", 30, "'pnsr' cannot be a target.*'psnr'"),
    ],
)
def test_targets_that_make_no_sense_are_refused(target: Any, value: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Target(target, value)


TESTING = [Task("a horse", 100), Task("a tree", 101), Task("a hat", 102)]


def test_the_fastest_that_meets_a_target(make_session: MakeSession) -> None:
    tuning, testing = make_session(tasks=TASKS, batch=3), make_session(tasks=TESTING, batch=3, name="testing")
    # What is asked for lies between what few and many computed steps give on this random model.
    target = tuning.measure(read_method({"backend": "tea_cache", "schedule": "##.#.#.#.#"})).quality.psnr - 8
    found = tune(tuning, testing, Target("psnr", target))
    assert found.target.is_met(found.row)
    assert found.row.computed < 10
    faster = [tried for tried in found.tried if tried.computed < found.row.computed]
    assert not any(found.target.is_met(tried) for tried in faster)
    assert found.held_out.images != found.row.images, "other prompts"
    assert found.held_out.images == testing.measure(read_method(found.row.settings)).images
    assert found.share_met == sum(q.psnr >= target for q in found.held_out.images) / 3
    assert found.plain.steps == round(found.row.computed)
    saved = found.setting("a test", {"height": 16})
    assert saved["num_inference_steps"] == 10
    assert read_method(saved["cache"]).settings == found.row.settings
    report = found.to_dict()
    assert len(report["tried"]) == len(found.tried) >= 5
    assert any(tried["meets_target"] for tried in report["tried"])


def test_a_speedup_is_reached(make_session: MakeSession) -> None:
    tuning, testing = make_session(tasks=TASKS[:2]), make_session(tasks=TESTING[:1], name="testing")
    found = tune(tuning, testing, Target("speedup", 2.0))
    assert found.row.saving >= 2
    rivals = [tried for tried in found.tried if tried.saving >= 2]
    assert found.row.quality.psnr == max(tried.quality.psnr for tried in rivals)
    assert any(tried.family == "samovar schedule" for tried in found.tried)


def test_a_target_out_of_reach_is_reported(make_session: MakeSession) -> None:
    tuning, testing = make_session(tasks=TASKS[:1]), make_session(tasks=TESTING[:1], name="testing")
    with pytest.raises(
        SettingError, match=r"No setting that skips steps reaches a PSNR of at least 99 dB\. The best"
    ) as said:
        tune(tuning, testing, Target("psnr", 99.0))
    computed = re.search(r"with ([\d.]+) of 10 steps computed, and 95 of 100 images like these reach", str(said.value))
    assert computed is not None
    assert float(computed[1]) < 10, "what skips nothing is not the best that skips"
    assert "give more prompts" in str(said.value)


def test_a_target_that_so_few_images_cannot_show_is_refused() -> None:
    with pytest.raises(SettingError, match=r"44 images to tune with: 45 or more are .* 95% reach a PSNR of at least"):
        Target("psnr", 30).check_tasks([TASKS[0]] * 44)
    Target("psnr", 30).check_tasks([TASKS[0]] * 45)
    Target("speedup", 2.0).check_tasks(TASKS)


def test_a_saving_that_no_setting_has_is_refused_at_the_start(make_session: MakeSession) -> None:
    tuning, testing = make_session(tasks=TASKS[:1]), make_session(tasks=TESTING[:1], name="testing")
    with pytest.raises(SettingError, match=r"target_speedup=6 of 10 steps leaves fewer than 2 .* at most 5"):
        tune(tuning, testing, Target("speedup", 6.0))
    assert not len(tuning.journal), "and nothing is made"


def test_plain_steps_save_forwards_too(make_session: MakeSession) -> None:
    """Otherwise no plain steps would ever meet a speed-up, and a worse cache would be chosen."""
    found = make_session(tasks=TASKS[:1]).measure(plain(4))
    assert found.saving == 2.5
    assert Target("speedup", 2.5).is_met(found)


@pytest.mark.parametrize(("target", "value"), [("psnr", 30.0), ("lpips", 0.02), ("speedup", 2.0)])
def test_a_setting_that_plain_steps_beat_is_not_worth_it(target: Any, value: float) -> None:
    near, far = row([40, 41, 42], lpips=0.001), row([30, 31, 32])
    for held_out, plain_row, is_worth_it in ((near, far, True), (far, near, False)):
        found = Tuned(Target(target, value), held_out, held_out, plain_row, [held_out])
        assert found.is_worth_it is is_worth_it
        assert found.to_dict()["is_worth_it"] is is_worth_it


def test_prompts_are_kept_apart(make_session: MakeSession) -> None:
    with pytest.raises(SettingError, match="'a cat' is in both lists"):
        tune(make_session(), make_session(name="testing"), Target("psnr", 30))


def test_what_plain_steps_beat_is_never_chosen(make_session: MakeSession) -> None:
    """They are among what is tried. On a random model, which of both wins is not known beforehand."""
    tuning, testing = make_session(tasks=TASKS, batch=3), make_session(tasks=TESTING, batch=3, name="testing")
    for target in (Target("speedup", 2.0), Target("psnr", 20.0)):
        found = tune(tuning, testing, target)
        rows = {tried.method: tried for tried in found.tried}
        beside = rows[f"plain {round(found.row.computed)} steps"]
        assert target.score(found.row) >= target.score(beside) or beside.computed > found.row.computed
        assert any(name.startswith("auto") for name in rows)
        assert any(tried.family == "samovar schedule" for tried in found.tried)


def test_plain_steps_are_saved_as_no_cache() -> None:
    few = row([40.0], computed=8, method="plain 8 steps", family="plain steps", steps=8)
    found = Tuned(Target("psnr", 30), few, few, few, [few])
    assert not found.is_worth_it
    saved = found.setting("a test", {})
    assert saved["num_inference_steps"] == 8
    with pytest.raises(SettingError, match="means no cache"):
        read_method(saved["cache"])
