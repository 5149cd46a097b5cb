"""Calls of a denoiser that are computed at once: concatenated, run, and split.

Nothing is assumed of a model. Rows of a batch count as independent once calls that were merged have been compared with
the same calls alone, and runs take turns within a model only if it keeps nothing from call to call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core import nested
from ..hooks import role_by_name

MAX_ROUNDING = {torch.float32: 5e-3, torch.float64: 5e-3}
MAX_COARSE_ROUNDING = 0.02
"""How much an output may differ by the rounding of a merged call, relative to its size."""
MAX_LEAK = 1e-5
"""How much it may change by what is in other rows."""
_NOT_STATE = frozenset({"_parameters", "_modules", "config", "training"})
Given = tuple[tuple[Any, ...], dict[str, Any]]
Forward = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Kept = list[tuple[str, Any, int | None]]


@dataclass(frozen=True, eq=False)
class Rows:
    """A call of a denoiser as rows of a batch."""

    given: Given
    """What it is given, with the one time of all rows once for each."""
    count: int
    forward: Forward
    form: Hashable
    """Equal for calls that may be merged, but for the values of what has no rows."""

    @classmethod
    def of(cls, given: Given, names: Sequence[str], forward: Forward, model: Hashable) -> Rows:
        """The rows of a call. `names` are those of the model's parameters, and `model` is the state that it is in."""
        args, kwargs = given
        sample = args[0] if args else kwargs.get(names[0] if names else "")
        count = len(sample) if isinstance(sample, torch.Tensor) and sample.dim() > 1 else 0

        def spread(name: str, value: Any) -> Any:
            is_one = isinstance(value, torch.Tensor) and value.dim() == 0 and role_by_name(name) == "time"
            return value.expand(count) if is_one else value

        named = itertools.zip_longest(names[: len(args)], args, fillvalue="")
        given = tuple(spread(*pair) for pair in named), {name: spread(name, value) for name, value in kwargs.items()}
        return cls(given, count, forward, (model, nested.signature(given)) if count else object())

    def has(self, value: Any) -> bool:
        """Whether a tensor seems to have a row for each row of the sample. One that only happens to be that long is
        found out when merged and separate calls are compared."""
        return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == self.count

    def fits(self, other: Rows) -> bool:
        """Whether two calls have the same form, and the same values of all that has no rows."""
        if self.form != other.form:
            return False
        pairs = zip(nested.leaves(self.given), nested.leaves(other.given), strict=True)
        return all(a is b or self.has(a) or nested.equal(a, b) for (_, a), (_, b) in pairs)

    def turned(self) -> Rows:
        """The same call with another sample."""
        sample = next(tensor for tensor in nested.tensors(self.given) if self.has(tensor))
        return replace(self, given=nested.map_tensors(lambda t: -t if t is sample else t, self.given))


def merged(batch: Sequence[Rows]) -> list[Any] | None:
    """The outputs of calls that are computed at once; None where that fails, as with models that take no merged calls,
    or have no memory for them."""
    first = batch[0]
    columns = zip(*(nested.tensors(rows.given) for rows in batch), strict=True)
    whole = (torch.cat(column) if first.has(column[0]) else column[0] for column in columns)
    try:
        output = first.forward(*nested.map_tensors(lambda _: next(whole), first.given))
    except BaseException as error:
        if not isinstance(error, Exception):
            raise
        return None
    found = list(nested.tensors(output))
    if not found or any(tensor.dim() == 0 or len(tensor) != first.count * len(batch) for tensor in found):
        return None
    # Whoever stores its share must not keep all of them in memory.
    shares = zip(*([part.clone() for part in torch.split(tensor, first.count)] for tensor in found), strict=True)
    return [_with_tensors(output, share) for share in shares]


def _with_tensors(output: Any, share: tuple[torch.Tensor, ...]) -> Any:
    parts = iter(share)
    return nested.map_tensors(lambda _: next(parts), output)


def are_independent(one: Rows, other: Rows, alone: tuple[Any, Any]) -> bool:
    """Whether two calls give the same beside each other as alone, but for rounding; and the same beside one whose
    sample is turned round: with the same kernels, what is in other rows must not matter at all."""
    together, after, before = (merged(pair) for pair in ((one, other), (one, other.turned()), (one.turned(), other)))
    if together is None or after is None or before is None:
        return False
    dtypes = {tensor.dtype for tensor in nested.tensors(alone)}
    limit = min(MAX_ROUNDING.get(dtype, MAX_COARSE_ROUNDING) for dtype in dtypes)
    leaks = map(nested.difference, together, (after[0], before[1]))
    roundings = map(nested.difference, together, alone)
    return all(leak <= MAX_LEAK for leak in leaks) and all(rounding <= limit for rounding in roundings)


class KeptState:
    """Whether a model keeps something from one call of its denoiser to the next, as the first calls show."""

    def __init__(self, components: Mapping[str, Any]) -> None:
        self.problem = ""
        self._modules = [
            (f"{name}.{path}".rstrip("."), module)
            for name, part in components.items()
            if isinstance(part, torch.nn.Module)
            for path, module in part.named_modules()
        ]
        self._before: dict[int, tuple[object, dict[str, Kept]]] = {}
        """By denoiser: the run that called it last, and what all modules kept then."""
        self._known: set[int] = set()

    def may_wait(self, denoiser: torch.nn.Module) -> bool:
        """Whether other runs may come between two calls of one."""
        return not self.problem and id(denoiser) in self._known

    def note(self, denoiser: torch.nn.Module, run: object) -> None:
        """A denoiser was called. What is compared are two calls of a run with no other one in between; the first may
        set up tables."""
        if self.problem or id(denoiser) in self._known:
            return
        now = {path: _kept_by(part) for path, part in self._modules}
        whose, before = self._before.pop(id(denoiser), (None, now))
        if whose is not run:
            self._before[id(denoiser)] = run, now
            return
        self._known.add(id(denoiser))
        changed = next((path for path in now if not _is_same(now[path], before[path])), None)
        self.problem = "" if changed is None else f"{changed} keeps something from step to step"


def _kept_by(module: torch.nn.Module) -> Kept:
    """What a module keeps beside its weights: the parts, and how often tensors were written."""
    kept = {name: value for name, value in vars(module).items() if name not in _NOT_STATE and name[:8] != "_samovar"}
    return [
        (path, leaf, nested.version(leaf) if isinstance(leaf, torch.Tensor) else None)
        for path, leaf in nested.leaves(kept)
    ]


def _is_same(one: Kept, other: Kept) -> bool:
    """Whether a module keeps the same objects, unwritten, and equal numbers and texts."""
    return len(one) == len(other) and all(
        path == then and version == before and (a is b or (isinstance(a, nested.ATOMS) and a == b))
        for (path, a, version), (then, b, before) in zip(one, other, strict=True)
    )
