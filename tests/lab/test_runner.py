"""Images are those of the pipeline, however the model is loaded, and what is on it comes off again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.tiny import PARAMS, TASKS, MakeRunner
from pipelines import tiny_flux_pipeline
from samovar.core.errors import SamovarError, SettingError
from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab.methods import EXACT, cached, plain, quantised
from samovar.lab.runner import Made, Runner
from samovar.lab.tasks import Task, check_disjoint, make_tasks, read_prompts

SCHEDULE = cached("tea_cache", {"schedule": "##.#.", "forecast_of": "output"})


def images(runner: Runner, method: Any = EXACT, tasks: list[Task] = TASKS[:1]) -> torch.Tensor:
    with runner.under(method) as make:
        return make(tasks).images


def test_images_are_the_bits_of_the_pipeline(make_runner: MakeRunner, pipeline: Any) -> None:
    with make_runner(steps=3).under(EXACT) as make:
        made = make(TASKS[:1])
    call = {**PARAMS, "negative_prompt": ["a dog"], "num_inference_steps": 3, "output_type": "pt"}
    alone = pipeline(prompt=["a cat"], generator=[torch.Generator().manual_seed(0)], **call).images
    assert torch.equal(made.images, alone.float())
    assert made.seconds > 0
    assert not made.report


def test_a_call_gives_the_images_that_each_would_be_alone(make_runner: MakeRunner) -> None:
    runner = make_runner(steps=5)
    for method in (EXACT, SCHEDULE):
        alone = torch.cat([images(runner, method, [task]) for task in TASKS[:2]])
        torch.testing.assert_close(images(runner, method, TASKS[:2]), alone, atol=2e-5, rtol=0)


def test_what_a_cache_computed_is_reported(make_runner: MakeRunner) -> None:
    with make_runner(steps=5).under(SCHEDULE) as make:
        report = make(TASKS[:2]).report
    assert report == {"computed": 0.6, "masks": {"transformer cond": "##.#.", "transformer uncond": "##.#."}}


def test_a_method_leaves_no_trace_when_an_image_fails(make_runner: MakeRunner, pipeline: Any) -> None:
    runner = make_runner(steps=5)
    images(runner)
    before = type(pipeline), set(vars(pipeline)), type(pipeline.transformer), set(vars(pipeline.transformer))
    for method in (plain(3), SCHEDULE, cached("auto", {})):
        images(runner, method)
        with pytest.raises(IndexError):
            images(runner, method, [])
    assert before == (type(pipeline), set(vars(pipeline)), type(pipeline.transformer), set(vars(pipeline.transformer)))


def test_a_cache_of_the_environment_is_not_taken_for_exact(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = images(make_runner())
    monkeypatch.setenv("DIFFUSION_CACHE_BACKEND", "tea_cache")
    assert torch.equal(images(make_runner()), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch=0"),
        ({"dtype": "float31"}, "'float32'"),
        ({"device": "cudo"}, "cudo"),
        ({"model": "emojis"}, "'emoji'"),
        ({"params": OmniDiffusionSamplingParams(seed=3)}, "leave out seed"),
        ({"gpu_memry": "1GiB"}, "Did you mean 'gpu_memory'"),
    ],
)
def test_nonsense_is_refused_before_anything_is_loaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SamovarError, match=message):
        Runner(**settings)


def test_what_the_pipeline_refuses_is_a_wrong_setting(pipeline: Any) -> None:
    runner = Runner(params=OmniDiffusionSamplingParams(max_sequence_length=513), pipeline=pipeline)
    with pytest.raises(SettingError, match=r"FluxPipeline refuses these settings: .*512"):
        images(runner)


# ------------------------------------------------------------------------------------------------ from a folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("model")
    tiny_flux_pipeline().save_pretrained(found)
    return str(found)


ENGINES: list[dict[str, Any]] = [
    {"offload": "layerwise"},
    {"offload": {"mode": "layerwise", "precompute": True}},
    {"gpu_memory": "46MiB"},
    {"compile": "eager"},
]


def test_images_and_counts_are_the_same_however_the_model_is_loaded(folder: str) -> None:
    params = OmniDiffusionSamplingParams(num_inference_steps=8, **PARAMS)
    methods = [EXACT, cached("auto", {}), cached("tea_cache", {"schedule": "##.#.#.#"})]
    expected: list[Made] = []
    for engine in ({}, *ENGINES):
        runner = Runner(folder, params, batch=2, device="cpu", **engine)
        found: list[Made] = []
        for method in methods:
            with runner.under(method) as make:
                found.append(make(TASKS[:2]))
        runner.close()
        expected = expected or found
        assert [made.report for made in found] == [made.report for made in expected], engine
        assert all(torch.equal(a.images, b.images) for a, b in zip(found, expected, strict=True)), engine


@pytest.mark.parametrize("engine", [{}, {"offload": "layerwise"}], ids=["resident", "offload"])
def test_quantised_weights_come_off_again(folder: str, engine: dict[str, Any]) -> None:
    """Compared with the exact ones, or taken for the exact ones, they are the same model."""
    pytest.importorskip("torchao")
    params = OmniDiffusionSamplingParams(num_inference_steps=2, **PARAMS)
    runner = Runner(folder, params, device="cpu", **engine)
    exact, encoder, before = runner.pipeline.transformer, runner.pipeline.text_encoder, images(runner)
    with runner.under(quantised({"transformer": "int8"})) as make:
        assert runner.pipeline.transformer is not exact
        assert runner.pipeline.text_encoder is encoder, "what stays exact is not loaded again"
        beside = make(TASKS[:1]).images
    assert runner.pipeline.transformer is exact
    with pytest.raises(SettingError, match="Did you mean 'transformer'"):
        images(runner, quantised({"transfomer": "int8"}))
    assert torch.equal(images(runner), before)
    loaded = Runner(folder, params, device="cpu", **engine, quantization={"transformer": "int8"})
    assert torch.equal(images(loaded), beside)
    assert not torch.equal(beside, before)
    with pytest.raises(SettingError, match=r"The model is quantised\."):
        images(loaded, quantised("int4"))


def test_a_loaded_pipeline_cannot_be_quantised(make_runner: MakeRunner) -> None:
    with pytest.raises(SettingError, match="A loaded pipeline cannot be quantised"):
        images(make_runner(), quantised("int8"))


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


def test_what_is_wrong_with_prompts_is_named(tmp_path: Path) -> None:
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


def test_seeds_are_never_shared_and_prompts_are_kept_apart() -> None:
    tasks = make_tasks(["a", "b"], 2, 7)
    assert tasks == [Task("a", 7), Task("a", 8), Task("b", 9), Task("b", 10)]
    with pytest.raises(SettingError, match="seeds=0"):
        make_tasks(["a"], 0, 0)
    with pytest.raises(SettingError, match="'a' is in both lists"):
        check_disjoint([Task("a", 0)], [Task("b", 1), Task("a", 2)])
