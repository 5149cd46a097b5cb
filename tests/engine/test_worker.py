"""A worker on a tiny pipeline and on the built-in model: defaults, seeds, sizes, odd prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import tiny_flux_pipeline
from samovar import OmniDiffusionSamplingParams
from samovar.engine import EngineConfig, Worker
from samovar.errors import ModelError, SettingError
from samovar.hooks import HookRegistry

FAST = OmniDiffusionSamplingParams(num_inference_steps=1, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path)
    defaults = {"height": 16, "width": 32, "num_inference_steps": 2, "max_sequence_length": 8}
    (path / "samovar.json").write_text(json.dumps(defaults))
    return path


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Worker:
    return Worker(EngineConfig(str(folder), progress=False))


def pixels(image: Any) -> Any:
    return np.asarray(image)


def test_defaults_of_the_model_are_used_and_can_be_overridden(tiny: Worker) -> None:
    result = tiny.generate("a cat", OmniDiffusionSamplingParams(seed=4))
    assert result.images[0].size == (32, 16)
    assert result.params.num_inference_steps == 2
    assert result.seeds == (4,)
    assert tiny.generate("a cat", OmniDiffusionSamplingParams(width=16, seed=4)).images[0].size == (16, 16)


def test_a_seed_gives_the_same_picture_alone_and_among_others(tiny: Worker) -> None:
    several = tiny.generate("a cat", OmniDiffusionSamplingParams(seed=4, num_outputs_per_prompt=3))
    assert several.seeds == (4, 5, 6)
    alone = tiny.generate("a cat", OmniDiffusionSamplingParams(seed=5))
    assert np.array_equal(pixels(several.images[1]), pixels(alone.images[0]))
    assert not np.array_equal(pixels(several.images[0]), pixels(several.images[1]))


def test_without_a_seed_one_is_drawn_and_named(tiny: Worker) -> None:
    result = tiny.generate("a cat", OmniDiffusionSamplingParams(num_inference_steps=1))
    again = tiny.generate("a cat", OmniDiffusionSamplingParams(num_inference_steps=1, seed=result.seeds[0]))
    assert np.array_equal(pixels(result.images[0]), pixels(again.images[0]))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"height": 18}, "height must be a multiple of 4 for this model, not 18: try 16 or 20"),
        ({"width": 2}, "width must be a multiple of 4 for this model, not 2: try 4 or 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiny: Worker, params: dict[str, int], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        tiny.generate("a cat", OmniDiffusionSamplingParams(**params))


def test_a_setting_that_the_pipeline_does_not_take_is_refused(tiny: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unguided(type(tiny._pipeline)):  # type: ignore[misc]
        def __call__(self, prompt: str, generator: Any, height: int, width: int) -> Any:
            raise AssertionError("must be refused before")

    monkeypatch.setattr(tiny._pipeline, "__class__", Unguided)
    with pytest.raises(SettingError, match="Unguided takes no num_inference_steps"):
        tiny.generate("a cat", FAST)


def test_a_prompt_that_is_no_text_is_refused(tiny: Worker) -> None:
    with pytest.raises(SettingError, match="A prompt must be text, not 3"):
        tiny.generate(3, FAST)  # type: ignore[arg-type]


def test_a_long_prompt_is_cut_and_the_user_is_told(tiny: Worker) -> None:
    assert tiny.generate("a cat", FAST).notes == ()
    (note,) = tiny.generate("a " * 5000, FAST).notes
    assert note.endswith("tokens long, and the model read the first 8")


def test_what_the_pipeline_refuses_is_a_setting_error(tiny: Worker) -> None:
    with pytest.raises(SettingError, match=r"FluxPipeline refuses these settings: .*max_sequence_length"):
        tiny.generate("a cat", OmniDiffusionSamplingParams(max_sequence_length=1000))


def test_guidance_that_has_no_effect_is_noted(tiny: Worker) -> None:
    (note,) = tiny.generate("a cat", OmniDiffusionSamplingParams(guidance_scale=9.0, num_inference_steps=1)).notes
    assert note == "guidance_scale has no effect on this model, which is not distilled: use true_cfg_scale"


def test_a_class_that_diffusers_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoPipeline"}')
    with pytest.raises(ModelError, match=r"is of class 'NoPipeline', which diffusers .* does not have"):
        Worker(EngineConfig(str(tmp_path)))


CACHE = {"cache_backend": "tea_cache", "cache_config": {"schedule": "#.#.#"}}
OFFLOADED: list[dict[str, Any]] = [
    {"enable_cpu_offload": True},
    {"enable_layerwise_offload": True},
    {"gpu_memory": "3GiB"},
    {"enable_layerwise_offload": True, "gpu_memory": "3GiB"},
]


@pytest.mark.parametrize("cache", [{}, CACHE], ids=["bare", "cached"])
def test_offload_changes_no_bit(folder: Path, cache: dict[str, Any]) -> None:
    params = OmniDiffusionSamplingParams(num_inference_steps=5, seed=2)
    resident = Worker(EngineConfig(str(folder), progress=False, **cache)).generate("a cat", params)
    assert len(resident.cache) == len(cache) // 2
    for settings in OFFLOADED:
        worker = Worker(EngineConfig(str(folder), device="cpu", progress=False, **cache, **settings))
        assert worker._attached.offloaded is not None
        result = worker.generate("a cat", params)
        assert np.array_equal(pixels(result.images[0]), pixels(resident.images[0])), settings
        assert [stats.to_dict() for stats in result.cache] == [stats.to_dict() for stats in resident.cache]
        worker.close()


def test_a_closed_worker_leaves_a_bare_pipeline(folder: Path) -> None:
    worker = Worker(EngineConfig(str(folder), device="cpu", progress=False, enable_layerwise_offload=True, **CACHE))
    transformer = worker._pipeline.transformer
    assert len(HookRegistry.get_or_create(transformer)._hooks) > 0
    worker.close()
    assert all(len(HookRegistry.get_or_create(module)._hooks) == 0 for module in transformer.modules())
