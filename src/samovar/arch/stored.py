"""Which tensors are stored for a model that was saved quantised? Read from the headers of its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from .folder import read_header

Stored = Mapping[str, Mapping[str, torch.Tensor | None]]
"""By the path of a module: tensors on the meta device in place of its own of these names; None for one that is gone."""
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
"""Bytes of an element; all others have one."""


class Header(NamedTuple):
    """What a file says of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _SIZES.get(self.dtype, 1)


def read_headers(folder: Path) -> dict[str, Header]:
    """The tensors in the safetensors files of a folder, by name."""
    # Variants such as model.fp16.safetensors come last: the plain file is the one that is loaded by default.
    files = sorted(folder.glob("*.safetensors"), key=lambda file: (file.name.count("."), file.name))
    found: dict[str, Header] = {}
    for file in files:
        found = {name: Header(*header) for name, header in read_header(file).items()} | found
    return found


def stored_dtype(headers: Mapping[str, Header], model: torch.nn.Module | None = None) -> torch.dtype:
    """The dtype of the weights on disk, or of those that are a model's own as they are; bfloat16 if there are none."""
    own = None if model is None else {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    plain = [h.dtype for name, h in headers.items() if h.dtype in _DTYPES and (own is None or own.get(name) == h.shape)]
    return _DTYPES[plain[0]] if plain else torch.bfloat16


def stored_for(headers: Mapping[str, Header], model: torch.nn.Module) -> Stored:
    """What is stored in place of a model's weights, for modules of which more or other tensors are stored."""
    modules = dict(model.named_modules())
    of_module: dict[str, dict[str, Header]] = {}
    for key, header in headers.items():
        owner = key.rpartition(".")[0]
        while owner not in modules:
            owner = owner.rpartition(".")[0]
        of_module.setdefault(owner, {})[key[len(owner) :].lstrip(".")] = header
    found: dict[str, dict[str, torch.Tensor | None]] = {}
    for path, stored in of_module.items():
        module = modules[path]
        own = {**module._parameters, **module._buffers}
        same = {name for name, header in stored.items() if _is_plain(header, own.get(name))}
        others = {name: header for name, header in stored.items() if name not in same}
        if others:
            found[path] = {name: None for name in own if name not in same}
            found[path] |= {
                name: torch.empty(header.num_bytes, dtype=torch.uint8, device="meta") for name, header in others.items()
            }
    return found


def _is_plain(header: Header, own: torch.Tensor | None) -> bool:
    return own is not None and own.shape == header.shape and header.dtype in _DTYPES
