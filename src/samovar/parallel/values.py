"""Are two outputs the same but for rounding?"""

from __future__ import annotations

from typing import Any

import torch

from ..tree import tensors
from .failures import ShardingError

_MOST_DIFFERENT = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far, relative to its norm, an output may be from another that should be the same."""


def difference(one: Any, other: Any) -> float:
    """The greatest difference between the tensors of two outputs, relative to their norm."""
    apart = 0.0
    for a, b in zip(tensors(one), tensors(other), strict=True):
        if a.shape != b.shape:
            raise ShardingError(f"the output has shape {tuple(a.shape)} and not {tuple(b.shape)}")
        if a.is_floating_point():
            if not torch.isfinite(a).all() and torch.isfinite(b).all():
                return float("inf")
            apart = max(apart, float((a - b).float().norm() / b.float().norm().clamp_min(1e-20)))
    return apart


def most_different(value: Any) -> float:
    """How far an output of this precision may be from another that should be the same."""
    return max((_MOST_DIFFERENT.get(tensor.dtype, 1e-4) for tensor in tensors(value)), default=0.0)


def is_close(one: Any, other: Any) -> bool:
    """Whether two outputs are the same but for rounding."""
    try:
        return difference(one, other) <= most_different(other)
    except (ShardingError, ValueError):  # Of other shapes, or another number of tensors.
        return False
