"""Settings of the engine: where they come from, who wins, and what is refused before any weights are loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar.core.errors import SamovarError, SettingError
from samovar.engine import OmniDiffusionConfig as Config
from samovar.engine.process import _environment
from samovar.engine.settings import place_replicas, read_gpus

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("SAMOVAR_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "emojy"}, r"'emojy' is not a built-in model.*Did you mean 'emoji'\?"),
        ({"dtype": "bfloat61"}, r"dtype='bfloat61'; expected one of .* Did you mean 'bfloat16'\?"),
        ({"cache_backend": "tee_cache"}, r"Did you mean 'tea_cache'\?"),
        ({"enable_cpu_offload": True, "enable_layerwise_offload": True}, "exclude each other"),
        ({"cfg_parallel_size": 2, "device": "cpu:0"}, "device='cpu:0' names one device, and these"),
        ({"defaults": {"num_steps": 4}}, "'num_steps' is not a setting of .* Did you mean 'num_inference_steps'"),
        ({"defaults": {"num_inference_steps": 4}, "cache": {"schedule": "##.#"  "#."}}, "schedule for 6 steps"),
        ({"lora": "pixel"}, "lora='pixel'; expected files or folders by name"),
        ({"lora": {"": "x"}}, "'' is not a name"),
        ({"lora": {"a": "/no/where/x.safetensors"}}, "which is not a .safetensors file"),
        ({"quantization": "int9"}, r"quantization='int9' is not one of int8, fp8, int4, nf4, .* Did you mean 'int8'\?"),
        ({"quantization": "nf4"}, "quantization='nf4' does not run on cpu"),
        ({"quantization": "nowhere.gguf"}, "is not a file here"),
        ({"quantization": {"transformer": 8}}, "expected a kind such as 'int8'"),
        ({"loss": "int8"}, "there is none. Give gpu_memory"),
        ({"loss": "int8", "quantization": "int8"}, "Give one of them"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SamovarError, match=message):
        Config(**{"device": "cpu", **settings})


def test_wishes_become_what_is_attached() -> None:
    config = Config("emoji", device="cpu", cfg_parallel_size=2, ring_degree=3, ulysses_degree=2)
    assert (config.num_ranks, config.backend, config.attach_config.offload) == (12, "gloo", None)
    offload = Config("emoji", device="cpu", enable_layerwise_offload=True, gpu_memory="2GiB").attach_config.offload
    assert offload is not None
    assert (offload.mode, offload.gpu_memory, offload.device) == ("layerwise", "2GiB", CPU)


def test_arguments_win_over_the_file_and_the_file_over_the_environment(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    for name, value in {"DTYPE": "float16", "DEVICE": "cpu", "MAX_BATCH": "7", "STEP_TIMEOUT_S": "2.5",
                        "ENABLE_CPU_OFFLOAD": "on", "DEFAULTS": '{"height": 16, "seed": 1}', "COMPILE": "eager",
                        "API_KEY": "not a setting of the engine"}.items():  # fmt: skip
        environment.setenv(f"SAMOVAR_{name}", value)
    config = Config.read({})
    assert (config.dtype, config.max_batch, config.step_timeout_s, config.offload) == ("float16", 7, 2.5, "model")
    assert config.compile == "eager"
    file = tmp_path / "settings.yaml"
    file.write_text(
        "dtype: bfloat16\nmax_batch: 3\ncache_backend: tea_cache\ncache_config: {rel_l1_thresh: 0.3}\n"
        "defaults: {height: 32, num_inference_steps: 4}\nserver: {port: 1}\n"
    )
    config = Config.read({"max_batch": 2, "defaults": {"num_inference_steps": 8}}, file)
    assert (config.dtype, config.device, config.max_batch) == ("bfloat16", "cpu", 2)
    assert config.cache == {"backend": "tea_cache", "rel_l1_thresh": 0.3}
    assert config.sampling_defaults(None).given() == {"num_inference_steps": 8, "seed": 1, "height": 32}
    for other in ("none", None, "auto"):  # Whatever the spelling.
        assert Config.read({"cache_backend": other}, file).cache == other
        assert Config.read({"cache": other}, file).cache == other
    assert Config.read({"enable_layerwise_offload": False}, file).offload is None
    (tmp_path / "empty.yaml").write_text("")
    assert Config.read({}, tmp_path / "empty.yaml") == Config.read({})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "dtyp: float32", r"'dtyp' is not a setting of Omni, in '.*a.yaml'. Did you mean 'dtype'\?"),
        ("a.json", "{", "cannot be read: Expecting"),
        ("a.yaml", "- 1", r"must hold settings by name, such as `model: emoji`"),
        ("a.toml", "", "must end in .json, .yaml or .yml"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "cannot be read: could not"),
        ("a.yaml", "enable_cpu_offload: 'yes'", "enable_cpu_offload='yes'; expected True or False"),
        ("a.yaml", "step_timeout_s: .inf", "step_timeout_s=inf; expected a number above 0"),
        ("SAMOVAR_DTYP", "float32", r"'SAMOVAR_DTYP' is not .* Did you mean 'SAMOVAR_DTYPE'\?"),
        ("SAMOVAR_MAX_BATCH", "two", "max_batch='two'; expected a whole number, 1 or more"),
        ("SAMOVAR_CACHE", "[1]", "expected a JSON object"),
        ("SAMOVAR_PORT", "8000", "'SAMOVAR_PORT' is not a setting of Omni"),
    ],
)
def test_a_file_or_a_variable_with_a_mistake_is_refused(
    tmp_path: Path, environment: pytest.MonkeyPatch, name: str, content: str, message: str
) -> None:
    file = None
    if name.startswith("SAMOVAR"):
        environment.setenv(name, content)
    else:
        file = tmp_path / name
        file.write_text(content)
    with pytest.raises(SamovarError, match=message):
        Config.read({}, file)


def test_what_kubernetes_says_of_a_service_is_no_setting(environment: pytest.MonkeyPatch) -> None:
    for name, value in {"SERVICE_HOST": "10.0.0.7", "SERVICE_PORT_HTTP": "8091", "PORT": "tcp://10.0.0.7:8091",
                        "PORT_8091_TCP_ADDR": "10.0.0.7", "WEB_PORT": "tcp://10.0.0.8:80"}.items():  # fmt: skip
        environment.setenv(f"SAMOVAR_{name}", value)
    assert Config.read({}) == Config()


def test_a_tuned_setting_brings_the_parameters_it_was_tuned_with(tmp_path: Path) -> None:
    file, schedule = tmp_path / "setting.json", "#" + ".#" * 4 + "#"
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    (tmp_path / "samovar.json").write_text('{"width": 32, "num_inference_steps": 2, "height": 32}')
    tuned = {"cache": {"backend": "tea_cache", "schedule": schedule}, "num_inference_steps": 10, "guidance_scale": 3.0,
             "height": 16, "model": "tiny", "origin": "a test"}  # fmt: skip
    file.write_text(json.dumps(tuned))
    for how in ({"cache": str(file)}, {"cache_backend": "tea_cache", "cache_config": file}):
        config = Config(str(tmp_path), device="cpu", defaults={"guidance_scale": 5.0}, **how)  # type: ignore[arg-type]
        found = config.sampling_defaults(tmp_path).given()
        assert found == {"height": 16, "width": 32, "num_inference_steps": 10, "guidance_scale": 5.0}, how
    file.write_text(json.dumps({**tuned, "height": -1}))
    with pytest.raises(SettingError, match=r"In '.*setting.json': height=-1; expected a whole number"):
        Config(str(tmp_path), device="cpu", cache=file).sampling_defaults(tmp_path)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ GPUs


@pytest.mark.parametrize("devices", ["0,2", " cuda:0, 2", [0, 2], (0, "2")])
def test_gpus_may_be_written_in_several_ways(devices: Any) -> None:
    assert read_gpus(devices) == (0, 2)


@pytest.mark.parametrize("devices", ["", "0,", "-1", "cpu,cpu", [], [True], [0.5], "0;1", "٣"])
def test_what_is_no_gpu_is_refused(devices: Any) -> None:
    with pytest.raises(SettingError, match=r"devices=.*expected the numbers of GPUs"):
        Config(devices=devices)


@pytest.mark.parametrize(
    ("replicas", "gpus", "device", "num_ranks", "groups"),
    [
        (None, (), CUDA, 2, ((),)),
        (3, (), CPU, 1, ((), (), ())),
        (3, (), CUDA, 1, ((0,), (1,), (2,))),
        (None, (0, 0), CUDA, 1, ((0,), (0,))),
        (2, (), CUDA, 2, ((0, 1), (2, 3))),
        (None, (0, 2, 1, 3), CUDA, 2, ((0, 2), (1, 3))),
        (
            5,
            (),
            CUDA,
            1,
            "5 replicas of 1 ranks would take GPU 4 too, and torch finds 4 here, from 0 to 3.* more than once",
        ),
        (
            3,
            (0, 1),
            CUDA,
            1,
            r"devices names 2 GPUs \(0, 1\), and 3 replicas of 1 ranks take 3. Name as many, or change",
        ),
        (None, (0, 1, 2), CUDA, 2, "1 replicas of 2 ranks take 2. Name as many, or change replicas or parallel"),
        (None, (0, 0, 1, 1), CUDA, 2, "the GPUs 0, 0, and each rank needs one of its own"),
        (None, (3, 4, 9), CUDA, 1, "3 replicas of 1 ranks would take GPU 4, 9 too"),
        (None, (0, 1), CPU, 1, "devices names GPUs .* and the device is 'cpu'. Leave it out, and give replicas=2 for"),
        (2, (), torch.device("cuda:1"), 1, "device='cuda:1' names one device, and these settings take several"),
    ],
)
def test_gpus_are_divided_or_refused(replicas: Any, gpus: Any, device: Any, num_ranks: int, groups: Any) -> None:
    if isinstance(groups, str):
        with pytest.raises(SettingError, match=groups):
            place_replicas(replicas, gpus, device, num_ranks, 4)
    else:
        assert place_replicas(replicas, gpus, device, num_ranks, 4) == groups


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_settings_say_how_many_replicas_and_ranks_there_are(four_gpus: None, environment: pytest.MonkeyPatch) -> None:
    assert Config("emoji").num_replicas == 1
    ranks = Config("emoji", devices=[0, 1, 2, 3], ulysses_degree=2)  # type: ignore[arg-type]
    assert (ranks.num_replicas, ranks.num_ranks, ranks.backend, ranks.gpus) == (2, 2, "nccl", ((0, 1), (2, 3)))
    with pytest.raises(SettingError, match="8 ranks on this machine need a GPU each, and it has 4"):
        Config("emoji", ulysses_degree=4, cfg_parallel_size=2)
    environment.setenv("SAMOVAR_DEVICES", "3,2")
    assert Config.read({}).gpus == ((3,), (2,))


def test_a_worker_sees_only_its_gpus_and_the_environment_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, expected in ((None, "1"), ("4,5", "5"), ("GPU-aa, GPU-bb,GPU-cc", "GPU-bb")):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        before = dict(os.environ)
        with _environment(Config("emoji", device="cpu"), (1,)):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
            assert os.environ["DIFFUSERS_DISABLE_REMOTE_CODE"]
        assert dict(os.environ) == before
