"""The tensors that a value holds, whatever it is made of.

Arguments and outputs of models come as tensors, lists, tuples, named tuples, mappings, dataclasses and plain objects
with tensors as attributes, in any nesting. All code that looks into them does so through this file.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from .errors import ModelError

ATOMS: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.memory_format
)  # fmt: skip
"""What holds no tensor and can be compared."""
_KNOWN = (torch.Tensor, *ATOMS)
_OPAQUE: tuple[type, ...] = (
    torch.nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, functools.partial
)  # fmt: skip
"""What may hold tensors that are not the value's own."""
_MAX_DEPTH = 12
"""How deep a value is looked into."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a value."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def leaves(value: Any, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Everything in a value that holds nothing else, with a dotted path: tensors, numbers, strings, opaque objects, and
    objects that hold themselves."""
    parts = _parts(value, above)
    if not parts:
        yield path, value
    for name, part in parts:
        yield from leaves(part, f"{path}.{name}" if path else name, (*above, id(value)))


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any, above: tuple[int, ...] = ()) -> Any:
    """The same value with every tensor replaced. Lists and dictionaries are copied, and so are other containers if a
    tensor in them is replaced; the value itself is left alone. ModelError if a container cannot be copied."""
    if isinstance(value, torch.Tensor):
        return function(value)
    parts = _parts(value, above)
    if not parts:
        return copy.copy(value) if type(value) in (list, dict, set) else value
    mapped = [map_tensors(function, part, (*above, id(value))) for _, part in parts]
    if type(value) not in (list, dict) and all(one is part for one, (_, part) in zip(mapped, parts, strict=True)):
        return value
    try:
        return _with_parts(value, mapped)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ModelError(f"an argument or output of type {type(value).__name__} cannot be copied ({error})") from error


def sequence_like(value: Any, parts: list[Any]) -> Any:
    """A list, tuple or named tuple like this one with other contents."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape of a tensor; of a nested tensor, the shapes of its parts."""
    if tensor.is_nested and tensor.layout == torch.strided:  # It has no shape that can be read.
        return tuple(map(tuple, tensor._nested_tensor_size().tolist()))
    return tuple(tensor.shape)


def signature(value: Any, *, exact: bool = False, above: tuple[int, ...] = ()) -> Hashable:
    """Equal for two values that differ only in the contents of tensors and in the values of floats; if `exact`, in the
    contents of tensors alone. An object that is not looked into is known by its type."""
    if isinstance(value, torch.Tensor):
        form = shape(value), value.dtype, value.device
        return (*form, value.stride()) if exact else form
    if isinstance(value, float):  # Of the two zeros each is another number.
        return (float, repr(value)) if exact else float
    if isinstance(value, ATOMS):
        return (type(value), value) if exact else value
    inside = (*above, id(value))
    return type(value), *((name, signature(part, exact=exact, above=inside)) for name, part in _parts(value, above))


def is_transparent(value: Any) -> bool:
    """Whether everything in a value can be seen and compared: an object that is not looked into may hold tensors."""
    return all(isinstance(leaf, _KNOWN) or _is_empty(leaf) for _, leaf in leaves(value))


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, bit for bit. NaN equals nothing; an opaque object equals itself alone."""
    ones, others = list(leaves(one)), list(leaves(other))
    return len(ones) == len(others) and all(
        p == q and same_leaf(a, b) for (p, a), (q, b) in zip(ones, others, strict=True)
    )


def difference(one: Any, other: Any) -> float:
    """The largest relative difference (L2) of the tensors of two values of one form; infinite for other forms."""
    ones, others = list(tensors(one)), list(tensors(other))
    if [shape(t) for t in ones] != [shape(t) for t in others] or any(t.is_nested for t in ones):
        return float("inf")
    errors = [
        ((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm().clamp_min(1e-12)).item()
        for a, b in zip(ones, others, strict=True)
    ]
    return max(errors, key=lambda error: (error != error, error), default=0.0)


def without_data(value: Any) -> Any:
    """The form of a value: its tensors on the meta device."""
    return map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), value)


def is_comparable(tensor: torch.Tensor) -> bool:
    """Whether the contents of a tensor can be read as plain numbers."""
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested


def spread(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Elements spread over a tensor, `most` of them or fewer. The distance is odd, since an even one would miss some
    channels altogether."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // most) | 1]


def version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None under inference mode, where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def same_leaf(one: Any, other: Any) -> bool:
    """Whether two leaves are equal; what holds anything else equals itself alone."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.is_nested or other.is_nested:
            return one is other
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return one is other or (
        type(one) is type(other) and (one == other if isinstance(one, ATOMS) else _is_empty(one) and not other)
    )


def _is_empty(value: Any) -> bool:
    return isinstance(value, (list, tuple, Mapping, set, frozenset)) and not value


def _parts(value: Any, above: tuple[int, ...]) -> list[tuple[str, Any]]:
    """The contents of a container, by name; nothing if the value is not a container, or is inside itself."""
    if isinstance(value, _KNOWN) or len(above) >= _MAX_DEPTH or id(value) in above:
        return []
    if isinstance(value, (list, tuple)):
        return [(str(index), part) for index, part in enumerate(value)]
    if isinstance(value, (dict, types.MappingProxyType)):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, _OPAQUE):
        return []
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    return [(name, getattr(value, name)) for name in getattr(type(value), "__dataclass_fields__", ())]


def _with_parts(value: Any, parts: list[Any]) -> Any:
    """A container like this one with other contents."""
    if isinstance(value, (list, tuple)):
        return sequence_like(value, parts)
    if isinstance(value, types.MappingProxyType):
        return types.MappingProxyType(dict(zip(value, parts, strict=True)))
    changed = copy.copy(value)
    if isinstance(value, dict):
        for key, part in zip(value, parts, strict=True):
            changed[key] = part
        return changed
    for (name, _), part in zip(_parts(value, ()), parts, strict=True):
        object.__setattr__(changed, name, part)  # It may be frozen.
    return changed
