"""What is the same at every step of a branch, and need not be made again?

Embeddings of text and position, as far as they depend on nothing but the conditioning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..hooks import NOT_BYPASSED
from .trace import OuterCall


class _Kept(NamedTuple):
    output: Any
    versions: list[tuple[torch.Tensor, int]]
    """Its tensors, and how often each had been changed in place."""


class Memo:
    """What modules returned, as long as nobody has changed it."""

    def __init__(self) -> None:
        self._kept: dict[OuterCall, _Kept] = {}

    def keep(self, call: OuterCall, output: Any) -> None:
        """Keep what a module returned."""
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not any(tensor.is_inference() for tensor in tensors):  # Their changes are not counted.
            self._kept[call] = _Kept(output, [(tensor, tensor._version) for tensor in tensors])

    def recall(self, call: OuterCall) -> Any:
        """What it returned, or NOT_BYPASSED."""
        kept = self._kept.get(call)
        if kept is None:
            return NOT_BYPASSED
        for tensor, version in kept.versions:
            if tensor._version != version:
                return NOT_BYPASSED
        return kept.output

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()


def equal(one: Any, other: Any) -> bool:
    """Whether two outputs are the same, bit for bit; what is not a number is not the same."""
    ones, form = pytree.tree_flatten(one)
    others, other_form = pytree.tree_flatten(other)
    return form == other_form and all(map(_same, ones, others))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    # What is neither may hold anything: unless it is a plain value, only the very same will do.
    return one is other or (isinstance(one, (str, int, float, tuple)) and type(one) is type(other) and one == other)
