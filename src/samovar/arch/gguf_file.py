"""The weights in a GGUF file, and whether they fit a model. Read from the file's header alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ModelError
from ..core.files import brief, reading
from ..core.quantisers import QUANTISERS, converted_names, is_loadable_from_a_file, left_out
from .skeleton import Part, Parts
from .stored import Stored

_PLAIN = {"F32": torch.float32, "F16": torch.float16}
"""Types that are loaded as plain tensors."""


@dataclass(frozen=True)
class GgufFile:
    """The header of a file."""

    path: Path
    architecture: str
    """The model's name as the file gives it, such as "flux"."""
    shapes: dict[str, tuple[int, ...]]
    bytes_of: dict[str, tuple[int, ...]]
    """The same in bytes along the last dimension, for tensors that are quantised."""
    types: tuple[str, ...]
    """All types in it, the most used first."""

    @property
    def kind(self) -> str:
        """In a few words."""
        return f"gguf {', '.join(self.types)}"


def read_gguf(file: str | Path) -> GgufFile:
    """The header of a file. ModelError if it is none or broken."""
    path = Path(file).expanduser()
    try:
        from gguf import GGML_QUANT_SIZES, GGUFReader
    except ImportError as error:
        needs = QUANTISERS["gguf"].requirement
        raise ModelError(f"{str(file)!r} cannot be read without gguf: pip install '{needs}'") from error
    with reading(f"The GGUF file {str(file)!r}", "read", "It is broken or cut short: download it again."):
        reader = GGUFReader(path)
        field = reader.get_field("general.architecture")
        architecture = "unknown" if field is None else str(field.contents())
    shapes, packed, sizes = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]](), Counter[str]()
    for tensor in reader.tensors:
        kind, (*outer, width) = tensor.tensor_type.name, map(int, reversed(tensor.shape))
        shapes[tensor.name] = (*outer, width)
        sizes[kind] += int(tensor.n_bytes)
        if kind not in _PLAIN:
            block, size = GGML_QUANT_SIZES[tensor.tensor_type]
            packed[tensor.name] = (*outer, width // block * size)
    if not shapes:
        raise ModelError(f"The GGUF file {str(file)!r} holds no weights. Give the file of a model.")
    return GgufFile(path, architecture, shapes, packed, tuple(kind for kind, _ in sizes.most_common()))


def stored_in(file: GgufFile, name: str, parts: Parts) -> Parts:
    """The components, one of them as it is stored in a file. ModelError if the file is of another model."""
    if name not in parts:
        raise ModelError(f"{file.path} was given for {name!r}; this model has {', '.join(parts)}.")
    part = parts[name]
    if part.module is None or part.kind is not None:
        raise ModelError(f"{file.path} cannot take the place of {name}, which is {part.kind or 'not built'}.")
    if not is_loadable_from_a_file(part.cls):
        raise ModelError(
            f"{file.path} cannot take the place of {name}: diffusers cannot load a {part.cls.__name__} from a single "
            f"file. Quantise it by kind, such as {name}=int8."
        )
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES

    known = {*_PLAIN, *(kind.name for kind in SUPPORTED_GGUF_QUANT_TYPES)}
    if unknown := sorted(set(file.types) - known):
        raise ModelError(
            f"{file.path} holds weights as {', '.join(unknown)}, which diffusers cannot load. Take another file of "
            f"this model; diffusers loads {', '.join(sorted(known))}."
        )
    return {**parts, name: replace(part, kind=file.kind, stored=_stored(file, part))}


def _stored(file: GgufFile, part: Part) -> Stored:
    assert part.module is not None
    own = {path: tuple(tensor.shape) for path, tensor in part.module.state_dict().items()}
    shapes = _converted(file, file.shapes, part)
    packed = _converted(file, file.shapes | file.bytes_of, part)
    if problem := _difference(own, shapes, part.cls):
        raise _of_another_model(file, part, problem)
    stored: dict[str, dict[str, Tensor | None]] = {}
    for path, shape in packed.items():
        if path in own and shape != own[path]:
            module, _, tensor = path.rpartition(".")
            stored.setdefault(module, {})[tensor] = torch.empty(shape, dtype=torch.uint8, device="meta")
    return stored


def _difference(own: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], cls: type) -> str:
    """Why the tensors of a file are not those of a model; empty if they are. diffusers would leave out what is over."""
    if missing := own.keys() - shapes.keys():
        return f"it has no {_first(missing)}"
    if wrong := [path for path, shape in own.items() if shapes[path] != shape]:
        return f"{wrong[0]} is {_times(shapes[wrong[0]])} in it, and {_times(own[wrong[0]])} in the model"
    # A single number is a mark that somebody's converter left.
    over = {path for path in shapes.keys() - own.keys() if math.prod(shapes[path]) > 1 and not left_out(cls, path)}
    return f"it has {_first(over)}, which the model does not have" if over else ""


def _first(paths: Set[str]) -> str:
    return f"{min(paths)} (and {len(paths) - 1} more)" if len(paths) > 1 else min(paths)


def _of_another_model(file: GgufFile, part: Part, problem: str) -> ModelError:
    return ModelError(
        f"{file.path} is not of this {part.cls.__name__}: {problem}. Its architecture is {brief(file.architecture)}, "
        f"with {len(file.shapes)} tensors. Give the file of the model that the folder is of."
    )


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _converted(file: GgufFile, shapes: dict[str, tuple[int, ...]], part: Part) -> dict[str, tuple[int, ...]]:
    """Shapes by the names that diffusers gives the tensors of a file."""
    given: dict[str, Any] = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        found = converted_names(part.cls, part.module, given)
    except (KeyError, IndexError, RuntimeError, ValueError) as error:  # It looks for names that are not there.
        raise _of_another_model(file, part, f"diffusers cannot translate names such as {min(shapes)}") from error
    return {name: tuple(tensor.shape) for name, tensor in found.items()}
