"""Pictures are those of the pipeline, and computed forwards are counted as they happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lab.tiny import PARAMS, TASKS, MakeRunner, MakeSession
from samovar.engine import OmniDiffusionSamplingParams
from samovar.errors import SamovarError, SettingError
from samovar.lab.image_runner import ImageRunner
from samovar.lab.methods import EXACT, cached
from samovar.lab.schedules import SchedulePlanner
from samovar.lab.trajectory import Trajectory, watched_exact


def test_images_are_the_bits_of_the_pipeline(make_runner: MakeRunner, pipeline: Any) -> None:
    runner = make_runner(steps=3)
    with runner.under(EXACT) as make:
        made = make(TASKS[:1])
    call = {**PARAMS, "negative_prompt": ["a dog"], "num_inference_steps": 3, "output_type": "pt"}
    alone = pipeline(prompt=["a cat"], generator=[torch.Generator().manual_seed(0)], **call).images
    assert torch.equal(made.images, alone.float())
    assert made.forwards == 6, "three steps of two branches"
    assert made.seconds > 0


def test_a_batch_gives_the_images_that_each_would_be_alone(make_runner: MakeRunner) -> None:
    runner = make_runner(steps=5)
    schedule = cached("tea_cache", {"schedule": "##.#.", "forecast": "linear", "forecast_of": "output"})
    for method in (EXACT, schedule):
        with runner.under(method) as make:
            together = make(TASKS[:2])
            alone = [make([task]) for task in TASKS[:2]]
        assert [one.forwards for one in alone] == [together.forwards] * 2
        torch.testing.assert_close(together.images, torch.cat([one.images for one in alone]), atol=2e-5, rtol=0)


def test_in_a_batch_with_outliers_each_image_is_what_it_would_be_alone(make_session: MakeSession) -> None:
    session = make_session(steps=12, batch=3)
    watched = watched_exact()
    session.exact(watched)
    seen = Trajectory.read(session.notes(watched))
    planner = SchedulePlanner(seen.products, seen.early)
    settings = planner.settings(planner.plan(8))
    settings["outliers"]["error"] *= 0.98  # It is just beyond all three images: now beyond the calm one alone.
    runner = session.runner
    with runner.under(cached("tea_cache", settings)) as make:
        together = make(TASKS)
        alone = [make([task]) for task in TASKS]
    assert sorted(one.forwards for one in alone) == [14, 24, 24]
    assert together.forwards == pytest.approx((14 + 24 + 24) / 3)
    torch.testing.assert_close(together.images, torch.cat([one.images for one in alone]), atol=2e-5, rtol=0)


def test_skipped_forwards_are_not_counted(make_runner: MakeRunner) -> None:
    runner = make_runner(steps=8)
    for settings in ({"schedule": "##.#.#.#"}, {"schedule": "##.#.#.#", "forecast_of": "output"}):
        with runner.under(cached("tea_cache", settings)) as make:
            made = make(TASKS[:2])
        assert made.forwards == 2 * 5
        assert made.notes == {"transformer cond": "##.#.#.#", "transformer uncond": "##.#.#.#"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch=0"),
        ({"dtype": "float31"}, "'float32'"),
        ({"device": "cudo"}, "cudo"),
        ({"model": "emojis"}, "'emoji'"),
        ({"params": OmniDiffusionSamplingParams(seed=3)}, "leave out seed"),
    ],
)
def test_nonsense_is_refused_before_anything_is_loaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SamovarError, match=message):
        ImageRunner(**settings)


def test_what_the_pipeline_refuses_is_a_wrong_setting(pipeline: Any) -> None:
    params = OmniDiffusionSamplingParams(max_sequence_length=513)
    runner = ImageRunner(params=params, pipeline=pipeline)
    with pytest.raises(SettingError, match=r"FluxPipeline refuses these settings: .*512"), runner.under(EXACT) as make:
        make(TASKS[:1])
