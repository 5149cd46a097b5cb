"""Pictures are those of the pipeline, and computed forwards are counted as they happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.tiny import PARAMS, TASKS, MakeRunner, MakeSession
from pipelines import tiny_flux_pipeline
from samovar.core.errors import SamovarError, SettingError
from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab.fitting import Products
from samovar.lab.image_runner import Batch, ImageRunner, Task, check_disjoint, make_tasks, read_prompts
from samovar.lab.methods import EXACT, cached, quantised
from samovar.lab.schedules import SchedulePlanner
from samovar.lab.trajectory import WATCHED, early_products, read_products


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
    session.exact(WATCHED)
    images = read_products(session.notes(WATCHED))
    planner = SchedulePlanner(Products.mean(images), early_products(images))
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


# ------------------------------------------------------------------------------------------------ tasks


def test_no_emoji_is_both_tuned_with_and_tested() -> None:
    tuning, testing = read_prompts("tuning"), read_prompts("testing")
    assert len(tuning) == len(set(tuning)) == 128
    assert len(testing) == len(set(testing)) == 96
    assert not {p.split(",")[0] for p in tuning} & {p.split(",")[0] for p in testing}
    for style in ("noto", "3d", "flat"):
        assert sum(p.endswith(f"{style} style") for p in testing) >= 24


def test_a_file_has_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("# mine\n a cat \n\na dog\n")
    assert read_prompts(str(file)) == ["a cat", "a dog"]
    assert read_prompts(file, 1) == ["a cat"]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"'testin' is neither a file of prompts.*'testing'"):
        read_prompts("testin")
    empty = tmp_path / "empty.txt"
    empty.write_text("# nothing\n")
    with pytest.raises(SettingError, match="contains no prompts"):
        read_prompts(empty)
    (tmp_path / "latin.txt").write_bytes("caf\u00e9\n".encode("latin-1"))
    with pytest.raises(SettingError, match=r"latin.txt' is not UTF-8 text: .* Save it as UTF-8"):
        read_prompts(tmp_path / "latin.txt")
    (tmp_path / "marked.txt").write_text("a cat\n", encoding="utf-8-sig")
    assert read_prompts(tmp_path / "marked.txt") == ["a cat"], "a mark of some editors is no part of a prompt"
    for count in (0, 129, True):
        with pytest.raises(SettingError, match=f"{count!r} prompts were asked for, but 'tuning' has 128"):
            read_prompts("tuning", count)


def test_seeds_are_never_shared() -> None:
    tasks = make_tasks(["a", "b"], 2, 7)
    assert tasks == [Task("a", 7), Task("a", 8), Task("b", 9), Task("b", 10)]
    with pytest.raises(SettingError, match="seeds=0"):
        make_tasks(["a"], 0, 0)


def test_prompts_for_tuning_and_testing_are_kept_apart() -> None:
    with pytest.raises(SettingError, match="'a' is in both lists"):
        check_disjoint([Task("a", 0)], [Task("b", 1), Task("a", 2)])


def test_quantised_components_come_off_again(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    tiny_flux_pipeline().save_pretrained(tmp_path)
    params = OmniDiffusionSamplingParams(num_inference_steps=2, **PARAMS)
    runner = ImageRunner(str(tmp_path), params, batch=2)
    exact, before = runner.pipeline.transformer, runner.pipeline.text_encoder
    with runner.under(EXACT) as make:
        expected = make(TASKS[:2]).images
    with runner.under(quantised({"transformer": "int8"})) as make:
        assert runner.pipeline.transformer is not exact
        assert runner.pipeline.text_encoder is before, "what stays exact is not loaded again"
        made = make(TASKS[:2])
    assert made.forwards == 4, "two steps of two branches are counted on the quantised denoiser too"
    assert not torch.equal(made.images, expected)
    assert runner.pipeline.transformer is exact
    with runner.under(EXACT) as make:
        assert torch.equal(make(TASKS[:2]).images, expected)


def test_a_loaded_pipeline_cannot_be_quantised(make_runner: MakeRunner) -> None:
    pytest.importorskip("torchao")
    with (
        pytest.raises(SettingError, match="A loaded pipeline cannot be quantised"),
        make_runner().under(quantised("int8")),
    ):
        pass


ENGINES: list[dict[str, Any]] = [
    {"offload": "layerwise"},
    {"offload": {"mode": "layerwise", "precompute": True}},
    {"gpu_memory": "46MiB"},
    {"compile": "eager"},
]


def test_images_and_counts_are_the_same_however_the_model_is_loaded(tmp_path: Path) -> None:
    tiny_flux_pipeline().save_pretrained(tmp_path)
    params = OmniDiffusionSamplingParams(num_inference_steps=8, **PARAMS)
    methods = [EXACT, cached("auto", {}), cached("tea_cache", {"schedule": "##.#.#.#"})]
    expected: list[Batch] = []
    for engine in ({}, *ENGINES):
        runner = ImageRunner(str(tmp_path), params, batch=2, device="cpu", **engine)
        found: list[Batch] = []
        for method in methods:
            with runner.under(method) as make:
                found.append(make(TASKS[:2]))
        runner.close()
        expected = expected or found
        assert [made.forwards for made in found] == [made.forwards for made in expected], engine
        assert all(torch.equal(a.images, b.images) for a, b in zip(found, expected, strict=True)), engine
    assert [made.forwards for made in expected][::2] == [16, 10]


def test_quantised_weights_under_offload(tmp_path: Path) -> None:
    """Compared with the exact ones, or taken for the exact ones, they are the same model."""
    pytest.importorskip("torchao")
    tiny_flux_pipeline().save_pretrained(tmp_path)
    params = OmniDiffusionSamplingParams(num_inference_steps=2, **PARAMS)
    exact = ImageRunner(str(tmp_path), params, device="cpu", offload="layerwise")
    with exact.under(EXACT) as make:
        before = make(TASKS[:1])
    with exact.under(quantised("int8")) as make:
        beside = make(TASKS[:1])
    with exact.under(EXACT) as make:
        assert torch.equal(make(TASKS[:1]).images, before.images)
    loaded = ImageRunner(str(tmp_path), params, device="cpu", offload="layerwise", quantization="int8")
    with loaded.under(EXACT) as make:
        assert torch.equal(make(TASKS[:1]).images, beside.images)
    assert not torch.equal(beside.images, before.images)
    with pytest.raises(SettingError, match=r"The model is quantised\."), loaded.under(quantised("int4")):
        pass
    with (
        pytest.raises(SettingError, match="Did you mean 'transformer'"),
        exact.under(quantised({"transfomer": "int8"})),
    ):
        pass
    with exact.under(EXACT) as make:
        assert torch.equal(make(TASKS[:1]).images, before.images)


def test_a_cache_of_the_environment_is_not_taken_for_exact(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFUSION_CACHE_BACKEND", "tea_cache")
    with make_runner(steps=10).under(EXACT) as make:
        assert make(TASKS[:1]).forwards == 20


def test_settings_of_the_engine_are_refused_by_name() -> None:
    with pytest.raises(SettingError, match="Did you mean 'gpu_memory'"):
        ImageRunner(gpu_memry="1GiB")
