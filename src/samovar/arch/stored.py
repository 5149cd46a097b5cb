"""The tensors that are stored for a model that was saved quantised. Read from the headers of its files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from .folder import read_header

Stored = Mapping[str, Mapping[str, Tensor | None]]
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


def stored_dtype(headers: Mapping[str, Header], model: Module | None = None) -> torch.dtype:
    """The dtype of most weights on disk, or of most that are a model's own as they are; bfloat16 if there are none."""
    own = None if model is None else {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    counts: Counter[str] = Counter()
    for name, header in headers.items():
        if header.dtype in _DTYPES and (own is None or own.get(name) == header.shape):
            counts[header.dtype] += math.prod(header.shape)
    return _DTYPES[counts.most_common(1)[0][0]] if counts else torch.bfloat16


def stored_for(headers: Mapping[str, Header], model: Module) -> Stored:
    """What is stored in place of a model's weights, for modules of which more or other tensors are stored."""
    modules = dict(model.named_modules())
    found: dict[str, dict[str, Tensor | None]] = {}
    for path, stored in _by_module(headers, modules).items():
        module = modules[path]
        own = {**module._parameters, **module._buffers}
        others = {name: header for name, header in stored.items() if not _is_plain(header, own.get(name))}
        if others:
            kept = (stored.keys() - others.keys()) | module._non_persistent_buffers_set
            found[path] = dict.fromkeys(name for name in own if name not in kept)
            for name, header in others.items():
                found[path][name] = torch.empty(header.num_bytes, dtype=torch.uint8, device="meta")
    return found


def _by_module(headers: Mapping[str, Header], modules: Mapping[str, Module]) -> dict[str, dict[str, Header]]:
    """The tensors in files by the path of the module that they are loaded into. Some models of transformers are saved
    by the names of older versions, which begin otherwise. What belongs nowhere is not loaded."""
    found: dict[str, dict[str, Header]] = {}

    def place(key: str, alike: Callable[[str], Sequence[str]]) -> bool:
        """Whether a tensor has a place, in the one module that is alike to a module in its name."""
        for path, name in _divisions(key):
            paths = alike(path)
            if len(paths) == 1 and _is_of(name, modules[paths[0]]):
                found.setdefault(paths[0], {})[name] = headers[key]
                return True
        return False

    strangers = [key for key in headers if not place(key, lambda path: list(modules.keys() & {path}))]
    ends: dict[str, list[str]] = {}
    for path in modules.keys() - found.keys():
        for end in _ends(path):
            ends.setdefault(end, []).append(path)
    for key in strangers:
        place(key, lambda path: next((ends[end] for end in _ends(path) if end in ends), []))
    return found


def _ends(path: str) -> list[str]:
    """A path, and what is left of it without its first parts."""
    parts = path.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _divisions(key: str) -> Iterator[tuple[str, str]]:
    """The ways to see a name as that of a module and that of a tensor in it, the longest of modules first."""
    parts = key.split(".")
    for cut in range(len(parts) - 1, -1, -1):
        yield ".".join(parts[:cut]), ".".join(parts[cut:])


def _is_of(name: str, module: Module) -> bool:
    """Whether a tensor can be a module's own, or one of several in its place. A layer may have further ones."""
    own = {*module._parameters, *module._buffers}
    return name.partition(".")[0] in own or (bool(own) and not module._modules)


def _is_plain(header: Header, own: Tensor | None) -> bool:
    return own is not None and own.shape == header.shape and header.dtype in _DTYPES
