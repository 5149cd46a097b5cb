"""A tiny FLUX, quantised by each library that runs on a CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import tiny_flux_pipeline

Quantise = Callable[[torch.nn.Module], torch.nn.Module]
COMPUTE = torch.bfloat16


def plain_flux(seed: int = 0) -> Any:
    """A transformer for the pipeline of `tiny_flux_pipeline`, wide enough for every library's groups."""
    from diffusers import FluxTransformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FluxTransformer2DModel(
            num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=32, in_channels=4,
            joint_attention_dim=12, pooled_projection_dim=8, axes_dims_rope=(8, 12, 12),
        )  # fmt: skip
        for parameter in model.parameters():
            if not parameter.detach().any():
                torch.nn.init.normal_(parameter, std=0.1)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(COMPUTE)
    return model.eval().requires_grad_(False)


def pipeline_with(transformer: torch.nn.Module) -> Any:
    pipe = tiny_flux_pipeline()
    pipe.transformer = transformer
    for part in (pipe.text_encoder, pipe.text_encoder_2, pipe.vae):
        part.to(COMPUTE)
    return pipe


def _in_blocks(name: str) -> bool:
    return "transformer_blocks." in name


def _torchao(make: str, package: str = "torchao.quantization", **settings: Any) -> Quantise:
    def quantise(model: torch.nn.Module) -> torch.nn.Module:
        config = getattr(pytest.importorskip(package), make)(**settings)
        pytest.importorskip("torchao.quantization").quantize_(model, config, filter_fn=_is_linear_in_blocks)
        return model

    return quantise


def _is_linear_in_blocks(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and _in_blocks(name)


def _quanto(weights: str) -> Quantise:
    def quantise(model: torch.nn.Module) -> torch.nn.Module:
        library = pytest.importorskip("optimum.quanto")
        library.quantize(model, weights=getattr(library, weights), include="*transformer_blocks.*")
        library.freeze(model)
        return model

    return quantise


def _bitsandbytes(make: Callable[[Any, torch.nn.Linear], torch.nn.Module]) -> Quantise:
    def quantise(model: torch.nn.Module) -> torch.nn.Module:
        layers = pytest.importorskip("bitsandbytes").nn
        for path, linear in [(p, m) for p, m in model.named_modules() if _is_linear_in_blocks(m, p)]:
            layer = make(layers, linear)
            layer.load_state_dict(linear.state_dict())
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer.to("cpu").eval().requires_grad_(False))
        return model

    return quantise


def _four_bit(layers: Any, linear: torch.nn.Linear) -> torch.nn.Module:
    has_bias = linear.bias is not None
    layer = layers.Linear4bit(linear.in_features, linear.out_features, has_bias, COMPUTE, quant_type="nf4")
    layer.support_avx512bf16_for_cpu = False  # Some processors have a layout of their own.
    return layer


def _packing(layers: Any, linear: torch.nn.Linear) -> torch.nn.Module:
    return layers.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, COMPUTE)


def _eight_bit(layers: Any, linear: torch.nn.Linear) -> torch.nn.Module:
    has_bias = linear.bias is not None
    return layers.Linear8bitLt(linear.in_features, linear.out_features, has_bias, has_fp16_weights=False, threshold=6.0)


def write_gguf(model: Any, file: Path, kind: str) -> None:
    """A GGUF file of a model, with the weights of its blocks quantised."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, "flux")
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        is_quantised = _in_blocks(name) and values.ndim == 2
        quant = gguf.GGMLQuantizationType[kind if is_quantised else "F32"]
        data = gguf.quants.quantize(values, quant) if is_quantised else values
        writer.add_tensor(name, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf(kind: str) -> Quantise:
    def quantise(model: Any) -> torch.nn.Module:
        pytest.importorskip("gguf")
        from diffusers import GGUFQuantizationConfig

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            write_gguf(model, file, kind)
            model.save_config(folder)
            config = GGUFQuantizationConfig(compute_dtype=COMPUTE)
            loaded = type(model).from_single_file(
                str(file), config=folder, quantization_config=config, torch_dtype=COMPUTE
            )
        return loaded.eval().requires_grad_(False)

    return quantise


def _sdnq(weights: str) -> Quantise:
    def quantise(model: torch.nn.Module) -> torch.nn.Module:
        pytest.importorskip("sdnq")
        from sdnq.quantizer import sdnq_post_load_quant

        return sdnq_post_load_quant(model, weights_dtype=weights, minimum_allowed_numel=0)

    return quantise


def _bfl(kind: str) -> Quantise:
    """What diffusers makes of the files that FLUX's authors have quantised."""

    def quantise(model: torch.nn.Module) -> torch.nn.Module:
        library = pytest.importorskip("diffusers.quantizers.bfl.utils")
        for path, linear in [(p, m) for p, m in model.named_modules() if _is_linear_in_blocks(m, p)]:
            has_bias = linear.bias is not None
            layer = library.QUANTIZED_LINEARS[kind](linear.in_features, linear.out_features, has_bias, COMPUTE)
            weight, *scales = getattr(library, f"quantize_{kind}")(linear.weight)
            layer.weight, layer.bias = torch.nn.Parameter(weight, requires_grad=False), linear.bias
            layer._buffers.update(zip(layer._buffers, [*scales, torch.tensor(1.0)], strict=False))
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer.eval())
        return model

    return quantise


def _cast(model: Any) -> torch.nn.Module:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=COMPUTE)
    return model


KINDS: dict[str, Quantise] = {
    "torchao-int8": _torchao("Int8WeightOnlyConfig"),
    "torchao-int8-dynamic": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao-float8": _torchao("Float8WeightOnlyConfig"),
    "torchao-int4": _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao-int4-packed": _torchao(
        "PrototypeInt4WeightOnlyConfig", "torchao.prototype.quantization.int4", group_size=32
    ),
    "torchao-nvfp4": _torchao("NVFP4WeightOnlyConfig", "torchao.prototype.mx_formats"),
    "quanto-int8": _quanto("qint8"),
    "quanto-float8": _quanto("qfloat8"),
    "quanto-int4": _quanto("qint4"),
    "bitsandbytes-nf4": _bitsandbytes(_four_bit),
    "bitsandbytes-nf4-packed": _bitsandbytes(_packing),
    "bitsandbytes-int8": _bitsandbytes(_eight_bit),
    "gguf-q8": _gguf("Q8_0"),
    "gguf-q4": _gguf("Q4_0"),
    "sdnq-int8": _sdnq("int8"),
    "sdnq-uint4": _sdnq("uint4"),
    "bfl-fp8": _bfl("fp8r"),
    "bfl-nvfp4": _bfl("nvfp4"),
    "layerwise-casting": _cast,
}
"""By name: a function that quantises the blocks of a model."""
