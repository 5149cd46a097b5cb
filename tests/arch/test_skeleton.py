"""Building without weights: classes at full size, folders, and everything that is neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import tiny_flux_pipeline
from samovar.arch.skeleton import read_skeleton
from samovar.core.errors import ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().to(torch.bfloat16).save_pretrained(path)
    return path


def test_known_sizes() -> None:
    sizes = {"FluxTransformer2DModel": 11.9e9, "QwenImageTransformer2DModel": 20.4e9, "WanTransformer3DModel": 14.3e9}
    for name, expected in sizes.items():
        model = read_skeleton(name)[1]["transformer"].module
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=0.01)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ModelError, match="LatteTransformer3DModel has no usable default configuration"):
        read_skeleton("LatteTransformer3DModel")


def test_a_pipeline_class_names_its_parts() -> None:
    name, parts = read_skeleton("FluxPipeline")
    assert name == "FluxPipeline"
    assert {name: part.cls.__name__ for name, part in parts.items()} == {
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "transformer": "FluxTransformer2DModel",
        "image_encoder": "CLIPVisionModelWithProjection",
    }
    assert [name for name, part in parts.items() if part.module is not None] == ["transformer"]


def test_annotations_given_as_text_are_understood() -> None:
    _, parts = read_skeleton("HunyuanImagePipeline")
    assert parts["transformer"].cls.__name__ == "HunyuanImageTransformer2DModel"


def test_a_pipeline_folder_is_read_without_its_weights(folder: Path) -> None:
    name, parts = read_skeleton(str(folder))
    assert name == "FluxPipeline"
    assert {name: part.role for name, part in parts.items()} == {
        "vae": "vae", "text_encoder": "encoder", "text_encoder_2": "encoder", "transformer": "denoiser",
    }  # fmt: skip
    real = tiny_flux_pipeline()
    for name, part in parts.items():
        expected = sum(p.numel() for p in getattr(real, name).parameters())
        assert sum(p.numel() for p in part.module.parameters()) == expected
        assert {p.device.type for p in part.module.parameters()} == {"meta"}
    assert {p.dtype for p in parts["transformer"].module.parameters()} == {torch.bfloat16}


def test_what_a_model_is_comes_from_its_class(folder: Path) -> None:
    sources = ("AutoencoderKL", str(folder / "vae"), "UNet2DConditionModel", "FluxControlNetModel", "MotionAdapter")
    found = [[(name, part.role) for name, part in read_skeleton(source)[1].items()] for source in sources]
    assert found == [
        [("vae", "vae")], [("vae", "vae")], [("transformer", "denoiser")], [("model", "resident")],
        [("model", "resident")],
    ]  # fmt: skip


def dtype_in(folder: Path) -> torch.dtype:
    return next(read_skeleton(str(folder))[1]["transformer"].module.parameters()).dtype


def test_variants_tell_the_type_where_they_are_alone(tmp_path: Path) -> None:
    model = tiny_flux_pipeline().transformer
    model.half().save_pretrained(tmp_path, variant="fp16")
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["diffusion_pytorch_model.fp16.safetensors"]
    assert dtype_in(tmp_path) == torch.float16
    model.float().save_pretrained(tmp_path)
    assert dtype_in(tmp_path) == torch.float32, "the plain file is the one that is loaded"


@pytest.mark.parametrize("content", [b"", b"not weights at all"])
def test_a_broken_weight_file_is_named(tmp_path: Path, content: bytes) -> None:
    tiny_flux_pipeline().transformer.save_pretrained(tmp_path)
    (tmp_path / "second.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"second.safetensors is not a complete safetensors file"):
        read_skeleton(str(tmp_path))


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
        ("model_index.json", "{}", r"model_index.json lists no components"),
        ("model_index.json", '{"_class_name": "FluxPipeline"}', r"model_index.json lists no components"),
        ("model_index.json", {"transformer": ["custom", "Mine"]}, r"'transformer' is a 'custom.Mine', which is"),
        ("model_index.json", {"vae": ["diffusers", "Autoencodr"]}, r"which diffusers .* does not have"),
        ("model_index.json", {"vae_2": ["diffusers", "AutoencoderKL"]}, r"vae_2.config.json is missing"),
        ("transformer/config.json", {"num_layers": "two"}, r"The FluxTransformer2DModel in .* cannot be loaded"),
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
    with pytest.raises(ModelError, match="has no _class_name"):
        read_skeleton(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("FluxTransformer2DModl", "Did you mean 'FluxTransformer2DModel'?"),
        ("fluxpipeline", "Did you mean 'FluxPipeline'?"),
        ("Latte", "Did you mean 'LattePipeline' or 'LatteTransformer3DModel'?"),
        ("black-forest-labs/FLUX.1-dev", "Download a model of the hub first"),
        (".", "neither model_index.json nor config.json is in it"),
        ("./nowhere", "no such folder"),
        ("ModularPipeline", "'ModularPipeline' is neither a folder nor a model or pipeline class"),
    ],
)
def test_what_is_no_model_is_refused_with_the_nearest(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        read_skeleton(source)
    assert message in str(caught.value)
    assert "'ModularPipeline'" not in str(caught.value).partition("Did you mean")[2], "what is refused is not suggested"
