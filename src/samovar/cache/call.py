"""One call of the denoiser: its arguments by role, and the run, step and branch that it belongs to.

The sample and the time change at every step. Conditioning stays the same: if it changes, a new history begins. Anything
else that changes from step to step, such as the residuals of a ControlNet, affects the output in a way that the sample
does not show; its change counts in proportion to its size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core import nested
from ..hooks import Roles
from ..hooks.roles import Leaves

if TYPE_CHECKING:
    from .run import CachedRun, TeaCacheState

Forward = Callable[[Any, Any], Any]
"""The model's own forward, of arguments and keyword arguments."""


@dataclass(frozen=True)
class Step:
    """A step of a run."""

    index: int
    """From 0."""
    place: float = 0.0
    """Its position by noise level where that is known, else its index."""
    length: float = 1.0
    """How far it goes, likewise."""
    total: int | None = None
    """Number of the scheduler's steps, if known."""
    run_length: int | None = None
    """Number of steps that the run takes: fewer than `total` if it starts half-way."""

    @property
    def first(self) -> int:
        """The index of the run's first step."""
        return 0 if self.total is None or self.run_length is None else max(0, self.total - self.run_length)

    @functools.cached_property
    def is_last(self) -> bool:
        """Whether this is known to be the last step."""
        return self.total is not None and self.index >= self.total - 1


class Call:
    """One call of the denoiser."""

    branch: str
    run: CachedRun
    state: TeaCacheState
    step: Step
    is_again: bool
    """Its branch was already called in this step."""
    has_gap: bool
    """Its branch missed the step before."""
    generation: int
    """That of the model."""

    def __init__(self, forward: Forward, args: Any, kwargs: Any, leaves: Leaves, roles: Roles) -> None:
        self.args, self.kwargs = args, kwargs
        self.samples: list[torch.Tensor] = []
        """The sample, or its parts."""
        self.lists_samples = False
        """Whether the samples are in a list: each is an image then."""
        self.time: torch.Tensor | float | None = None
        """As given. Of several numbers the largest counts: frames that are given are at time 0."""
        self.conditioning: dict[str, Any] = {}
        """What must stay the same, by path."""
        self.residuals: list[torch.Tensor] = []
        """Tensors that may change, and are neither sample nor time."""
        self.tensors = [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)]
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.forward, self._leaves, self._learned = forward, leaves, roles
        self._roles = roles.of_each(leaves)
        for path, role in self._roles.items():
            leaf = leaves[path]
            is_tensor = isinstance(leaf, torch.Tensor)
            if role == "time":
                if isinstance(leaf, (np.generic, np.ndarray)) and leaf.size == 1:
                    leaf = leaf.item()
                if self.time is None and isinstance(leaf, (torch.Tensor, int, float)):
                    self.time = leaf
            elif is_tensor and role == "sample":
                self.samples.append(leaf)
                self.lists_samples = path.rpartition(".")[2].isdigit()
            elif is_tensor and role == "residual" and nested.is_comparable(leaf):
                self.residuals.append(leaf)
            else:
                self.conditioning[path] = leaf

    def compute(self) -> Any:
        """What the model itself returns."""
        return self.forward(self.args, self.kwargs)

    @functools.cached_property
    def signature(self) -> Hashable:
        """Equal for two calls that do the same with their blocks."""
        kind = self.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        form = [
            (path, (leaf.shape, leaf.dtype, leaf.device))
            if type(leaf) is torch.Tensor and not leaf.is_nested
            else (path, leaf if leaf is None else nested.signature(leaf))
            for path, leaf in self._leaves.items()
            if self._roles[path] != "time"
        ]
        return torch.get_autocast_dtype(kind) if casts else None, *form

    def copied(self) -> Call:
        """The same with tensors and containers that nobody else writes into."""
        copies = {id(tensor): tensor.clone() for tensor in self.tensors}
        args, kwargs = nested.map_tensors(
            lambda one: copies[id(one)] if id(one) in copies else one.clone(), (self.args, self.kwargs)
        )
        leaves = {path: copies.get(id(leaf), leaf) for path, leaf in self._leaves.items()}
        return Call(self.forward, args, kwargs, leaves, self._learned)

    def at_another_step(self, output: Any, with_time: bool = True) -> tuple[Any, Any]:
        """Arguments with another sample, and at another time. Where no argument is known to be the sample, it is what
        has the form of the output, or else everything but the time."""
        shapes = {nested.shape(tensor) for tensor in nested.tensors(output)}
        alike = [tensor for tensor in self.tensors if nested.shape(tensor) in shapes]
        samples = set(map(id, [*self.residuals, *(self.samples or alike or self.conditioning.values())]))

        def other(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is self.time:
                return _later(tensor) if with_time else tensor
            is_moved = id(tensor) in samples and tensor.is_floating_point()
            return tensor + torch.ones_like(tensor).cumsum(-1) if is_moved else tensor

        args, kwargs = nested.map_tensors(other, (self.args, self.kwargs))
        return args, kwargs

    def side_effect(self, before: list[torch.Tensor], output: Any) -> str | None:
        """What the forward did that a skipped one would not do, if anything. `before`: copies of its tensors."""
        known = set(map(id, self.tensors))
        is_filled = not known.issuperset(map(id, nested.tensors((self.args, self.kwargs))))
        if is_filled or not all(map(_has_same_numbers, self.tensors, before)):
            return "it writes into its inputs"
        return None if nested.is_transparent(output) else "its output holds objects that cannot be inspected"


def _has_same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN included, where that can be seen."""
    if not nested.is_comparable(one):
        return True
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _later(time: torch.Tensor) -> torch.Tensor:
    """A very different time, whether times go from 0 to 1 or to 1000, which a model that counts in integers takes."""
    if time.is_floating_point():
        half = torch.where(time.abs() > 1.5, 500.0, 0.5)  # In the other half, in case a model rounds it coarsely.
        return torch.where(time > half, 0.3 * time, 1.4 * half + 0.3 * time).to(time.dtype)
    return torch.where(time < 2, 1 - time, time // 8)
