"""Sizes: as people write them, of loaded components and of skeletons, with what is shared counted once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines import tiny_flux_pipeline
from samovar.core.errors import ModelError, SettingError
from samovar.offload import format_bytes, read_sizes
from samovar.offload.sizes import find_components, measure_components

GIB = 2**30


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 2048, 3 * 2**20, 12.345 * GIB)] == [
        "0 B", "1.00 KiB", "2.00 KiB", "3.00 MiB", "12.35 GiB",
    ]  # fmt: skip


def test_a_skeleton_of_full_size_weighs_what_the_model_does() -> None:
    (flux,) = read_sizes("FluxTransformer2DModel")
    assert (flux.name, flux.role, len(flux.blocks)) == ("transformer", "denoiser", 57)
    assert flux.num_bytes == pytest.approx(22.15 * GIB, rel=1e-3)
    assert {round(block.num_bytes / GIB, 2) for block in flux.blocks} == {0.63, 0.26}
    assert flux.rest_bytes == pytest.approx(0.1 * GIB, rel=0.01)


def test_what_depends_on_a_checkpoint_is_refused() -> None:
    with pytest.raises(ModelError, match="depends on a checkpoint"):
        read_sizes("StableDiffusionPipeline")


def test_a_quantised_folder_is_read_by_what_it_stores(tmp_path: Path) -> None:
    tiny_flux_pipeline().save_pretrained(tmp_path)
    before = {size.name: size.num_bytes for size in read_sizes(str(tmp_path))}
    file = tmp_path / "text_encoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    weights = load_file(tmp_path / "text_encoder" / "model.safetensors")
    layer = "encoder.layers.0.mlp.fc1"
    del weights[f"{layer}.weight"]
    packed = {f"{layer}.qweight": torch.zeros(2**14, dtype=torch.int32), f"{layer}.scales": torch.zeros(2**10)}
    save_file({**weights, **packed}, tmp_path / "text_encoder" / "model.safetensors")
    after = {size.name: size.num_bytes for size in read_sizes(str(tmp_path))}
    more = after.pop("text_encoder") - before.pop("text_encoder")
    assert more == pytest.approx(2**16 + 2**12, abs=2**10), "what is stored, less the small weight that it stands for"
    assert after == before


def test_components_of_a_pipeline_and_its_skeleton_agree(tmp_path: object) -> None:
    pipe = tiny_flux_pipeline()
    pipe.save_pretrained(tmp_path)
    loaded = {size.name: size for size in measure_components(find_components(pipe))}
    read = {size.name: size for size in read_sizes(str(tmp_path))}
    assert set(loaded) == {"transformer", "text_encoder", "text_encoder_2", "vae"}
    for name, size in loaded.items():
        # Positions that transformers keeps as buffers are not on the meta device in every version.
        assert read[name].num_bytes == pytest.approx(size.num_bytes, rel=0.1)
        assert [b.path for b in read[name].blocks] == [b.path for b in size.blocks]


def test_exclude() -> None:
    pipe = tiny_flux_pipeline()
    components = find_components(pipe, ["text_encoder_2"])
    assert "text_encoder_2" not in {component.name for component in components}
    with pytest.raises(SettingError, match=r"'texts' is not a component, so it cannot be in exclude"):
        find_components(pipe, ["texts"])


def test_weights_that_parts_share_stay_apart() -> None:
    pipe = tiny_flux_pipeline()
    blocks = pipe.transformer.single_transformer_blocks
    blocks[1].proj_out.weight = blocks[0].proj_out.weight
    components = find_components(pipe)
    assert [id(tensor) for tensor in components[-1].tensors()] == [id(blocks[0].proj_out.weight)]
    transformer = next(component for component in components if component.name == "transformer")
    assert id(blocks[0].proj_out.weight) not in map(id, transformer.tensors())
    sizes = measure_components(components)
    assert (sizes[-1].name, sizes[-1].role) == ("shared weights", "resident")
    assert sizes[-1].num_bytes == pytest.approx(blocks[0].proj_out.weight.numel() * 4, abs=512)


def test_a_module_inside_another_component_belongs_to_itself() -> None:
    class Nested(torch.nn.Module):
        _dit_modules = ("language_model",)
        _encoder_modules = ()
        _vae_modules = ()
        _resident_modules = ("language_model.time_embedder",)

        def __init__(self) -> None:
            super().__init__()
            self.language_model = torch.nn.ModuleDict(
                {"time_embedder": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 4)}
            )

    pipe = Nested()
    components = find_components(pipe)
    inside = {component.name: [*map(id, component.tensors())] for component in components}
    assert inside["language_model"] == [*map(id, pipe.language_model["head"].parameters())]
    assert inside["language_model.time_embedder"] == [*map(id, pipe.language_model["time_embedder"].parameters())]
    assert len(components) == 2
