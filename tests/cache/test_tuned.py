"""A tuned setting is refused on another model, before weights are loaded; another sampler is warned of."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import samovar
from pipelines import PIPELINES, tiny_flux_pipeline
from samovar.cache import CacheChoice
from samovar.cache.tuned import KEY, TunedFor, describe
from samovar.core.errors import SettingError
from samovar.engine import OmniDiffusionSamplingParams
from samovar.engine.models import load_pipeline

PARAMS: dict[str, Any] = {"height": 16, "width": 16, "max_sequence_length": 8}


def saved(folder: Path, pipeline: Any, **more: Any) -> str:
    """A setting as `samovar tune` saves it."""
    content = {"model": "mine", KEY: describe(pipeline), "cache": {"backend": "tea_cache", "schedule": "##.#"}}
    file = folder / "setting.json"
    file.write_text(json.dumps({**content, "num_inference_steps": 4, "true_cfg_scale": 2.0, **more}))
    return str(file)


def test_its_own_model_takes_it_however_it_is_loaded(tmp_path: Path) -> None:
    pipe = tiny_flux_pipeline()
    file = saved(tmp_path, pipe)
    pipe.save_pretrained(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for same in (pipe, tiny_flux_pipeline(seed=1), load_pipeline(tmp_path / "model", pipe.dtype)):
            with samovar.attach(same, cache_config=file) as attached:
                assert attached.config.cache == CacheChoice.read(file)
        with samovar.attach(pipe.transformer, cache=file) as attached:
            assert attached.config.cache == CacheChoice.read(file)


def test_another_model_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, tiny_flux_pipeline())
    stranger = PIPELINES["sd3"].build(0)
    with pytest.raises(
        SettingError,
        match=r"setting.json' was tuned for another model, 'mine': a FluxTransformer2DModel, not a SD3Transformer.*"
        r"Tune a setting for this one \(samovar tune\), or use cache='auto'",
    ):
        samovar.attach(stranger, cache=file)
    sibling = tiny_flux_pipeline()
    sibling.transformer.register_to_config(num_layers=7)
    with pytest.raises(SettingError, match=r"num_layers was \d, is 7"):
        samovar.attach(sibling, cache=file)


def test_a_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    file = saved(tmp_path, tiny_flux_pipeline())
    PIPELINES["sd3"].build(0).save_pretrained(tmp_path / "other")
    for weights in (tmp_path / "other").rglob("*.safetensors"):
        weights.unlink()
    with pytest.raises(SettingError, match="was tuned for another model"):
        samovar.Omni(str(tmp_path / "other"), cache_config=file, device="cpu")
    plain = saved(tmp_path, tiny_flux_pipeline(), cache={"backend": "none"})
    with pytest.raises(SettingError, match="was tuned for another model"):
        samovar.Omni(str(tmp_path / "other"), cache=plain, device="cpu")


def test_another_sampler_is_warned_of(tmp_path: Path) -> None:
    from diffusers import FlowMatchHeunDiscreteScheduler

    pipe = tiny_flux_pipeline()
    file = saved(tmp_path, pipe)
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    with pytest.warns(UserWarning, match=r"another sampler: a FlowMatchEuler.*, not a FlowMatchHeun"):
        samovar.attach(pipe, cache=file).detach()


def test_requests_take_what_it_was_tuned_with_and_are_told_of_anything_else(tmp_path: Path) -> None:
    pipe = tiny_flux_pipeline()
    file = saved(tmp_path, pipe, **PARAMS, negative_prompt="")
    pipe.save_pretrained(tmp_path / "model")
    with samovar.Omni(str(tmp_path / "model"), cache_config=file, device="cpu", progress=False) as omni:
        used = omni.generate("a cat", OmniDiffusionSamplingParams(seed=0))[0]
        assert used.params.given().items() >= {"num_inference_steps": 4, "true_cfg_scale": 2.0, **PARAMS}.items()
        assert not used.notes
        other = omni.generate("a cat", OmniDiffusionSamplingParams(seed=0, true_cfg_scale=4.0))[0]
        assert other.notes == ("the cache was tuned with true_cfg_scale=2.0; with 4.0, how near it stays is unknown",)
        exact = omni.generate("a cat", OmniDiffusionSamplingParams(seed=0, true_cfg_scale=4.0), exact=True)[0]
        assert not exact.notes


@pytest.mark.parametrize("said", [3, {}, {"denoisers": {"transformer": 3}}, {"denoisers": {}, "scheduler": 3}])
def test_what_nobody_wrote_is_refused(tmp_path: Path, said: Any) -> None:
    file = saved(tmp_path, tiny_flux_pipeline(), **{KEY: said})
    with pytest.raises(SettingError, match="expected what samovar tune writes"):
        TunedFor.read(file)
    assert TunedFor.read("auto") is None
