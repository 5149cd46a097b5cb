"""What is quantised, and how large it becomes: as the real libraries do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import tiny_flux_pipeline
from samovar.arch.modules import tensor_bytes
from samovar.arch.quantised import (
    KINDS,
    as_stored,
    find_kind,
    kinds_within,
    layers_left,
    quantised_layers,
    quantised_parts,
)
from samovar.arch.skeleton import read_skeleton
from samovar.core.errors import SettingError
from samovar.engine.models import load_pipeline
from samovar.engine.quantize import Quantization

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if "cpu" in kind.devices])
def test_sizes_are_those_of_the_loaded_model(folder: Path, name: str, dtype: torch.dtype) -> None:
    pytest.importorskip(KINDS[name].package)
    chosen = {"transformer": name, "text_encoder": name, "text_encoder_2": name}
    pipe = load_pipeline(folder, dtype, quantization=Quantization.read(chosen, CPU))
    _, parts = read_skeleton(str(folder))
    for part in parts.values():
        assert part.module is not None
        part.module.to(dtype)
    with as_stored(quantised_parts(parts, chosen)):
        planned = {component: tensor_bytes([part.module]) for component, part in parts.items() if part.module}
    assert planned == {component: tensor_bytes([getattr(pipe, component)]) for component in parts}
    exact = {component: tensor_bytes([part.module]) for component, part in parts.items() if part.module}
    assert planned["vae"] == exact["vae"]
    assert all(planned[component] < exact[component] for component in chosen), "and comes off again"


def test_what_bitsandbytes_stores() -> None:
    bnb: Any = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(48, 37, bias=False, compress_statistics=False, quant_type="nf4")
    layer.load_state_dict(torch.nn.Linear(48, 37, bias=False).state_dict())
    weight = layer.to("cpu").weight
    real = [weight, weight.quant_state.absmax, weight.quant_state.code]
    planned = KINDS["nf4"].stored_bytes(37, 48, torch.bfloat16)
    assert list(planned.values()) == [tensor.numel() * tensor.element_size() for tensor in real]


def test_layers_outside_of_blocks_stay() -> None:
    _, parts = read_skeleton("FluxTransformer2DModel")
    model = parts["transformer"].module
    assert model is not None
    left = layers_left(model)
    assert {"proj_out", "x_embedder", "norm_out.linear"} <= set(left)
    layers = quantised_layers(model, KINDS["int8"])
    assert "single_transformer_blocks.0.proj_out" in layers, "a layer of that name in a block is another"
    assert not set(left) & set(layers)
    # bitsandbytes is told names, and would spare those in blocks too.
    assert "proj_out" in quantised_layers(model, KINDS["nf4"])
    assert "x_embedder" not in quantised_layers(model, KINDS["nf4"])


def test_what_authors_keep_in_float32_stays(folder: Path) -> None:
    _, parts = read_skeleton(str(folder))
    encoder = parts["text_encoder_2"].module
    assert encoder is not None
    assert layers_left(encoder)
    assert all(path.endswith(".wo") for path in layers_left(encoder)), "T5 keeps these"


def test_a_model_without_blocks_is_quantised_in_all_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    assert quantised_layers(model, KINDS["int8"]) == ["0", "2"]


def test_kinds_by_what_they_lose() -> None:
    assert [kind.name for kind in kinds_within("exact")] == []
    assert [kind.name for kind in kinds_within("int8")] == ["int8", "fp8"]
    assert [kind.name for kind in kinds_within("int4")] == list(KINDS)
    with pytest.raises(SettingError, match=r"loss='int7'. Did you mean 'int8'\?"):
        kinds_within("int7")
    with pytest.raises(SettingError, match=r"'in8' is not one of int8, .* Did you mean 'int8'\?"):
        find_kind("in8")


def test_names_and_twice(folder: Path) -> None:
    _, parts = read_skeleton(str(folder))
    with pytest.raises(SettingError, match=r"'transformr' is not a component .* Did you mean 'transformer'\?"):
        quantised_parts(parts, {"transformr": "int8"})
    with pytest.raises(SettingError, match="transformer is quantised already, as int8"):
        quantised_parts(quantised_parts(parts, {"transformer": "int8"}), {"transformer": "int4"})
