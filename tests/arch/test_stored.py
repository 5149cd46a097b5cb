"""What is read of folders that were saved quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import PIPELINES, tiny_flux_pipeline
from samovar.arch.modules import tensor_bytes
from samovar.arch.quantised import as_stored
from samovar.arch.skeleton import read_skeleton
from samovar.arch.stored import Header, read_headers, stored_dtype, stored_for
from samovar.engine.models import load_pipeline
from samovar.engine.quantize import Quantization
from samovar.offload import read_parts
from samovar.trace import survey, survey_pipeline


def save_quantised(folder: Path, kind: str) -> Any:
    """A tiny pipeline that was quantised by a library and saved, and what it is when it is loaded."""
    tiny_flux_pipeline().save_pretrained(folder / "exact")
    if kind == "quanto":
        import diffusers

        pytest.importorskip("optimum.quanto")
        config = diffusers.PipelineQuantizationConfig(
            quant_mapping={"transformer": diffusers.QuantoConfig(weights_dtype="int8")}
        )
        load = diffusers.FluxPipeline.from_pretrained
        pipe = load(folder / "exact", torch_dtype=torch.bfloat16, quantization_config=config)
    else:
        pytest.importorskip({"int4": "sdnq"}.get(kind, "torchao"))
        setting = Quantization.read({"transformer": kind, "text_encoder_2": kind}, torch.device("cpu"))
        pipe = load_pipeline(folder / "exact", torch.bfloat16, quantization=setting)
    pipe.save_pretrained(folder / kind)
    return load_pipeline(folder / kind, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")  # diffusers announces the end of quanto.
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("int8", "torchao Int8WeightOnlyConfig"),
        ("fp8", "torchao Float8WeightOnlyConfig"),
        ("int4", "sdnq uint4"),
        ("quanto", "quanto int8"),
    ],
)
def test_sizes_are_those_of_the_stored_bytes(tmp_path: Path, kind: str, words: str) -> None:
    pipe = save_quantised(tmp_path, kind)
    _, parts = read_skeleton(str(tmp_path / kind))
    assert parts["transformer"].kind == words
    assert parts["vae"].kind is None
    with as_stored(parts):
        sizes = {name: tensor_bytes([part.module]) for name, part in parts.items() if part.module is not None}
    assert sizes == {name: tensor_bytes([getattr(pipe, name)]) for name in parts}
    seen, loaded = survey(str(tmp_path / kind)), survey_pipeline(pipe)
    for one, other in zip(seen.components, loaded.components, strict=True):
        assert (one.num_bytes, one.coverage) == (other.num_bytes, other.coverage), "blocks too"
    assert [f.reason for f in seen.features] == [f.reason for f in loaded.features]


def test_bitsandbytes_folders_are_read_by_their_headers() -> None:
    """diffusers saves such on a GPU only; these are the names that it writes."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, device="meta", dtype=torch.bfloat16))
    headers = {
        "0.weight": Header("U8", (1024, 1)),
        "0.weight.absmax": Header("F32", (32,)),
        "0.weight.quant_state.bitsandbytes__nf4": Header("U8", (79,)),
        "0.bias": Header("BF16", (32,)),
    }
    stored = stored_for(headers, model)["0"]
    assert {name: None if tensor is None else tensor.numel() for name, tensor in stored.items()} == {
        "weight": 1024, "weight.absmax": 128, "weight.quant_state.bitsandbytes__nf4": 79
    }  # fmt: skip
    assert stored_dtype(headers, model) is torch.bfloat16


def test_names_of_older_versions_are_found_again(tmp_path: Path) -> None:
    """transformers saves Qwen2.5-VL's model.language_model and model.visual as model and visual."""
    pytest.importorskip("torchao")
    PIPELINES["qwen-image"].build(0).save_pretrained(tmp_path / "exact")
    setting = Quantization.read({"text_encoder": "int8", "transformer": "int8"}, torch.device("cpu"))
    pipe = load_pipeline(tmp_path / "exact", torch.bfloat16, quantization=setting)
    pipe.save_pretrained(tmp_path / "int8")
    _, parts = read_skeleton(str(tmp_path / "int8"))
    assert "model.layers.0.mlp.down_proj._weight_qdata" in read_headers(tmp_path / "int8" / "text_encoder")
    with as_stored(parts):
        sizes = {name: tensor_bytes([part.module]) for name, part in parts.items() if part.module is not None}
    assert sizes == {name: tensor_bytes([getattr(pipe, name)]) for name in parts}


def test_what_authors_keep_in_float32_is_loaded_so(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    PIPELINES["wan"].build(0).save_pretrained(tmp_path / "exact")
    setting = Quantization.read("int8", torch.device("cpu"))
    for name, quantization in (("exact", None), ("int8", setting)):
        pipe = load_pipeline(tmp_path / "exact", torch.bfloat16, quantization=quantization)
        assert pipe.transformer.condition_embedder.time_embedder.linear_1.weight.dtype is torch.float32
        parts = read_parts(str(tmp_path / "exact"), torch.bfloat16)
        parts = parts if quantization is None else quantization.applied(parts)
        sizes = {name: tensor_bytes([getattr(pipe, name)]) for name in parts}
        with as_stored(parts):
            assert {name: tensor_bytes([part.module]) for name, part in parts.items() if part.module} == sizes, name
    pipe.save_pretrained(tmp_path / "int8")
    _, saved = read_skeleton(str(tmp_path / "int8"))
    with as_stored(saved):
        assert {name: tensor_bytes([part.module]) for name, part in saved.items() if part.module} == sizes
