"""Quantised linear layers of a model's blocks, by each library, for benchmarks.

Weights are quantised where they are, on the device, in seconds. What a kind needs is imported only for that kind.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Quantise = Callable[[Any, torch.dtype], None]


def linears(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """The linear layers in the blocks, each with its parent and its name there."""
    for path, module in list(model.named_modules()):
        for name, layer in module.named_children():
            if type(layer) is torch.nn.Linear and "blocks." in f"{path}.":
                yield module, name, layer


def _torchao(make: str, **settings: Any) -> Quantise:
    def quantise(model: Any, dtype: torch.dtype) -> None:
        library = importlib.import_module("torchao.quantization")
        config = getattr(library, make)(**settings)
        for _, _, layer in linears(model):
            library.quantize_(layer, copy.deepcopy(config))

    return quantise


def _cast(model: Any, dtype: torch.dtype) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)


def _gguf(kind: str) -> Quantise:
    def quantise(model: Any, dtype: torch.dtype) -> None:
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
        from gguf import GGMLQuantizationType

        pack = {"Q8_0": _q8, "Q4_0": _q4}[kind]
        for parent, name, layer in linears(model):
            with torch.device("meta"):
                made = GGUFLinear(layer.in_features, layer.out_features, layer.bias is not None, dtype)
            packed = pack(layer.weight.detach().float())
            made.weight = GGUFParameter(packed, quant_type=GGMLQuantizationType[kind])
            made.bias = layer.bias
            setattr(parent, name, made.requires_grad_(False))

    return quantise


def _q8(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 numbers: a scale in float16, and a byte each."""
    blocks = weight.view(len(weight), -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    bytes_ = (blocks / scale).round().to(torch.int8).view(torch.uint8)
    return torch.cat([scale.half().view(torch.uint8), bytes_], -1).flatten(1)


def _q4(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 numbers: a scale in float16, and half a byte each, the first 16 in the lower halves."""
    blocks = weight.view(len(weight), -1, 32)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    halves = (blocks / scale + 8.5).clamp(0, 15).to(torch.uint8)
    bytes_ = halves[..., :16] | halves[..., 16:] << 4
    return torch.cat([scale.half().view(torch.uint8), bytes_], -1).flatten(1)


def _bitsandbytes(make: Callable[[Any, torch.nn.Linear, torch.dtype], Any]) -> Quantise:
    def quantise(model: Any, dtype: torch.dtype) -> None:
        layers = importlib.import_module("bitsandbytes").nn
        for parent, name, layer in linears(model):
            with torch.device("meta"):
                made = make(layers, layer, dtype)
            if isinstance(made, layers.Linear4bit):
                weight = layers.Params4bit(layer.weight.data, quant_type="nf4", module=made)
            else:  # It quantises only what comes from the host.
                weight = layers.Int8Params(layer.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
            made.weight, made.bias = weight.to(layer.weight.device), layer.bias
            setattr(parent, name, made.eval().requires_grad_(False))

    return quantise


def _four_bit(layers: Any, layer: torch.nn.Linear, dtype: torch.dtype) -> Any:
    return layers.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, dtype, quant_type="nf4")


def _eight_bit(layers: Any, layer: torch.nn.Linear, dtype: torch.dtype) -> Any:
    bias = layer.bias is not None
    return layers.Linear8bitLt(layer.in_features, layer.out_features, bias, has_fp16_weights=False, threshold=6.0)


def _sdnq(weights: str) -> Quantise:
    def quantise(model: Any, dtype: torch.dtype) -> None:
        library = importlib.import_module("sdnq.quantizer")
        for part in (part for part in model.children() if isinstance(part, torch.nn.ModuleList)):
            library.sdnq_post_load_quant(part, weights_dtype=weights, torch_dtype=dtype, add_skip_keys=False)

    return quantise


QUANTISERS: dict[str, Quantise] = {
    "int8": _torchao("Int8WeightOnlyConfig"),
    "int8-dynamic": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "fp8": _torchao("Float8WeightOnlyConfig"),
    "fp8-cast": _cast,
    "int4": _torchao("Int4WeightOnlyConfig", group_size=128, int4_packing_format="tile_packed_to_4d"),
    "nf4": _bitsandbytes(_four_bit),
    "bnb-int8": _bitsandbytes(_eight_bit),
    "gguf-q8": _gguf("Q8_0"),
    "gguf-q4": _gguf("Q4_0"),
    "sdnq-int8": _sdnq("int8"),
    "sdnq-uint4": _sdnq("uint4"),
}
"""Of torchao, diffusers, bitsandbytes, diffusers with gguf, and sdnq."""
