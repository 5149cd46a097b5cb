"""What the denoiser is called with, by role.

The sample and the time change at every step. Conditioning stays the same: if it changes, a new history begins. Anything
else that changes from step to step, such as the residuals of a ControlNet, affects the output in a way that the sample
does not show; its change counts in proportion to its size.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from ..core import nested
from ..hooks import Roles
from ..hooks.roles import leaves_of

_MAX_COMPARED = 16384
"""Number of elements compared to see how much a tensor has changed."""
Pair = Sequence[torch.Tensor] | torch.Tensor
"""How much something changed, and how large it was, as sums."""


class Inputs:
    """The arguments of one call of a denoiser."""

    def __init__(self, args: Any, kwargs: Any, names: tuple[str, ...], roles: Roles) -> None:
        """`names`: the parameters of the model's forward."""
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
        self._learned, self._names = roles, names
        self._leaves = leaves_of(names, args, kwargs)
        self.tensors = [leaf for leaf in self._leaves.values() if isinstance(leaf, torch.Tensor)]
        self._roles = roles.of_each(self._leaves)
        for path, leaf in self._leaves.items():
            role, is_tensor = self._roles[path], isinstance(leaf, torch.Tensor)
            if role == "time":
                self.time = _as_time(leaf) if self.time is None else self.time
            elif is_tensor and role == "sample":
                self.samples.append(leaf)
                self.lists_samples = path.rpartition(".")[2].isdigit()
            elif is_tensor and role == "residual" and nested.is_comparable(leaf):
                self.residuals.append(leaf)
            else:
                self.conditioning[path] = leaf

    @functools.cached_property
    def signature(self) -> Hashable:
        """Equal for two calls that do the same with their blocks."""
        kind = self.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        form = [(path, nested.signature(leaf)) for path, leaf in self._leaves.items() if self._roles[path] != "time"]
        return torch.get_autocast_dtype(kind) if casts else None, *form

    @functools.cached_property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    def copied(self) -> Inputs:
        """The same with tensors and containers that nobody else writes into."""
        args, kwargs = nested.map_tensors(torch.clone, (self.args, self.kwargs))
        return Inputs(args, kwargs, self._names, self._learned)

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


def _as_time(leaf: Any) -> torch.Tensor | float | None:
    if isinstance(leaf, (np.generic, np.ndarray)) and leaf.size == 1:
        leaf = leaf.item()
    return leaf if isinstance(leaf, (torch.Tensor, int, float)) else None


def _later(time: torch.Tensor) -> torch.Tensor:
    """A very different time, whether times go from 0 to 1 or to 1000, which a model that counts in integers takes."""
    if time.is_floating_point():
        half = torch.where(time.abs() > 1.5, 500.0, 0.5)  # In the other half, in case a model rounds it coarsely.
        return torch.where(time > half, 0.3 * time, 1.4 * half + 0.3 * time).to(time.dtype)
    return torch.where(time < 2, 1 - time, time // 8)


def size(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the absolute values of a tensor."""
    narrow = tensor.float() if tensor.dtype == torch.float64 else tensor  # torch does not narrow on the way.
    total: torch.Tensor = torch.linalg.vector_norm(narrow, 1, dtype=torch.float32)
    return total


def some(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of elements spread over a tensor: few enough to keep, and enough to show how much it has changed."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return nested.spread(real, _MAX_COMPARED).to(torch.float32, copy=True)
