"""What a model returned at computed steps, and weighted sums of it.

A sum costs one pass over each stored tensor, and no synchronisation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

Tensors = list[torch.Tensor | None]


class Output(NamedTuple):
    """What a computed step returned."""

    place: float
    tensors: Tensors


class OutputForm(NamedTuple):
    """A model's output without its tensors."""

    leaves: tuple[Any, ...]
    """What is not a tensor, and None for each tensor."""
    spec: pytree.TreeSpec
    shell: Any = None
    """An object of the output's class without attributes, if torch cannot take that class apart."""
    is_plain_tuple: bool = False

    def rebuild(self, tensors: Tensors) -> Any:
        """An output of this form with these tensors."""
        leaves = [leaf if value is None else value for leaf, value in zip(self.leaves, tensors, strict=True)]
        if self.is_plain_tuple:  # torch takes longer for that than for the tensors.
            return tuple(leaves)
        output = pytree.tree_unflatten(leaves, self.spec)
        if self.shell is None:
            return output
        rebuilt = copy.copy(self.shell)
        vars(rebuilt).update(output)
        return rebuilt


def take_apart(output: Any) -> tuple[OutputForm, Tensors]:
    """The form of an output and copies of its tensors, which their owner may change."""
    leaves, spec = pytree.tree_flatten(output)
    shell = None
    if leaves and leaves[0] is output and not isinstance(output, torch.Tensor) and hasattr(output, "__dict__"):
        leaves, spec = pytree.tree_flatten(dict(vars(output)))
        shell = copy.copy(output)
        vars(shell).clear()
    tensors = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    rest = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    is_plain_tuple = type(output) is tuple and len(output) == len(leaves) and all(map(is_, output, leaves))
    return OutputForm(rest, spec, shell, is_plain_tuple), tensors


def numbers_in(tensors: Tensors) -> list[torch.Tensor]:
    """Those of an output's tensors that can be forecast."""
    return [tensor for tensor in tensors if tensor is not None and tensor.is_floating_point() and tensor.dim()]


def combined(outputs: Mapping[int, Output], weights: Mapping[int, float]) -> Tensors | None:
    """A weighted sum of outputs, by step; None if one of them is not stored."""
    steps = [step for step in sorted(weights, reverse=True) if weights[step]]
    if not steps or not all(step in outputs for step in steps):
        return None
    parts = zip(*(outputs[step].tensors for step in steps), strict=True)
    return [_sum(list(part), [weights[step] for step in steps]) for part in parts]


def _sum(tensors: Tensors, weights: list[float]) -> torch.Tensor | None:
    newest = tensors[0]
    if newest is None:
        return None
    if not (newest.is_floating_point() or newest.is_complex()):  # Integers cannot be interpolated.
        return newest.clone()
    # Large weights that nearly cancel need 32 bits.
    total = newest.to(torch.promote_types(newest.dtype, torch.float32)) * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        assert tensor is not None
        total.add_(tensor, alpha=weight)
    return total.to(newest.dtype)


def find_outliers(forecast: Tensors | None, output: Any, error: float) -> tuple[bool, ...]:
    """For each image of a batch, whether its forecast is off by more than `error`, relative to the computed output.
    Where nothing can be compared, all are outliers."""
    _, tensors = take_apart(output)
    pairs = [pair for pair in zip(forecast or (), tensors, strict=False) if pair[1] is not None and pair[1].dim()]
    if not pairs:
        return (True,)
    misses = [_miss(guess, value) for guess, value in pairs]
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
