"""In which form is a call given? And where are its tensors put, so that a replay finds them?

Two calls of one form differ in the contents of their tensors alone: they have the same containers, numbers and strings,
and tensors of the same shapes, strides, dtypes and devices. A replay reads its inputs where they were when it was
recorded, so each call's are copied there.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from .. import tree
from ..other_libraries import copy_each
from ..tensors import is_plain


class Unsuitable(Exception):
    """Why something cannot be recorded."""


def read_form(given: Any) -> tuple[Hashable, list[torch.Tensor]]:
    """A key that calls of one form share, and the tensors, each once. Unsuitable if something cannot be compared."""
    found: dict[int, tuple[int, torch.Tensor]] = {}
    return _key(given, found), [tensor for _, tensor in found.values()]


def _key(value: Any, found: dict[int, tuple[int, torch.Tensor]]) -> Hashable:
    if isinstance(value, torch.Tensor):
        place, _ = found.setdefault(id(value), (len(found), value))
        if not is_plain(value) or not tree.is_comparable(value) or value.is_conj() or value.is_neg():
            raise Unsuitable(f"an argument is a {type(value).__name__} of a kind that cannot be copied in place")
        return place, value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (*tree.ATOMS, np.generic)):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), *[_key(part, found) for part in value]
    if type(value) is dict:
        return dict, *[(name, _key(part, found)) for name, part in value.items()]
    leaves = list(tree.leaves(value))
    if any(leaf is value for _, leaf in leaves):
        if isinstance(value, (list, tuple, dict, set, frozenset)) and not value:
            return type(value)
        raise Unsuitable(f"an argument is a {type(value).__name__}, which cannot be compared")
    return type(value), *[(path, _key(leaf, found)) for path, leaf in leaves]


class Places:
    """Where the tensors of a form are put."""

    def __init__(self, given: Any, tensors: list[torch.Tensor]) -> None:
        with torch.inference_mode(False):  # They are written to in whatever mode a call comes.
            made = [_place_for(tensor) for tensor in tensors]
        self._targets = [target for target, _ in made]
        self.tensors = [place for _, place in made]
        self._cuts = [_cut(tensor) for tensor in tensors]
        self._has_cuts = any(self._cuts)
        by_id = {id(tensor): place for tensor, (_, place) in zip(tensors, made, strict=True)}
        self._given: Any = tree.map_tensors(lambda tensor: by_id[id(tensor)], given)
        self.fill(tensors)

    def fill(self, tensors: list[torch.Tensor]) -> None:
        """Copy the tensors of a call in."""
        if self._has_cuts:
            tensors = [tensor[cut] if cut else tensor for tensor, cut in zip(tensors, self._cuts, strict=True)]
        copy_each(self._targets, tensors)

    def given(self) -> Any:
        """What was given, with these places for its tensors; in new lists, which some models empty."""
        return tree.map_tensors(lambda tensor: tensor, self._given)

    @property
    def num_bytes(self) -> int:
        return sum(target.nbytes for target in self._targets)


def _cut(tensor: torch.Tensor) -> tuple[slice, ...]:
    """What of a tensor that repeats itself is there once; nothing if it does not."""
    repeats = [stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tuple(slice(0, 1) if is_repeated else slice(None) for is_repeated in repeats) if any(repeats) else ()


def _place_for(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for a tensor, and that memory in the tensor's form. Unsuitable if its elements overlap."""
    once = tensor[_cut(tensor)]
    spans = sorted((stride, size) for size, stride in zip(once.shape, once.stride(), strict=True) if size > 1)
    end = 0
    for stride, size in spans:
        if stride <= end:
            raise Unsuitable("an argument is a tensor whose elements overlap")
        end += stride * (size - 1)
    target = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device)
    return target, target.expand(tensor.shape) if target.shape != tensor.shape else target


def copied(output: Any) -> Any:
    """An output that no replay overwrites."""
    return tree.map_tensors(torch.clone, output)


def has_same_bits(one: Any, other: Any) -> bool:
    """Whether two outputs are of one form and have the same bits."""
    try:
        (form, ones), (other_form, others) = read_form(one), read_form(other)
    except Unsuitable:
        return False
    return _without_strides(form) == _without_strides(other_form) and all(map(_same, ones, others))


def _without_strides(form: Any) -> Any:
    if isinstance(form, tuple) and len(form) == 5 and isinstance(form[1], torch.Size):
        return form[0], form[1], form[3], form[4]
    return tuple(map(_without_strides, form)) if isinstance(form, tuple) else form


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN is as good as any other number."""
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(flat[0], flat[1])
