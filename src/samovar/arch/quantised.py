"""The layers that a quantisation changes, and the tensors that take the place of their weights.

One rule for all kinds: the linear layers inside of blocks are quantised. What is outside (embeddings, the last
projection) holds few weights and stays as it is, and so does what the model's authors keep in float32. A model without
blocks is quantised in all its linear layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Module

from ..core.errors import SettingError, nearest
from ..core.files import check_names
from ..core.interop import kept_in_float32
from .blocks import find_anatomy
from .skeleton import Parts
from .stored import Stored

Loss = Literal["exact", "int8", "int4"]
"""How much may be lost: nothing, what 8 bits lose, or what 4 bits lose."""
GROUP = 64
"""Weights that share a scale: of sdnq as we set it, and of bitsandbytes."""


@dataclass(frozen=True)
class Kind:
    """A way to quantise weights while they are loaded."""

    name: str
    about: str
    package: str
    """The package that does it, one of `QUANTISERS`."""
    loss: Loss
    stored_bytes: Callable[[int, int, torch.dtype], dict[str, int]]
    """What is stored for the weight of a linear layer, tensor by tensor: by outputs, inputs and dtype."""
    devices: tuple[str, ...] = ("cpu", "cuda")


def _int4(outputs: int, inputs: int, dtype: torch.dtype) -> dict[str, int]:
    groups = max(inputs // GROUP, 1)  # As sdnq divides a row: or into as few fewer as divide it evenly.
    while inputs % groups:
        groups -= 1
    scales = outputs * groups * dtype.itemsize
    return {"weight": math.ceil(outputs * inputs / 2), "scale": scales, "zero_point": scales}


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("int8", "8-bit integers, a scale for each row", "torchao", "int8",
             lambda outputs, inputs, _: {"weight": outputs * inputs, "scale": 4 * outputs, "zero_point": outputs}),
        Kind("fp8", "8-bit floats (e4m3), a scale for each row", "torchao", "int8",
             lambda outputs, inputs, _: {"weight": outputs * inputs, "scale": 4 * outputs}),
        Kind("int4", "4-bit integers, a scale for each 64 weights", "sdnq", "int4", _int4),
        Kind("nf4", "4-bit normal floats, a scale for each 64 weights", "bitsandbytes", "int4",
             lambda outputs, inputs, _: {"weight": math.ceil(outputs * inputs / 2),
                                         "absmax": 4 * math.ceil(outputs * inputs / GROUP), "code": 4 * 16},
             devices=("cuda",)),
    )
}  # fmt: skip


def find_kind(name: str) -> Kind:
    """A kind by its name."""
    if name not in KINDS:
        raise SettingError(
            f"quantization={name!r} is not one of {', '.join(KINDS)}, nor a file that ends in .gguf. "
            f"{nearest(name, KINDS)}",
            param="quantization",
        )
    return KINDS[name]


def kinds_within(loss: str) -> list[Kind]:
    """The kinds that lose no more than this."""
    if loss not in get_args(Loss):
        raise SettingError(f"loss={loss!r}. {nearest(str(loss), get_args(Loss))}", param="loss")
    most = get_args(Loss).index(loss)
    return [kind for kind in KINDS.values() if get_args(Loss).index(kind.loss) <= most]


def layers_left(model: Module) -> list[str]:
    """Paths of linear layers that stay as they are."""
    blocks = tuple(f"{path}." for stack in find_anatomy(model).stacks for path in stack.block_paths)
    kept = kept_in_float32(model)
    paths = _linear_layers(model)
    return [path for path in paths if (blocks and not path.startswith(blocks)) or kept.intersection(path.split("."))]


def quantised_layers(model: Module, kind: Kind) -> list[str]:
    """Paths of linear layers that a kind quantises."""
    left = layers_left(model)
    if kind.package != "bitsandbytes":
        return [path for path in _linear_layers(model) if path not in left]
    # It takes names, and compares them with a part of a path too.
    names = spared_names(model, left)
    return [path for path in _linear_layers(model) if not _is_spared(path, names)]


def spared_names(model: Module, left: list[str]) -> list[str]:
    """Of the layers that are to stay, those that can be named to bitsandbytes without sparing layers of blocks too."""
    others = [path for path in _linear_layers(model) if path not in left]
    return [name for name in left if not any(_is_spared(path, [name]) for path in others)]


def _is_spared(path: str, names: list[str]) -> bool:
    return path.rpartition(".")[2] in names or any(f"{name}." in path or name == path for name in names)


def _linear_layers(model: Module) -> list[str]:
    return [path for path, module in model.named_modules() if type(module) is torch.nn.Linear]


def quantised_parts(parts: Parts, kinds: Mapping[str, str]) -> Parts:
    """Components that were built without weights, some of them as if quantised: kinds by component."""
    check_names(kinds, parts, "a component of this model, so it cannot be quantised", param="quantization")
    found = dict(parts)
    for name, kind in kinds.items():
        part = parts[name]
        if part.kind is not None:
            raise _refusal(f"{name} is quantised already, as {part.kind}")
        if part.module is None:
            raise _refusal(f"{name} cannot be planned as {kind}: a checkpoint says how a {part.cls.__name__} is built")
        stored = _stored(part.module, find_kind(kind))
        if not stored:
            raise _refusal(f"{name}, a {part.cls.__name__}, has no linear layers that {kind} would quantise")
        found[name] = replace(part, kind=kind, stored=stored)
    return found


def _refusal(problem: str) -> SettingError:
    return SettingError(f"{problem}. Leave it out of quantization.", param="quantization")


def _stored(model: Module, kind: Kind) -> Stored:
    found: dict[str, dict[str, Tensor]] = {}
    for path in quantised_layers(model, kind):
        weight = model.get_parameter(f"{path}.weight")
        sizes = kind.stored_bytes(weight.shape[0], weight.shape[1], weight.dtype).items()
        found[path] = {name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in sizes}
    return found


@contextlib.contextmanager
def as_stored(parts: Parts) -> Iterator[None]:
    """Put what is stored in the place of the weights that it stands for, so that sizes are those of what is stored."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for part in parts.values():
        for path, tensors in part.stored.items():
            module = part.module.get_submodule(path)  # type: ignore[union-attr]
            for held in (module._parameters, module._buffers):
                before.append((held, dict(held)))
                for name in tensors:
                    held.pop(name, None)
            module._buffers.update({name: tensor for name, tensor in tensors.items() if tensor is not None})
    try:
        yield
    finally:
        for held, own in before:
            held.clear()
            held.update(own)
