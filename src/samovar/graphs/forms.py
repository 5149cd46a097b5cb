"""In which form is a call given? And where are its tensors put, so that a replay finds them?

Two calls of one form differ in the contents of their tensors alone: they have the same containers, numbers and strings,
and tensors of the same shapes, strides, dtypes and devices. A replay reads its inputs where they were when it was
recorded, so each call's are copied there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import attrgetter
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
    structure = _structure(given, found)
    tensors = [tensor for _, tensor in found.values()]
    if not all(map(is_plain, tensors)) or any(map(_is_meta, tensors)) or set(map(_layout, tensors)) - _STRIDED:
        raise Unsuitable("an argument is a tensor of a kind that cannot be copied in place")
    try:
        return (structure, tuple(map(_shape, tensors)), tuple(map(_stride, tensors)), *map(_kind, tensors)), tensors
    except RuntimeError as error:  # Nested ones have none.
        raise Unsuitable("an argument is a tensor without strides") from error


_ATOMS = (*tree.ATOMS, np.generic)
_shape, _stride, _is_meta = attrgetter("shape"), torch.Tensor.stride, attrgetter("is_meta")
_kind, _layout = attrgetter("dtype", "device"), attrgetter("layout")
_STRIDED = {torch.strided}


def _structure(value: Any, found: dict[int, tuple[int, torch.Tensor]]) -> Hashable:
    """A value with a number in place of each of its tensors, which are collected."""
    if isinstance(value, torch.Tensor):
        return found.setdefault(id(value), (len(found), value))[0]
    if isinstance(value, _ATOMS):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), *[_structure(part, found) for part in value]
    if type(value) is dict:
        return dict, *value, *[_structure(part, found) for part in value.values()]
    leaves = list(tree.leaves(value))
    if any(leaf is value for _, leaf in leaves):
        if isinstance(value, (list, tuple, dict, set, frozenset)) and not value:
            return type(value)
        raise Unsuitable(f"an argument is a {type(value).__name__}, which cannot be compared")
    return type(value), *[(path, _structure(leaf, found)) for path, leaf in leaves]


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
        self.held: list[torch.Tensor] | None = None
        """What was copied in last, until it is used or no longer needed."""

    def fill(self, tensors: list[torch.Tensor]) -> None:
        """Copy the tensors of a call in."""
        self.held = tensors
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
    if tensor.is_conj() or tensor.is_neg():
        raise Unsuitable("an argument is a tensor that torch conjugates or negates where it is read")
    once = tensor[_cut(tensor)]
    spans = sorted((stride, size) for size, stride in zip(once.shape, once.stride(), strict=True) if size > 1)
    end = 0
    for stride, size in spans:
        if stride <= end:
            raise Unsuitable("an argument is a tensor whose elements overlap")
        end += stride * (size - 1)
    target = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device)
    return target, target.expand(tensor.shape) if target.shape != tensor.shape else target


def copier(output: Any) -> Callable[[], Any]:
    """Makes copies of an output, which no replay overwrites."""
    if isinstance(output, torch.Tensor):
        return output.clone
    if isinstance(output, tree.ATOMS):
        return lambda: output
    if isinstance(output, tuple):
        parts = [copier(part) for part in output]
        return lambda: tree.sequence_like(output, [part() for part in parts])
    return lambda: tree.map_tensors(torch.clone, output)


def has_same_bits(one: Any, other: Any) -> bool:
    """Whether two outputs are of one form and have the same bits."""
    try:
        (form, ones), (other_form, others) = read_form(one), read_form(other)
    except Unsuitable:
        return False
    return _without_strides(form) == _without_strides(other_form) and all(map(_same, ones, others))


def _without_strides(form: Any) -> Any:
    structure, shapes, _, *kinds = form
    return structure, shapes, kinds


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN is as good as any other number."""
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(flat[0], flat[1])
