"""Adapters give the bits that diffusers gives, in any order, with every feature, and come off without a trace."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import ask, pixels, result_of, worker_of
from safetensors.torch import load_file, save_file

from pipelines import tiny_flux_pipeline
from pipelines.adapters import TARGETS, save_adapters
from samovar.core.errors import ModelError, SettingError
from samovar.engine import OmniDiffusionConfig, Worker
from samovar.engine.lora import Adapters, fetch_adapter
from samovar.engine.models import load_pipeline
from samovar.engine.request import read_adapters
from simulated import SimulatedRecorder, recording_by

CALL: dict[str, Any] = {"height": 16, "width": 32, "num_inference_steps": 10, "max_sequence_length": 8}
BOTH = [{"name": "ink", "scale": 0.7}, {"name": "pixel", "scale": -0.2}]
ORDERS: list[Any] = ["pixel", None, "ink", BOTH, "pixel", None]
"""What is asked for, one after the other, in one engine."""


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_adapters(tiny_flux_pipeline(), tmp_path_factory.mktemp("adapters"))


def bare(pipe: Any) -> Any:
    """The image as the pipeline makes it without us."""
    return np.asarray(pipe("a cat", generator=torch.Generator().manual_seed(3), **CALL).images[0])


def diffusers_way(pipe: Any, lora: Mapping[str, str]) -> dict[str, Any]:
    """The image of each order by a bare pipeline, in which nothing else was ever loaded."""
    made = {}
    for order in ORDERS:
        chosen = read_adapters(order)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            for name, _ in chosen:
                pipe.load_lora_weights(lora[name], adapter_name=name)
        if chosen:
            pipe.set_adapters([name for name, _ in chosen], [scale for _, scale in chosen])
        made[str(order)] = bare(pipe)
        pipe.unload_lora_weights()
    assert len({each.tobytes() for each in made.values()}) == 4, "each adapter changes the image"
    return made


@pytest.fixture(scope="module")
def expected(lora: dict[str, str]) -> dict[str, Any]:
    return diffusers_way(tiny_flux_pipeline(), lora)


def made_by(worker: Worker, order: Any) -> Any:
    result = result_of(worker.make(ask(how={"lora": order}, **CALL)))
    assert result.lora == read_adapters(order)
    return pixels(result)


def lora_layers(pipe: Any) -> list[str]:
    return [path for path, _ in pipe.transformer.named_modules() if "lora" in path]


TIGHT = {"offload": {"mode": "auto", "activations": 0, "device": "cpu"}, "gpu_memory": 105_000}
SETTINGS: dict[str, dict[str, Any]] = {
    "bare": {},
    "meeting": {"max_batch": 2},
    "model": {"offload": "model", "max_batch": 2},
    "budget": TIGHT,
    "cache and layerwise": {"cache": {"rel_l1_thresh": 0.0}, "offload": "layerwise"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_adapter_gives_the_bits_of_diffusers(name: str, lora: dict[str, str], expected: Mapping[str, Any]) -> None:
    pipe = tiny_flux_pipeline()
    worker = worker_of(pipe=pipe, lora=lora, **SETTINGS[name])
    assert ("blocks stream" in str(worker.explain())) is ("budget" in name or "layerwise" in name)
    assert worker.facts.adapters == tuple(TARGETS)
    for order in ORDERS:
        assert np.array_equal(made_by(worker, order), expected[str(order)]), order
    worker.close()
    assert not lora_layers(pipe), "they come off again"
    assert np.array_equal(bare(pipe), expected["None"])


CACHE_DIT = {"backend": "cache_dit", "Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 3,
             "residual_diff_threshold": 0.3}  # fmt: skip


@pytest.mark.parametrize("cache", [{"rel_l1_thresh": 0.3}, "auto", CACHE_DIT])
def test_a_cache_that_skips_knows_nothing_of_other_adapters(lora: dict[str, str], cache: Any) -> None:
    """As in an engine that has served nobody else."""
    alone = {}
    for order in ("pixel", "ink", None):
        worker = worker_of(pipe=tiny_flux_pipeline(), lora=lora, cache=cache)
        alone[order] = made_by(worker, order)
        worker.close()
    worker = worker_of(pipe=tiny_flux_pipeline(), lora=lora, cache=cache)
    for order in ("pixel", "ink", "pixel", None, "ink"):
        assert np.array_equal(made_by(worker, order), alone[order]), order
    result = result_of(worker.make(ask(how={"lora": "ink"}, **CALL)))
    assert cache is CACHE_DIT or result.cache[0].skipped > 0
    worker.close()


def test_auto_skips_also_where_requests_with_other_adapters_come_in_between(lora: dict[str, str]) -> None:
    worker = worker_of(pipe=tiny_flux_pipeline(), lora=lora, cache="auto", max_batch=4)
    requests = [
        ask(how={"lora": name, "tolerance": 1.0}, **{**CALL, "num_inference_steps": 14}) for name in (None, *lora)
    ]
    own = [result_of(worker.make(request)) for request in requests]
    for alone, made in zip(own, map(result_of, worker.run(requests)), strict=True):
        masks = [each.cache[0].denoisers["transformer"].branches["cond"].mask for each in (alone, made)]
        assert masks[0] == masks[1]
        assert "." in masks[0]


def test_quantised_weights_take_adapters(lora: dict[str, str], folder: Path) -> None:
    pytest.importorskip("torchao")
    config = OmniDiffusionConfig(str(folder), device="cpu", quantization="int8", progress=False)
    pipe = load_pipeline(folder, torch.float32, quantization=config.quantised())
    pipe.set_progress_bar_config(disable=True)
    expected = diffusers_way(pipe, lora)
    for offload in (None, "layerwise"):
        worker = worker_of(folder, quantization="int8", lora=lora, offload=offload)
        for order in ORDERS:
            assert np.array_equal(made_by(worker, order), expected[str(order)]), (offload, order)


@pytest.mark.slow
def test_weights_that_are_packed_into_one_dimension_take_them_too(lora: dict[str, str], folder: Path) -> None:
    pytest.importorskip("sdnq")
    shares = {}
    for kind in (None, "int4"):
        worker = worker_of(folder, quantization=kind, lora=lora)
        made = {order: made_by(worker, order).astype(float) for order in (None, "pixel", "ink")}
        shares[kind] = {order: made[order] - made[None] for order in ("pixel", "ink")}
    for order, change in shares["int4"].items():
        angle = np.vdot(change, shares[None][order]) / np.linalg.norm(change) / np.linalg.norm(shares[None][order])
        assert angle > 0.7, "it changes the image as it changes that of exact weights"


def test_a_switch_reads_no_file_and_what_peft_has_saved_is_refused(
    lora: dict[str, str], tmp_path: Path, expected: Mapping[str, Any]
) -> None:
    shutil.copytree(lora["pixel"], tmp_path / "pixel")
    worker = worker_of(pipe=tiny_flux_pipeline(), lora={"a.b": tmp_path / "pixel"})
    shutil.rmtree(tmp_path / "pixel")
    assert np.array_equal(made_by(worker, "a.b"), expected["pixel"])
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="is as peft saves adapters"):
        worker_of(pipe=tiny_flux_pipeline(), lora={"a.b": tmp_path})


def test_a_folder_must_say_which_file_and_the_hub_is_looked_up_in_its_cache(
    lora: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SettingError, match=r"has no .safetensors file"):
        OmniDiffusionConfig("emoji", device="cpu", lora={"a": empty})
    for name in ("one", "two"):
        save_file({"x": torch.zeros(1)}, empty / f"{name}.safetensors")
    with pytest.raises(SettingError, match=r"has 'one.safetensors', 'two.safetensors'. Name one file"):
        OmniDiffusionConfig("emoji", device="cpu", lora={"a": empty})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--me--pixel" / "snapshots" / ("0" * 40)
    shutil.copytree(lora["pixel"], kept)
    (tmp_path / "models--me--pixel" / "refs").mkdir()
    (tmp_path / "models--me--pixel" / "refs" / "main").write_text("0" * 40)
    file = kept / "pytorch_lora_weights.safetensors"
    for source in ("me/pixel", f"me/pixel/{file.name}"):
        assert fetch_adapter("pixel", source) == file
    with pytest.raises(ModelError, match="'me/other', is not here and could not be downloaded"):
        fetch_adapter("other", "me/other")


NORM = "transformer.transformer_blocks.0.attn.norm_q.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {f"unet.{name}": tensor for name, tensor in w.items()}, "has no weights for this FluxPipeline"),
        (lambda w: w | {"transformer.nothing.lora_A.weight": torch.zeros(2, 16)}, "The adapter 'x', .*"),
        (lambda w: {name: tensor[..., :1].contiguous() for name, tensor in w.items()}, "cannot be loaded"),
        (lambda w: w | {NORM: torch.full((8,), 2.0)}, "changes weights of the model itself"),
    ],
    ids=["another model", "unknown layers", "other shapes", "as control adapters of FLUX do"],
)
def test_an_adapter_that_does_not_fit_is_refused_at_the_start(
    lora: dict[str, str], tmp_path: Path, expected: Mapping[str, Any], change: Any, message: str
) -> None:
    file, pipe = tmp_path / "x.safetensors", tiny_flux_pipeline()
    save_file(change(load_file(Path(lora["pixel"]) / "pytorch_lora_weights.safetensors")), file)
    with pytest.raises(ModelError, match=message):
        worker_of(pipe=pipe, lora={"x": file})
    assert not lora_layers(pipe)
    assert np.array_equal(bare(pipe), expected["None"])


def test_what_cannot_have_adapters_is_refused_and_left_alone(
    lora: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tiny_flux_pipeline()
    with pytest.raises(SettingError, match="is not enough"):
        worker_of(pipe=pipe, lora=lora, **{**TIGHT, "gpu_memory": 10_000})
    assert not lora_layers(pipe)
    pipe.load_lora_weights(lora["ink"], adapter_name="theirs")
    with pytest.raises(SettingError, match=r"has adapters already: 'theirs'. Take them off first"):
        worker_of(pipe=pipe, lora=lora)
    assert pipe.get_active_adapters() == ["theirs"]
    with pytest.raises(SettingError, match="object takes no LoRA adapters"):
        Adapters(object(), lora)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"lora needs peft, which is not installed: pip install peft"):
        Adapters(object(), lora)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SETTINGS if "budget" not in name])
def test_a_gpu_gives_the_bits_of_diffusers(name: str, lora: dict[str, str]) -> None:
    expected = diffusers_way(tiny_flux_pipeline().to("cuda"), lora)
    worker = worker_of(pipe=tiny_flux_pipeline(), lora=lora, **SETTINGS[name] | {"device": "cuda"})
    for order in ORDERS:
        assert np.array_equal(made_by(worker, order), expected[str(order)]), order


@pytest.mark.slow
def test_compiled_blocks_follow_a_switch(lora: dict[str, str], expected: Mapping[str, Any]) -> None:
    worker = worker_of(pipe=tiny_flux_pipeline(), lora=lora, compile="eager")
    for order in ("pixel", None, "ink", "pixel"):
        assert np.array_equal(made_by(worker, order), expected[str(order)]), order


def test_replayed_forwards_follow_a_switch_and_scales_of_others_cost_no_recording(
    lora: dict[str, str], expected: Mapping[str, Any]
) -> None:
    with recording_by(SimulatedRecorder(), torch.device("cpu")):
        worker = worker_of(pipe=tiny_flux_pipeline(), lora=lora, compile="graphs")
        for order in ORDERS:
            assert np.array_equal(made_by(worker, order), expected[str(order)]), order
        assert "52 calls replayed, 8 run" in str(worker.explain())
        made_by(worker, {"name": "pixel", "scale": 0.5})
        made_by(worker, None)
        assert ", 10 run" in str(worker.explain()), "another scale is another form"
