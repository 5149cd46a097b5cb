"""Which tensors does a value hold, whatever it is made of?

Arguments and outputs of models come as tensors, lists, tuples, named tuples, mappings, dataclasses and plain objects
with tensors as attributes, in any nesting. Everybody who looks into them does so through this file.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

_ATOMS: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.memory_format
)  # fmt: skip
"""What holds no tensor and can be compared."""
_OPAQUE: tuple[type, ...] = (
    torch.nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, functools.partial
)  # fmt: skip
"""What may hold tensors that are not the value's own."""
_MOST_LEVELS = 12
"""How deep a value is looked into: objects may hold each other in circles."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a value."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def leaves(value: Any, path: str = "", levels: int = _MOST_LEVELS) -> Iterator[tuple[str, Any]]:
    """Everything in a value that holds nothing else, with a dotted path: tensors, numbers, strings, opaque objects."""
    parts = _parts(value, levels)
    if not parts:
        yield path, value
    for name, part in parts:
        yield from leaves(part, f"{path}.{name}" if path else name, levels - 1)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any, levels: int = _MOST_LEVELS) -> Any:
    """The same value with every tensor replaced. Containers are copied, and the value itself is left alone."""
    if isinstance(value, torch.Tensor):
        return function(value)
    parts = _parts(value, levels)
    if not parts:
        return copy.copy(value) if isinstance(value, (list, dict, set)) else value
    return _with_parts(value, [map_tensors(function, part, levels - 1) for _, part in parts])


def signature(value: Any, levels: int = _MOST_LEVELS) -> Hashable:
    """What two values have in common that differ in nothing but the contents of their tensors and in fractions."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, float):
        return float
    if isinstance(value, _ATOMS):
        return value
    return type(value), *[(name, signature(part, levels - 1)) for name, part in _parts(value, levels)]


def is_transparent(value: Any) -> bool:
    """Whether everything in a value can be seen and compared: an object that is not looked into may hold tensors."""
    return all(isinstance(leaf, (torch.Tensor, *_ATOMS)) or _is_empty(leaf) for _, leaf in leaves(value))


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, bit for bit. NaN equals nothing; an opaque object equals itself alone."""
    ones, others = list(leaves(one)), list(leaves(other))
    return len(ones) == len(others) and all(p == q and _same(a, b) for (p, a), (q, b) in zip(ones, others, strict=True))


def difference(one: Any, other: Any) -> float:
    """The largest relative difference (L2) of the tensors of two values of one form; infinite for other forms."""
    ones, others = list(tensors(one)), list(tensors(other))
    if [t.shape for t in ones] != [t.shape for t in others]:
        return float("inf")
    errors = [
        ((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm().clamp_min(1e-12)).item()
        for a, b in zip(ones, others, strict=True)
    ]
    return max(errors, key=lambda error: (error != error, error), default=0.0)


def without_data(value: Any) -> Any:
    """The form of a value: its tensors on the meta device."""
    return map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), value)


def version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not count, which is under inference mode."""
    return None if tensor.is_inference() else tensor._version


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return one is other or (type(one) is type(other) and (_is_empty(one) or (isinstance(one, _ATOMS) and one == other)))


def _is_empty(value: Any) -> bool:
    return isinstance(value, (list, tuple, Mapping, set, frozenset)) and not value


def _parts(value: Any, levels: int) -> list[tuple[str, Any]]:
    """What a container holds, by name; nothing for what is no container."""
    if levels == 0 or isinstance(value, (torch.Tensor, *_ATOMS)):
        return []
    if isinstance(value, (list, tuple)):
        return [(str(index), part) for index, part in enumerate(value)]
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, _OPAQUE):
        return []
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    return [(name, getattr(value, name)) for name in getattr(type(value), "__dataclass_fields__", ())]


def _with_parts(value: Any, parts: list[Any]) -> Any:
    """A container like this one with other contents."""
    if isinstance(value, (list, tuple)):
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    changed = copy.copy(value)
    if isinstance(value, Mapping):
        for key, part in zip(value, parts, strict=True):
            changed[key] = part
    elif hasattr(value, "__dict__"):
        vars(changed).update(zip(vars(value), parts, strict=True))
    else:
        for name, part in zip(type(value).__dataclass_fields__, parts, strict=True):
            object.__setattr__(changed, name, part)
    return changed
