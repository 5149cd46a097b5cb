"""What tensors are in a model's arguments and outputs?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .failures import ShardingError

_MOST_DIFFERENT = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far, relative to its norm, an output may be from another that should be the same."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with every tensor changed, in the same order as `tensors_in`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)(**{key: map_tensors(part, change) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def signature_of(value: Any) -> Any:
    """What the course of a forward depends on: the shapes of all tensors and the values of all else."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((key, signature_of(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(signature_of, value))
    return value if isinstance(value, (str, int, bool, type(None))) else type(value)


def difference(one: Any, other: Any) -> float:
    """The greatest difference between the tensors of two outputs, relative to their norm."""
    apart = 0.0
    for a, b in zip(tensors_in(one), tensors_in(other), strict=True):
        if a.shape != b.shape:
            raise ShardingError(f"the output has shape {tuple(a.shape)} and not {tuple(b.shape)}")
        if a.is_floating_point():
            if not torch.isfinite(a).all() and torch.isfinite(b).all():
                return float("inf")
            apart = max(apart, float((a - b).float().norm() / b.float().norm().clamp_min(1e-20)))
    return apart


def most_different(value: Any) -> float:
    """How far an output of this precision may be from another that should be the same."""
    return max((_MOST_DIFFERENT.get(tensor.dtype, 1e-4) for tensor in tensors_in(value)), default=0.0)


def is_close(one: Any, other: Any) -> bool:
    """Whether two outputs are the same but for rounding."""
    try:
        return difference(one, other) <= most_different(other)
    except (ShardingError, ValueError):  # Of other shapes, or another number of tensors.
        return False
