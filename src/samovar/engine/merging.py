"""Calls of a denoiser that are computed at once: concatenated, run, and split.

Nothing is assumed of a model. Rows of a batch count as independent once calls that were merged have been compared with
the same calls alone, and runs take turns within a model only if it keeps nothing from call to call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
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


@dataclass(frozen=True, eq=False)
class Rows:
    """A call of a denoiser as rows of a batch."""

    given: Given
    forward: Forward
    count: int = 0
    """How many there are; 0 if that is unknown."""
    spread: Given = ((), {})
    """What the call is given, with the one time of all rows once for each."""
    form: Hashable = None
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
        rows = tuple(itertools.starmap(spread, named)), {name: spread(name, value) for name, value in kwargs.items()}
        return cls(given, forward, count, rows, (model, nested.signature(rows)))

    def has(self, value: Any) -> bool:
        """Whether a tensor seems to have a row for each row of the sample. One that only happens to be that long is
        found out when merged and separate calls are compared."""
        return isinstance(value, torch.Tensor) and nested.shape(value)[:1] == (self.count,)

    def fits(self, other: Rows) -> bool:
        """Whether two calls have the same form, and the same values of all that has no rows."""
        if not self.count or self.form != other.form:
            return False
        pairs = zip(nested.leaves(self.spread), nested.leaves(other.spread), strict=True)
        return all(a is b or self.has(a) or nested.equal(a, b) for (_, a), (_, b) in pairs)

    def turned(self) -> Rows:
        """The same call with another sample."""
        sample = next(filter(self.has, nested.tensors(self.spread)))
        return replace(self, spread=nested.map_tensors(lambda t: -t if t is sample else t, self.spread))


def merged(*batch: Rows) -> list[Any] | None:
    """The outputs of calls that are computed at once; None where that fails, as with models that take no merged calls,
    or have no memory for them."""
    first, count = batch[0], batch[0].count
    columns = zip(*(nested.tensors(rows.spread) for rows in batch), strict=True)

    def joined(tensor: torch.Tensor) -> torch.Tensor:
        column = next(columns)
        return torch.cat(column) if first.has(tensor) else tensor

    try:
        output = first.forward(*nested.map_tensors(joined, first.spread))
    except BaseException as error:
        if not isinstance(error, Exception):
            raise
        return None
    if {nested.shape(tensor)[:1] for tensor in nested.tensors(output)} != {(count * len(batch),)}:
        return None
    # Copies: whoever stores its share must not keep all of them in memory.
    starts = range(0, count * len(batch), count)
    return [nested.map_tensors(lambda tensor, at=at: tensor[at : at + count].clone(), output) for at in starts]  # type: ignore[misc]


def are_independent(one: Rows, other: Rows, alone: tuple[Any, Any]) -> bool:
    """Whether two calls give the same beside each other as alone, but for rounding; and the same beside one whose
    sample is turned round: with the same kernels, what is in other rows must not matter at all."""
    together, after, before = merged(one, other), merged(one, other.turned()), merged(one.turned(), other)
    if together is None or after is None or before is None:
        return False
    limit = min(MAX_ROUNDING.get(tensor.dtype, MAX_COARSE_ROUNDING) for tensor in nested.tensors(alone))
    leak, rounding = nested.difference(together, [after[0], before[1]]), nested.difference(together, alone)
    return leak <= MAX_LEAK and rounding <= limit


class KeptState:
    """Whether a model keeps something from one call of its denoiser to the next, as the first calls show."""

    def __init__(self, pipeline: Any) -> None:
        self.problem, self._pipeline = "", pipeline
        self._before: dict[torch.nn.Module, tuple[object, dict[str, list[Any]]]] = {}
        """By denoiser: the run that called it last, and what all modules kept then."""
        self._known = set[torch.nn.Module]()

    def may_wait(self, denoiser: torch.nn.Module) -> bool:
        """Whether other runs may come between two calls of one."""
        return not self.problem and denoiser in self._known

    def note(self, denoiser: torch.nn.Module, run: object) -> None:
        """A denoiser was called. What is compared are two calls of a run with no other one in between; the first may
        set up tables."""
        if self.problem or denoiser in self._known:
            return
        whose, before = self._before.pop(denoiser, (None, {}))
        now = self._kept()
        if whose is not run:
            self._before[denoiser] = run, now
            return
        self._known.add(denoiser)
        changed = next((path for path in now | before if now.get(path, [])[1:] != before.get(path, [])[1:]), None)
        self.problem = "" if changed is None else f"{changed} changes from step to step"

    def _kept(self) -> dict[str, list[Any]]:
        """What modules keep beside their weights, by path: each part, its value or which object it is, and how often a
        tensor was written."""
        parts = [pair for pair in self._pipeline.components.items() if isinstance(pair[1], torch.nn.Module)]
        kept = {}
        for path, module in itertools.chain.from_iterable(part.named_modules(prefix=name) for name, part in parts):
            entries = vars(module).items()
            own = {name: part for name, part in entries if name not in _NOT_STATE and not name.startswith("_samovar")}
            for place, part in nested.leaves(own, path):
                version = nested.version(part) if isinstance(part, torch.Tensor) else None
                kept[place] = [part, part if isinstance(part, nested.ATOMS) else id(part), version]
        return kept


NO_ROWS = Rows(((), {}), lambda args, kwargs: None)
