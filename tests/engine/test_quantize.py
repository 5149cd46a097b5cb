"""Quantising on the way in: what is refused before anything is loaded, and what comes out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import tiny_flux_pipeline
from pipelines.gguf_files import write_gguf
from samovar import Omni
from samovar.arch.skeleton import read_skeleton
from samovar.core import quantisers
from samovar.core.errors import ModelError, SettingError
from samovar.engine import OmniDiffusionConfig, Supervisor
from samovar.engine.models import load_pipeline
from samovar.engine.quantize import Quantization, loading_arguments

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("int9", r"quantization='int9' is not one of int8, fp8, int4, nf4, .* Did you mean 'int8'\?"),
        ("nf4", "quantization='nf4' does not run on cpu: diffusers loads bitsandbytes weights on a GPU only"),
        ("nowhere.gguf", r"quantization='nowhere\.gguf' is not a file here"),
        ({}, "expected a kind such as 'int8'"),
        ({"transformer": 8}, "expected a kind such as 'int8'"),
        ({"transformer": "int5"}, r"Did you mean 'int"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_is_loaded(quantization: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        OmniDiffusionConfig("emoji", device="cpu", quantization=quantization)
    assert caught.value.param == "quantization"


def test_a_gguf_file_is_not_compiled(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "any.gguf").touch()
    with pytest.raises(SettingError, match="compile=True cannot trace the weights of a GGUF file"):
        OmniDiffusionConfig("emoji", device="cpu", quantization=str(tmp_path / "any.gguf"), compile=True)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quantisers.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "any.gguf").touch()
    for name, package in (("int8", "torchao>="), ("int4", "sdnq>="), (str(tmp_path / "any.gguf"), "gguf>=")):
        with pytest.raises(SettingError, match=rf"needs \w+, which is not installed.*pip install '{package}"):
            Quantization.read(name, CPU)


def test_a_saved_component_whose_package_is_not_here_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "saved"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "transformer" / "config.json").read_text())
    found = quantisers.importlib.util.find_spec
    monkeypatch.setattr(
        quantisers.importlib.util, "find_spec", lambda name: None if name == "optimum.quanto" else found(name)
    )
    for settings, words in (
        (
            {"quant_method": "quanto", "weights_dtype": "int8"},
            r"transformer .* \(quanto int8\), which needs optimum.quanto, which is not installed: pip install 'optim",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, r"\(bitsandbytes nf4\)"),
    ):
        (copy / "transformer" / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        if "bits" in words and (torch.cuda.is_available() or found("bitsandbytes") is None):
            continue
        with pytest.raises(ModelError, match=words):
            load_pipeline(copy, torch.float32)


def test_the_model_decides_what_can_be_quantised(folder: Path) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(SettingError, match=r"'transfomer' is not a component .* Did you mean 'transformer'\?"):
        load_pipeline(folder, torch.float32, quantization=Quantization.read({"transfomer": "int8"}, CPU))
    pipe = tiny_flux_pipeline()
    with pytest.raises(SettingError, match="Weights are quantised while they are loaded, and this FluxPipeline is"):
        Omni(pipe, quantization="int8")
    with pytest.raises(SettingError, match="Weights are quantised while"):
        Omni(pipe, loss="int8", gpu_memory="1GiB")


def test_of_two_denoisers_a_file_must_name_one() -> None:
    both = {"transformer": "denoiser", "transformer_2": "denoiser"}
    parts: Any = {name: type("Part", (), {"role": role}) for name, role in both.items()}
    with pytest.raises(
        SettingError, match=r"has the denoisers transformer and transformer_2\. .*transformer=x\.gguf in a"
    ):
        Quantization({"": "x.gguf"}).by_component(parts)
    assert Quantization({"": "int8"}).by_component(parts) == dict.fromkeys(both, "int8")
    assert Quantization({"transformer_2": "x.gguf"}).by_component(parts) == {"transformer_2": "x.gguf"}


def test_nothing_to_quantise_is_refused(folder: Path) -> None:
    parts: Any = {"vae": type("Part", (), {"role": "vae"})}
    with pytest.raises(
        SettingError, match=r"quantization='int8' is for a denoiser, and this model has none, only vae\. Say"
    ):
        Quantization({"": "int8"}).by_component(parts)
    part = read_skeleton(str(folder))[1]["vae"]
    convolutions = replace(part, module=torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)), cls=torch.nn.Sequential)
    with pytest.raises(
        SettingError, match=r"vae, a Sequential, has no linear layers that int8 would quantise\. Leave it out"
    ):
        Quantization({"vae": "int8"}).applied({"vae": convolutions})
    with pytest.raises(
        SettingError, match="vae cannot be planned as int8: a checkpoint says how a Sequential is built"
    ):
        Quantization({"vae": "int8"}).applied({"vae": replace(convolutions, module=None)})


def quantised_layers_of(pipe: Any) -> set[str]:
    return {
        path
        for path, layer in pipe.transformer.named_modules()
        if isinstance(layer, torch.nn.Linear)
        and (type(layer) is not torch.nn.Linear or type(layer.weight) is not torch.nn.Parameter)
    }


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "gguf"])
def test_every_way_to_run_gives_the_same_images(folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        pytest.importorskip("gguf")
        kind = str(write_gguf(tmp_path / "tiny.gguf", load_pipeline(folder, torch.float32).transformer))
    else:
        pytest.importorskip("sdnq" if kind == "int4" else "torchao")
    images = []
    for settings in ({}, {"offload": "layerwise"}, {"gpu_memory": "90MiB"}, {"cache": {"rel_l1_thresh": 0.0}}):
        with Omni(str(folder), device="cpu", progress=False, quantization=kind, **settings) as omni:
            images.append(omni.generate("a cat", seed=1)[0].images[0])
            said = omni.explain().features[0]
            assert said.name == "quantization"
            assert said.settings.startswith("transformer as ")
    assert all(image.tobytes() == images[0].tobytes() for image in images[1:])
    with Omni(str(folder), device="cpu", progress=False) as omni:
        assert omni.generate("a cat", seed=1)[0].images[0].tobytes() != images[0].tobytes(), "it is quantised"
        assert [feature.name for feature in omni.explain().features] == ["requests"]


def test_components_are_quantised_each_as_asked(folder: Path) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("sdnq")
    setting = Quantization.read({"transformer": "int4", "text_encoder": "int8", "vae": "none"}, CPU)
    assert setting is not None
    assert set(loading_arguments(folder, torch.float32, setting)) == {"quantization_config"}
    pipe = load_pipeline(folder, torch.float32, quantization=setting)
    paths = quantised_layers_of(pipe)
    assert paths
    assert all(path.startswith(("transformer_blocks.", "single_transformer_blocks.")) for path in paths)
    assert type(pipe.text_encoder.encoder.layers[0].mlp.fc1.weight).__name__ == "Int8Tensor"
    assert type(pipe.text_encoder_2.encoder.block[0].layer[0].SelfAttention.q.weight) is torch.nn.Parameter


@pytest.mark.slow
def test_a_worker_process_quantises_and_says_so(folder: Path) -> None:
    pytest.importorskip("torchao")
    supervisor = Supervisor(OmniDiffusionConfig(str(folder), device="cpu", progress=False, quantization="fp8"))
    try:
        supervisor.start()
        said = supervisor.facts.explanation
        assert said is not None
        assert "transformer as torchao Float8WeightOnlyConfig" in str(said)
    finally:
        supervisor.close()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:inner dimension:UserWarning")  # bitsandbytes, of layers as small as these.
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "nf4"])
def test_every_kind_runs_on_a_gpu_and_streams(folder: Path, kind: str) -> None:
    pytest.importorskip({"int4": "sdnq", "nf4": "bitsandbytes"}.get(kind, "torchao"))
    images = []
    for settings in ({}, {"offload": "layerwise"}, {"gpu_memory": "300MiB", "loss": "exact", "quantization": None}):
        given = {"quantization": kind, **settings} if settings.get("loss") is None else settings
        with Omni(str(folder), device="cuda", progress=False, **given) as omni:
            images.append(omni.generate("a cat", seed=1)[0].images[0].tobytes())
    assert images[0] == images[1] != images[2]


@pytest.mark.gpu
def test_the_speeds_of_a_gpu_are_measured() -> None:
    from samovar.engine.planning import _measured

    speeds = _measured(torch.device("cuda"))
    assert 1e12 < speeds.operations_s < 1e16
    assert 1e10 < speeds.memory_bytes_s < 1e14
    assert 1e8 < speeds.bus_bytes_s < 1e12
