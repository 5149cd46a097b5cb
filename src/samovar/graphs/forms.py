"""In which form is a call given? And where are its tensors put, so that a replay finds them?

Two calls of one form differ in the contents of their tensors alone: they have the same containers, numbers and strings,
and tensors of the same shapes, strides, dtypes and devices. A replay reads its inputs where they were when it was
recorded, so each call's are copied there.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import nested
from ..core.interop import copy_each, memory_of
from ..core.tensor_parts import bits, is_plain
from ..hooks import Steady


class Unsuitable(Exception):
    """Why something cannot be recorded."""


class Given:
    """What a call is given, taken apart."""

    __slots__ = ("rest", "tensors", "value")

    def __init__(self, value: Any) -> None:
        """Unsuitable if something cannot be compared."""
        self.value = value
        self.tensors: list[torch.Tensor] = []
        self.rest: list[Any] = []
        """Everything else, and where the tensors are in it."""
        self._take((value,))
        if len(set(map(id, self.tensors))) < len(self.tensors):
            known = {id(tensor): place for place, tensor in reversed(list(enumerate(self.tensors)))}
            self.rest.append(tuple(known[id(tensor)] for tensor in self.tensors))

    def _take(self, parts: Any) -> None:
        rest, tensors = self.rest, self.tensors
        for part in parts:
            kind = type(part)
            if isinstance(part, torch.Tensor):
                rest.append(torch.Tensor)
                tensors.append(part)
            elif kind in _SIMPLE:
                rest.append(kind)
                rest.append(part)
            elif kind is dict:
                rest += (dict, len(part), *part)
                self._take(part.values())
            elif kind in _SEQUENCES:
                rest += (kind, len(part))
                self._take(part)
            else:
                self._take_other(part)

    def _take_other(self, part: Any) -> None:
        if isinstance(part, _ATOMS):
            # Of the two zeros each is another number.
            self.rest += (type(part), repr(part) if isinstance(part, float) else part)
            return
        leaves = list(nested.leaves(part))
        if not any(leaf is part for _, leaf in leaves):
            self.rest += (type(part), *(path for path, _ in leaves))
            self._take([leaf for _, leaf in leaves])
        elif isinstance(part, (list, tuple, dict, set, frozenset)) and not part:
            self.rest.append(type(part))
        else:
            raise Unsuitable(f"an argument is a {type(part).__name__}, which cannot be compared")

    def is_of(self, form: Form) -> bool:
        """Whether it is of a known form: the same as comparing `form()`, in less time."""
        tensors = self.tensors
        try:
            return (
                self.rest == form.rest
                and list(map(_shape, tensors)) == form.shapes
                and list(map(_stride, tensors)) == form.strides
                and list(map(_kind, tensors)) == form.kinds
                and _PLAIN.issuperset(map(type, tensors))
            )
        except RuntimeError:  # Some tensors have no strides.
            return False

    def form(self) -> Form:
        """Unsuitable if a tensor cannot be copied in place."""
        tensors = self.tensors
        if not all(map(is_plain, tensors)) or any(map(_is_meta, tensors)) or set(map(_layout, tensors)) - _STRIDED:
            raise Unsuitable("an argument is a tensor of a kind that cannot be copied in place")
        try:
            strides = list(map(_stride, tensors))
        except RuntimeError as error:  # Nested ones have none.
            raise Unsuitable("an argument is a tensor without strides") from error
        return Form(self.rest, list(map(_shape, tensors)), strides, list(map(_kind, tensors)))


class Form(NamedTuple):
    """What calls share that differ in the contents of their tensors alone."""

    rest: list[Any]
    """Everything but tensors, and where these are."""
    shapes: list[Any]
    strides: list[Any]
    kinds: list[Any]
    """Dtypes and devices."""

    @property
    def key(self) -> Hashable:
        return tuple(map(tuple, self))


_ATOMS = (*nested.ATOMS, np.generic)
_SIMPLE = frozenset((type(None), bool, int, str))
_SEQUENCES = frozenset((list, tuple, Steady))
_shape, _stride, _is_meta = attrgetter("shape"), torch.Tensor.stride, attrgetter("is_meta")
_kind, _layout = attrgetter("dtype", "device"), attrgetter("layout")
_STRIDED, _PLAIN = {torch.strided}, frozenset((torch.Tensor, torch.nn.Parameter))


class Places:
    """Where the tensors of a form are put."""

    def __init__(self, given: Given) -> None:
        tensors = given.tensors
        with torch.inference_mode(False):  # They are written to in whatever mode a call comes.
            made = {id(tensor): _place_for(tensor) for tensor in tensors}
        self.tensors = [place for _, place in made.values()]
        self._given: Any = nested.map_tensors(lambda tensor: made[id(tensor)][1], given.value)
        steady = {id(tensor) for part in given.value if isinstance(part, Steady) for tensor in part}
        batches: dict[Any, list[int]] = {}
        for number in {id(tensor): number for number, tensor in enumerate(tensors)}.values():
            batches.setdefault((id(tensors[number]) in steady, _kind(tensors[number])), []).append(number)
        self._batches = [
            _Batch([(n, made[id(tensors[n])][0], _cut(tensors[n])) for n in numbers], is_steady)
            for (is_steady, _), numbers in batches.items()
        ]
        self.fill(tensors)
        self.held: list[torch.Tensor] | None = None
        """What was copied in last, until it is used or no longer needed."""

    def fill(self, tensors: list[torch.Tensor]) -> None:
        """Copy the tensors of a call in."""
        self.held = tensors
        for batch in self._batches:
            batch.fill(tensors)

    def leave_out(self, live: set[int]) -> None:
        """Copy no longer what is in none of this memory: a replay does not read it."""
        self._batches = [kept for batch in self._batches if (kept := batch.within(live)) is not None]

    def given(self) -> Any:
        """What was given, with these places for its tensors; in new lists, which some models empty."""
        return nested.map_tensors(lambda tensor: tensor, self._given)

    @property
    def num_bytes(self) -> int:
        return sum(batch.num_bytes for batch in self._batches)


class _Batch:
    """Those tensors of a call that are copied by one kernel: of one dtype, on one device."""

    def __init__(self, parts: list[tuple[int, torch.Tensor, tuple[slice, ...]]], is_steady: bool) -> None:
        """Of each tensor its number in a call, where it is put, and what of it is there once."""
        self._parts, self._is_steady = parts, is_steady
        numbers, targets, cuts = zip(*parts, strict=True)
        self._pick = itemgetter(*numbers, numbers[0])  # Of one number alone it would make no tuple.
        self._targets, self._cuts, self._has_cuts = list(targets), cuts, any(cuts)
        self._there: list[weakref.ref[torch.Tensor]] = []
        """What is in place already, if nobody writes into it."""

    def within(self, live: set[int]) -> _Batch | None:
        """The part of it that is in this memory, if any is."""
        kept = [part for part in self._parts if memory_of(part[1]) in live]
        return _Batch(kept, self._is_steady) if kept else None

    @property
    def num_bytes(self) -> int:
        return sum(target.nbytes for target in self._targets)

    def fill(self, tensors: list[torch.Tensor]) -> None:
        own = self._pick(tensors)[:-1]
        if self._is_steady:
            if self._there and all(map(is_, map(operator.call, self._there), own)):
                return
            self._there = []  # Until all is copied.
        if self._has_cuts:
            own = tuple(tensor[cut] if cut else tensor for tensor, cut in zip(own, self._cuts, strict=True))
        copy_each(self._targets, own)
        if self._is_steady:
            self._there = list(map(weakref.ref, self._pick(tensors)[:-1]))


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
    if isinstance(output, nested.ATOMS):
        return lambda: output
    if isinstance(output, tuple):
        parts = [copier(part) for part in output]
        return lambda: nested.sequence_like(output, [part() for part in parts])
    return lambda: nested.map_tensors(torch.clone, output)


def has_same_bits(one: Any, other: Any) -> bool:
    """Whether two outputs are of one form and have the same bits."""
    try:
        ones, others = Given(one), Given(other)
        forms = [given.form()._replace(strides=[]) for given in (ones, others)]
    except Unsuitable:
        return False
    return forms[0] == forms[1] and all(map(torch.equal, map(bits, ones.tensors), map(bits, others.tensors)))
