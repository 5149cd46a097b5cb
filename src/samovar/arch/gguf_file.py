"""Which weights are in a GGUF file, and do they fit a model? Read from the file's header alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError
from ..files import brief, reading
from ..quantisers import QUANTISERS, converted_names
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
    num_bytes: dict[str, int]
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
    with reading(f"The GGUF file {str(file)!r}", "read"):
        reader = GGUFReader(path)
        field = reader.get_field("general.architecture")
        architecture = "unknown" if field is None else str(field.contents())
    shapes: dict[str, tuple[int, ...]] = {}
    packed: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    num_bytes: dict[str, int] = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        shapes[tensor.name] = shape
        kind = tensor.tensor_type.name
        num_bytes[tensor.name] = int(tensor.n_bytes)
        sizes[kind] = sizes.get(kind, 0) + int(tensor.n_bytes)
        if kind not in _PLAIN:
            block, size = GGML_QUANT_SIZES[tensor.tensor_type]
            packed[tensor.name] = (*shape[:-1], shape[-1] // block * size)
    types = tuple(sorted(sizes, key=lambda kind: -sizes[kind]))
    return GgufFile(path, architecture, shapes, packed, num_bytes, types)


def stored_in(file: GgufFile, name: str, parts: Parts) -> Parts:
    """The components, one of them as it is stored in a file. ModelError if the file is of another model."""
    if name not in parts:
        raise ModelError(f"{file.path} was given for {name!r}; this model has {', '.join(parts)}.")
    part = parts[name]
    if part.module is None or part.kind is not None:
        raise ModelError(f"{file.path} cannot take the place of {name}, which is {part.kind or 'not built'}.")
    _check_types(file)
    return {**parts, name: replace(part, kind=file.kind, stored=_stored(file, part))}


def _check_types(file: GgufFile) -> None:
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES

    known = {*_PLAIN, *(kind.name for kind in SUPPORTED_GGUF_QUANT_TYPES)}
    unknown = [kind for kind in file.types if kind not in known]
    if unknown:
        raise ModelError(
            f"{file.path} holds weights as {', '.join(unknown)}, which diffusers cannot load. Take another file of "
            f"this model; diffusers loads {', '.join(sorted(known))}."
        )


def _stored(file: GgufFile, part: Part) -> Stored:
    assert part.module is not None
    own = {path: tuple(tensor.shape) for path, tensor in part.module.state_dict().items()}
    shapes = _converted(file, file.shapes, part)
    packed = _converted(file, file.shapes | file.bytes_of, part)
    missing = [path for path in own if path not in shapes]
    wrong = [path for path, shape in own.items() if path in shapes and shapes[path] != shape]
    if missing or wrong:
        first = (
            f"it has no {missing[0]}, and {len(missing) - 1} more are missing"
            if missing
            else f"{wrong[0]} is {_times(shapes[wrong[0]])} in it, and {_times(own[wrong[0]])} in the model"
        )
        raise ModelError(
            f"{file.path} is not of this {part.cls.__name__}: {first}. Its architecture is {brief(file.architecture)}, "
            f"with {len(file.shapes)} tensors. Give the file of the model that the folder is of."
        )
    stored: dict[str, dict[str, torch.Tensor | None]] = {}
    for path, shape in packed.items():
        if path in own and shape != own[path]:
            module, _, tensor = path.rpartition(".")
            stored.setdefault(module, {})[tensor] = torch.empty(shape, dtype=torch.uint8, device="meta")
    return stored


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _converted(file: GgufFile, shapes: dict[str, tuple[int, ...]], part: Part) -> dict[str, tuple[int, ...]]:
    """Shapes by the names that diffusers gives the tensors of a file."""
    given: dict[str, Any] = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        found = converted_names(part.cls, part.module, given)
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"{file.path} is not of this {part.cls.__name__}: its names cannot be translated ({error!r}). Its "
            f"architecture is {brief(file.architecture)}, with {len(file.shapes)} tensors."
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in found.items()}
