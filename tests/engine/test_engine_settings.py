"""Settings of the engine: each is checked before any weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar.core.errors import ModelError, SamovarError, SettingError
from samovar.engine import OmniDiffusionConfig
from samovar.engine.models import find_model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """What looks like a model as long as nobody loads it."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    return str(tmp_path)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat61"}, r"dtype='bfloat61'; expected one of .* Did you mean 'bfloat16'\?"),
        ({"device": "foo"}, "device='foo' is not a device"),
        ({"cache_backend": "tee_cache"}, r"Did you mean 'tea_cache'\?"),
        ({"cache": {"backend": "none", "rel_l1_thresh": 1}}, "for the cache 'none'"),
        ({"cach": "tea_cache"}, r"'cach' is not a setting of OmniDiffusionConfig. Did you mean 'cache'\?"),
        ({"enable_cpu_offload": True, "enable_layerwise_offload": True}, "exclude each other"),
        ({"gpu_memory": "a lot"}, "gpu_memory"),
        ({"ulysses_degree": 0}, "ulysses_degree"),
        ({"ring_degree": "2"}, "ring_degree"),
        ({"cfg_parallel_size": -1}, "cfg_parallel_size"),
        ({"cfg_parallel_size": 2, "device": "cpu:0"}, "device='cpu:0' names one device, and 2 ranks need one each"),
    ],
)
def test_a_bad_setting_is_refused(folder: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SamovarError, match=message):
        OmniDiffusionConfig(folder, **settings)


def test_what_is_not_a_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'emojy' is not a built-in model.*Did you mean 'emoji'\?"):
        OmniDiffusionConfig("emojy")
    assert find_model("emoji") is not None


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SettingError, match="device='cuda:9' cannot be used"):
        OmniDiffusionConfig("emoji", device="cuda:9")


def test_wishes_become_what_is_attached() -> None:
    config = OmniDiffusionConfig("emoji", device="cpu", cfg_parallel_size=2, ring_degree=3, ulysses_degree=2)
    assert (config.num_ranks, config.backend) == (12, "gloo")
    assert config.attach_config.offload is None
    config = OmniDiffusionConfig("emoji", device="cpu", enable_layerwise_offload=True, gpu_memory="2GiB")
    offload = config.attach_config.offload
    assert offload is not None
    assert (offload.mode, offload.gpu_memory, offload.device) == ("layerwise", "2GiB", torch.device("cpu"))
    moves = OmniDiffusionConfig("emoji", enable_cpu_offload=True).attach_config.offload
    assert moves is not None
    assert moves.mode == "model"
    budget = OmniDiffusionConfig("emoji", gpu_memory=2**31).attach_config.offload
    assert budget is not None
    assert budget.mode == "auto"


def test_each_rank_needs_a_gpu_of_its_own(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = OmniDiffusionConfig("emoji", ulysses_degree=2)
    assert (config.backend, config.execution_device()) == ("nccl", torch.device("cuda"))
    with pytest.raises(SettingError, match="4 ranks on this machine need a GPU each, and it has 2"):
        OmniDiffusionConfig("emoji", ulysses_degree=2, cfg_parallel_size=2)
    assert OmniDiffusionConfig("emoji", ulysses_degree=4, device="cpu").backend == "gloo"
    with pytest.raises(SettingError, match="device='cuda:1' names one device"):
        OmniDiffusionConfig("emoji", ulysses_degree=2, device="cuda:1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # Two nodes of two GPUs each.
    assert OmniDiffusionConfig("emoji", ulysses_degree=4).num_ranks == 4


SCHEDULE = "#" + ".#" * 4 + "#"
TUNED = {"cache": {"backend": "tea_cache", "schedule": SCHEDULE}, "num_inference_steps": 10, "guidance_scale": 3.0,
         "height": 16, "model": "tiny", "origin": "a test"}  # fmt: skip


def test_a_tuned_setting_brings_the_parameters_it_was_tuned_with(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "setting.json"
    (tmp_path / "samovar.json").write_text('{"width": 32, "num_inference_steps": 2, "height": 32}')
    file.write_text(json.dumps(TUNED))
    for how in (
        {"cache": str(file)},
        {"cache_config": str(file)},
        {"cache_backend": "tea_cache", "cache_config": file},
    ):
        config = OmniDiffusionConfig(folder, device="cpu", defaults={"guidance_scale": 5.0}, **how)
        found = config.sampling_defaults(Path(folder))
        assert found.given() == {"height": 16, "width": 32, "num_inference_steps": 10, "guidance_scale": 5.0}, how
    file.write_text(json.dumps({**TUNED, "height": -1}))
    with pytest.raises(SettingError, match=r"In '.*setting.json': height must be at least 1, not -1"):
        OmniDiffusionConfig(folder, device="cpu", cache=file).sampling_defaults(Path(folder))


def test_a_schedule_sets_the_default_number_of_steps(folder: str, tmp_path: Path) -> None:
    (tmp_path / "samovar.json").write_text('{"num_inference_steps": 2}')
    config = OmniDiffusionConfig(folder, device="cpu", cache={"schedule": SCHEDULE})
    assert config.sampling_defaults(Path(folder)).num_inference_steps == 10, "not the model's 2"
    with pytest.raises(SettingError, match="num_inference_steps=4 is the default, but the cache has a schedule for 10"):
        OmniDiffusionConfig("emoji", device="cpu", cache={"schedule": SCHEDULE}, defaults={"num_inference_steps": 4})


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"num_steps": 4}, "'num_steps' is not a sampling parameter. Did you mean 'num_inference_steps'"),
        ({"num_inference_steps": 0}, "num_inference_steps must be at least 1, not 0"),
        ("fast", "defaults='fast'; expected sampling parameters by name"),
    ],
)
def test_defaults_are_checked_before_anything_is_loaded(defaults: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        OmniDiffusionConfig("emoji", device="cpu", defaults=defaults)
    with pytest.raises(SettingError, match="warm_up='yes'; expected True or False"):
        OmniDiffusionConfig("emoji", device="cpu", warm_up="yes")  # type: ignore[arg-type]
