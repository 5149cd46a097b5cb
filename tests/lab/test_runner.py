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
from samovar.lab import Method, Runner, Task, cached, make_tasks, plain, read_prompts
from samovar.lab.methods import EXACT, quantised
from samovar.lab.runner import Made
from samovar.lab.tasks import check_disjoint

SCHEDULE = cached("tea_cache", {"schedule": "##.#.", "forecast_of": "output"})


def made(runner: Runner, method: Method = EXACT, tasks: list[Task] = TASKS[:1]) -> Made:
    with runner.under(method) as make:
        return make(tasks)


def test_images_are_the_bits_of_the_pipeline(
    make_runner: MakeRunner, pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFUSION_CACHE_BACKEND", "tea_cache")  # The environment's cache is not taken for exact.
    found = made(make_runner(steps=3))
    call = {**PARAMS, "negative_prompt": ["a dog"], "num_inference_steps": 3, "output_type": "pt"}
    alone = pipeline(prompt=["a cat"], generator=[torch.Generator().manual_seed(0)], **call).images
    assert torch.equal(found.images, alone.float())
    assert found.seconds > 0
    assert not found.report


def test_a_call_gives_the_images_that_each_would_be_alone(make_runner: MakeRunner) -> None:
    runner = make_runner(steps=5)
    for method in (EXACT, SCHEDULE):
        alone = torch.cat([made(runner, method, [task]).images for task in TASKS[:2]])
        together = made(runner, method, TASKS[:2])
        torch.testing.assert_close(together.images, alone, atol=2e-5, rtol=0)
    assert together.report == {"computed": 0.6}


def test_a_method_leaves_no_trace_when_an_image_fails(make_runner: MakeRunner, pipeline: Any) -> None:
    runner = make_runner(steps=5)
    made(runner)
    before = type(pipeline), set(vars(pipeline)), type(pipeline.transformer), set(vars(pipeline.transformer))
    for method in (plain(3), SCHEDULE, cached("auto", {})):
        with pytest.raises(IndexError):
            made(runner, method, [])
    assert before == (type(pipeline), set(vars(pipeline)), type(pipeline.transformer), set(vars(pipeline.transformer)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch=0; expected a whole number, 1 or more"),
        ({"params": OmniDiffusionSamplingParams(seed=3)}, "leave out seed"),
        ({"gpu_memry": "1GiB"}, "Did you mean 'gpu_memory'"),
    ],
)
def test_nonsense_is_refused_before_anything_is_loaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SamovarError, match=message):
        Runner(**settings)


def test_what_a_loaded_pipeline_cannot_do_is_a_wrong_setting(pipeline: Any) -> None:
    runner = Runner(params=OmniDiffusionSamplingParams(max_sequence_length=513), pipeline=pipeline)
    with pytest.raises(SettingError, match=r"FluxPipeline refuses these settings: .*512"):
        made(runner)
    with pytest.raises(SettingError, match="A loaded pipeline cannot be quantised"):
        made(runner, quantised("int8"))


# ------------------------------------------------------------------------------------------------ from a folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("model")
    tiny_flux_pipeline().save_pretrained(found)
    return str(found)


def test_images_and_counts_are_the_same_however_the_model_is_loaded(folder: str) -> None:
    params = OmniDiffusionSamplingParams(num_inference_steps=8, **PARAMS)
    methods = [EXACT, cached("auto", {}), cached("tea_cache", {"schedule": "##.#.#.#"})]
    layers_ahead = {"offload": {"mode": "layerwise", "precompute": True}}
    in_turns = {"offload": {"mode": "auto", "activations": 2**20}, "gpu_memory": 2**20 + 200 * 1024}
    expected: list[Made] = []
    for engine in ({}, layers_ahead, in_turns, {"compile": "eager"}):
        runner = Runner(folder, params, batch=2, device="cpu", **engine)  # type: ignore[arg-type]
        found = [made(runner, method, TASKS[:2]) for method in methods]
        runner.close()
        expected = expected or found
        assert [one.report for one in found] == [one.report for one in expected], engine
        assert all(torch.equal(a.images, b.images) for a, b in zip(found, expected, strict=True)), engine


@pytest.mark.parametrize("engine", [{}, {"offload": "layerwise"}], ids=["resident", "offload"])
def test_quantised_weights_come_off_again(folder: str, engine: dict[str, Any]) -> None:
    """Compared with the exact ones, or taken for the exact ones, they are the same model."""
    pytest.importorskip("torchao")
    params = OmniDiffusionSamplingParams(num_inference_steps=2, **PARAMS)
    runner = Runner(folder, params, device="cpu", **engine)
    exact, encoder, before = runner.pipeline.transformer, runner.pipeline.text_encoder, made(runner).images
    with runner.under(quantised({"transformer": "int8"})) as make:
        assert runner.pipeline.transformer is not exact
        assert runner.pipeline.text_encoder is encoder, "what stays exact is not loaded again"
        beside = make(TASKS[:1]).images
    assert runner.pipeline.transformer is exact
    with pytest.raises(SettingError, match="Did you mean 'transformer'"):
        made(runner, quantised({"transfomer": "int8"}))
    assert torch.equal(made(runner).images, before)
    loaded = Runner(folder, params, device="cpu", **engine, quantization={"transformer": "int8"})
    assert torch.equal(made(loaded).images, beside)
    assert not torch.equal(beside, before)
    with pytest.raises(SettingError, match=r"The model is quantised\."):
        made(loaded, quantised("int4"))


# ------------------------------------------------------------------------------------------------ tasks


def test_no_emoji_is_both_tuned_with_and_tested() -> None:
    tuning, testing = read_prompts("tuning"), read_prompts("testing")
    assert (len(set(tuning)), len(set(testing))) == (len(tuning), len(testing)) == (128, 96)
    assert not {p.split(",")[0] for p in tuning} & {p.split(",")[0] for p in testing}
    assert all(sum(p.endswith(f"{style} style") for p in testing) >= 24 for style in ("noto", "3d", "flat"))


def test_a_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("# mine\n a cat \n\na dog\n", encoding="utf-8-sig")
    assert read_prompts(str(file)) == ["a cat", "a dog"], "a mark of some editors is no part of a prompt"
    assert read_prompts(file, 1) == ["a cat"]
    for data, message in ((b"# nothing\n", "contains no prompts"), (b"caf\xe9\n", "is not UTF-8 text: .* Save it as")):
        file.write_bytes(data)
        with pytest.raises(SettingError, match=message):
            read_prompts(file)
    with pytest.raises(SettingError, match=r"'testin' is neither a file of prompts.*'testing'"):
        read_prompts("testin")
    for count in (0, 129, True):
        with pytest.raises(
            SettingError, match=f"'tuning': num_prompts={count!r}; expected a whole number from 1 to 128"
        ):
            read_prompts("tuning", count)


def test_seeds_are_never_shared_and_prompts_are_kept_apart() -> None:
    assert make_tasks(["a", "b"], 2, 7) == [Task("a", 7), Task("a", 8), Task("b", 9), Task("b", 10)]
    with pytest.raises(SettingError, match="seeds=0"):
        make_tasks(["a"], 0, 0)
    with pytest.raises(SettingError, match="'a' is in both lists"):
        check_disjoint([Task("a", 0)], [Task("b", 1), Task("a", 2)])
