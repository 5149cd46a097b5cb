"""What would a skipped step have given? A curve through the last computed ones, extended.

The curve is a polynomial in the noise level, so uneven steps do not matter; order 0 is reuse. Weights that were fitted
beforehand (`samovar.lab.fitting`) replace those of the curve. A forecast costs one pass over each stored tensor, and no
synchronisation.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..trace.passes import Outlook

Forecast = Literal["reuse", "linear", "fitted"]
Target = Literal["residual", "output"]
Tensors = Sequence[torch.Tensor | None]


class _Known(NamedTuple):
    """A computed step."""

    place: float
    tensors: Tensors
    number: int | None


class History:
    """The tensors that the last computed steps gave, with their places."""

    def __init__(self, order: int, damping: float) -> None:
        self._steps: deque[_Known] = deque(maxlen=order + 1)
        self._damping = damping

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> Tensors:
        """What the last computed step gave."""
        return self._steps[-1].tensors

    def push(self, place: float, tensors: Tensors, number: int | None = None) -> None:
        """Add a computed step; the oldest goes when there are as many as the order needs."""
        if self._steps and [_form(t) for t in self._steps[-1].tensors] != [_form(t) for t in tensors]:
            self._steps.clear()
        self._steps.append(_Known(place, tensors, number))

    def forecast(self, place: float) -> Outlook:
        """What a step at this place would give."""
        steps = list(reversed(self._steps))
        weights = polynomial([step.place for step in steps], place)
        damped = [self._damping * weight for weight in weights]
        damped[0] += 1.0 - self._damping
        return Outlook(damped, [step.tensors for step in steps])

    def weighted(self, weights: Mapping[int, float]) -> Outlook | None:
        """A weighted sum of computed steps, by number; None if one of them is not stored."""
        steps = [step for step in reversed(self._steps) if step.number in weights]
        if len(steps) < len(weights):
            return None
        found = [weights[step.number] for step in steps if step.number is not None]
        return Outlook(found, [step.tensors for step in steps], is_precise=True)

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()


def polynomial(places: Sequence[float], place: float) -> list[float]:
    """The weight of each known value in a polynomial through all of them (Lagrange)."""
    if len(set(places)) < len(places):  # Time stood still: no line goes through one point.
        return [1.0] + [0.0] * (len(places) - 1)
    weights = []
    for i, own in enumerate(places):
        weight = 1.0
        for k, other in enumerate(places):
            if k != i:
                weight *= (place - other) / (own - other)
        weights.append(weight)
    return weights


def _form(tensor: torch.Tensor | None) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


class OutputForm(NamedTuple):
    """A model's output without its tensors."""

    leaves: tuple[Any, ...]
    """What is not a tensor, and None for each tensor."""
    spec: pytree.TreeSpec
    shell: Any = None
    """An object of the output's class without attributes, if torch cannot take that class apart."""
    is_plain_tuple: bool = False

    def rebuild(self, outlook: Outlook) -> Any:
        """An output of this form with forecast tensors."""
        values = (outlook.value(index) for index in range(len(self.leaves)))
        leaves = [leaf if value is None else value for leaf, value in zip(self.leaves, values, strict=True)]
        if self.is_plain_tuple:  # torch takes longer for that than for the tensors.
            return tuple(leaves)
        output = pytree.tree_unflatten(leaves, self.spec)
        if self.shell is None:
            return output
        rebuilt = copy.copy(self.shell)
        vars(rebuilt).update(output)
        return rebuilt


def take_apart(output: Any) -> tuple[OutputForm, list[torch.Tensor | None] | None]:
    """The form of an output and copies of its tensors, which their owner may change; None if there are none."""
    leaves, spec = pytree.tree_flatten(output)
    shell = None
    if leaves and leaves[0] is output and not isinstance(output, torch.Tensor) and hasattr(output, "__dict__"):
        leaves, spec = pytree.tree_flatten(dict(vars(output)))
        shell = copy.copy(output)
        vars(shell).clear()
    tensors = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    rest = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    is_known = any(tensor is not None for tensor in tensors)
    is_plain_tuple = type(output) is tuple and len(output) == len(leaves) and all(map(is_, output, leaves))
    return OutputForm(rest, spec, shell, is_plain_tuple), tensors if is_known else None


def find_outliers(outlook: Outlook | None, output: Any, error: float) -> tuple[bool, ...]:
    """For each image of a batch, whether its forecast is off by more than `error`, relative to the computed output.
    Where nothing can be compared, all are outliers."""
    _, tensors = take_apart(output)
    indices = [index for index, tensor in enumerate(tensors or ()) if tensor is not None and tensor.dim()]
    if outlook is None or tensors is None or not indices:
        return (True,)
    misses = [_miss(outlook.value(index), tensors[index]) for index in indices]
    if len({len(miss) for miss in misses}) > 1:  # Not one row for each image.
        misses = [miss.amax().reshape(1) for miss in misses]
    found: list[float] = torch.stack([miss.to(misses[0].device) for miss in misses]).amax(0).tolist()
    return tuple(not miss <= error for miss in found)  # NaN is an outlier.


def _miss(guess: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor:
    """How far off each row is, relative to its size."""
    assert guess is not None
    assert value is not None
    rows, wanted = guess.float().reshape(len(guess), -1), value.float().reshape(len(value), -1)
    sizes = wanted.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((rows - wanted).square().sum(1) / sizes).sqrt()
