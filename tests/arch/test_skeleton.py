"""Building without weights: classes at full size, folders, and everything that is neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from pipelines import tiny_flux_pipeline
from samovar.arch import find_anatomy
from samovar.arch.skeleton import diffusers_class, read_skeleton
from samovar.errors import ModelError

WITHOUT_DEFAULTS = {
    "DreamLiteTransformer2DModel", "DualTransformer2DModel", "EasyAnimateTransformer3DModel",
    "HiDreamImageTransformer2DModel", "HunyuanDiT2DModel", "LatteTransformer3DModel", "LuminaNextDiT2DModel",
    "OmniGenTransformer2DModel", "Transformer2DModel", "TransformerTemporalModel",
}  # fmt: skip
"""Classes whose default configuration diffusers itself cannot build."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", sorted(zoo.exported_classes()))
def test_every_class_is_built_at_full_size_without_memory(name: str) -> None:
    if name in WITHOUT_DEFAULTS:
        with pytest.raises(ModelError, match=f"{name} has no usable default configuration"):
            read_skeleton(name)
        return
    class_name, modules = read_skeleton(name)
    cls, model = modules["transformer"]
    assert class_name == cls.__name__ == name
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert next(model.parameters()).dtype == torch.bfloat16
    assert find_anatomy(model).stacks


def test_known_sizes() -> None:
    sizes = {"FluxTransformer2DModel": 11.9e9, "QwenImageTransformer2DModel": 20.4e9, "WanTransformer3DModel": 14.3e9}
    for name, expected in sizes.items():
        model = read_skeleton(name)[1]["transformer"][1]
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=0.01)
    assert torch.get_default_dtype() == torch.float32


def test_a_pipeline_class_names_its_parts() -> None:
    name, modules = read_skeleton("FluxPipeline")
    assert name == "FluxPipeline"
    assert {part: cls.__name__ for part, (cls, _) in modules.items()} == {
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "transformer": "FluxTransformer2DModel",
        "image_encoder": "CLIPVisionModelWithProjection",
    }
    assert [part for part, (_, module) in modules.items() if module is not None] == ["transformer"]


def test_annotations_given_as_text_are_understood() -> None:
    _, modules = read_skeleton("HunyuanImagePipeline")
    assert modules["transformer"][0].__name__ == "HunyuanImageTransformer2DModel"


def test_a_pipeline_folder_is_read_without_its_weights(folder: Path) -> None:
    name, modules = read_skeleton(str(folder))
    assert name == "FluxPipeline"
    assert set(modules) == {"vae", "text_encoder", "text_encoder_2", "transformer"}
    real = tiny_flux_pipeline()
    for part, (_, module) in modules.items():
        expected = sum(p.numel() for p in getattr(real, part).parameters())
        assert sum(p.numel() for p in module.parameters()) == expected
        assert {p.device.type for p in module.parameters()} == {"meta"}
    assert {p.dtype for p in modules["transformer"][1].parameters()} == {torch.bfloat16}


def test_a_model_folder_is_read(folder: Path) -> None:
    name, modules = read_skeleton(str(folder / "transformer"))
    assert name == "FluxTransformer2DModel"
    assert [len(stack) for stack in find_anatomy(modules["transformer"][1]).stacks] == [2, 3]


def changed(folder: Path, tmp_path: Path, file: str, content: Any) -> str:
    """The folder's index and configurations, with one file changed."""
    for source in folder.rglob("*.json"):
        target = tmp_path / source.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        target.write_text(source.read_text())
    target = tmp_path / file
    target.write_text(content if isinstance(content, str) else json.dumps(json.loads(target.read_text()) | content))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model_index.json", "{", r"model_index.json is not valid JSON"),
        ("model_index.json", "[]", r"must hold a JSON object, not list"),
        ("model_index.json", {"transformer": ["custom", "Mine"]}, r"'transformer' is of custom.Mine.*is not run"),
        ("model_index.json", {"vae": ["diffusers", "Autoencodr"]}, r"which diffusers .* does not have"),
        ("model_index.json", {"vae_2": ["diffusers", "AutoencoderKL"]}, r"vae_2.config.json is missing"),
        ("transformer/config.json", {"num_layers": "two"}, r"FluxTransformer2DModel could not be built from"),
    ],
)
def test_a_broken_folder_is_refused_by_name(
    folder: Path, tmp_path: Path, file: str, content: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_skeleton(changed(folder, tmp_path, file, content))
    assert torch.get_default_dtype() == torch.float32


def test_a_config_without_a_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ModelError, match="names no class"):
        read_skeleton(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("FluxTransformer2DModl", "Did you mean 'FluxTransformer2DModel'?"),
        ("fluxpipeline", "Did you mean 'FluxPipeline'?"),
        ("Latte", "Did you mean 'LattePipeline' or 'LatteTransformer3DModel'?"),
        ("black-forest-labs/FLUX.1-dev", "A model of the hub must be downloaded first"),
        (".", "neither model_index.json nor config.json"),
    ],
)
def test_what_is_no_model_is_refused_with_the_nearest(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        read_skeleton(source)
    assert message in str(caught.value)


def test_only_models_and_pipelines_count_as_classes() -> None:
    with pytest.raises(ModelError, match="neither a folder nor a model"):
        diffusers_class("FlowMatchEulerDiscreteScheduler")
