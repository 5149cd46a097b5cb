"""TeaCache's signal: how much the modulated input has changed, and by how much that changes the output.

A decision by the signal waits for the device once: it reads the relative change of the signal together with those of
whatever else changed.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Hashable, Sequence
from importlib import resources
from typing import NamedTuple, Protocol

import torch

Pair = Sequence[torch.Tensor] | torch.Tensor
"""How much something changed, and how large it was, as sums."""
_LARGEST = 1e30
"""Stands for an infinite change between ranks: sums of infinities would be NaN."""
_HUGE = 1e20
"""The least that is left of it when it is averaged over ranks."""


def size(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the absolute values of a tensor."""
    narrow = tensor.float() if tensor.dtype == torch.float64 else tensor  # torch does not narrow on the way.
    total: torch.Tensor = torch.linalg.vector_norm(narrow, 1, dtype=torch.float32)
    return total


class Coefficients(NamedTuple):
    """The polynomial that turns a change of a model's signal into one of its output, highest power first."""

    values: tuple[float, ...]
    origin: str


@functools.cache
def known_coefficients() -> dict[str, Coefficients]:
    """Those of coefficients.json, by the class name of the model."""
    text = resources.files(__package__).joinpath("coefficients.json").read_text(encoding="utf-8")
    return {name: Coefficients(tuple(of["coefficients"]), of["origin"]) for name, of in json.loads(text).items()}


def coefficients_for(model_class: str, given: Sequence[float] | None) -> Coefficients | None:
    """The given ones, else those of the model's own class, else none: no model borrows another's."""
    return known_coefficients().get(model_class) if given is None else Coefficients(tuple(given), "the settings")


def rescaling(coefficients: Coefficients | None) -> Callable[[float], float]:
    """The polynomial as a function. Without coefficients a change is taken as it is, and so it is where the polynomial
    falls below zero, outside the range it was fitted for: the largest changes never count as none."""
    values = (1.0, 0.0) if coefficients is None else coefficients.values

    def rescale(distance: float) -> float:
        total = functools.reduce(lambda sum_, value: sum_ * distance + value, values, 0.0)
        return total if total > 0 else distance

    return rescale


class Agree(Protocol):
    """Sums this rank's pairs of change and size over the group, so that all ranks decide alike. Every rank calls it
    once in a step that is left to the signal, with equally many numbers."""

    def __call__(self, figures: torch.Tensor) -> torch.Tensor: ...

    def within_branch(self, figures: torch.Tensor) -> torch.Tensor:
        """The same for a decision that each branch makes alone."""


class Signal:
    """The value that decides at one step of a branch."""

    def __init__(self, value: torch.Tensor, source: Hashable = None) -> None:
        self.value = value.detach()
        self.source = source
        """Where it was read; signals of two sources cannot be compared."""

    @functools.cached_property
    def size(self) -> torch.Tensor:
        return size(self.value)

    def change(self, now: Signal) -> Pair | None:
        """How much a later one differs, and how large this one is; None if they cannot be compared."""
        if (self.source, self.value.shape, self.value.device) != (now.source, now.value.shape, now.value.device):
            return None
        return [size(now.value - self.value), self.size]


class Measured(NamedTuple):
    """Relative changes, read from the device."""

    signal: float
    others: float
    """Largest of anything else; infinite if conditioning changed."""


def measure(
    signal: Pair | None,
    others: Sequence[Pair],
    agree: Agree | None,
    device: torch.device | None = None,
    *,
    within_branch: bool = False,
) -> Measured:
    """Relative changes from pairs of change and size, in one wait for the device. No signal is an infinite change."""
    signal = torch.tensor([torch.inf, 1.0], device=device).unbind() if signal is None else signal
    pairs = torch.stack([part.to(signal[0].device, torch.float32) for pair in (signal, *others) for part in pair])
    if agree is not None:  # Ranks exchange equally many numbers: the signal's pair, and the largest of the others.
        relative = (pairs[2::2] / pairs[3::2].clamp_min(1 / _LARGEST)).clamp_max(_LARGEST)
        largest = torch.cat([relative, pairs.new_zeros(1)]).amax()
        figures = torch.stack([*pairs[:2], largest, torch.ones_like(largest)])
        pairs = (agree.within_branch if within_branch else agree)(figures)
    numbers = pairs.tolist()
    first, *rest = map(_relative, numbers[::2], numbers[1::2])
    return Measured(first, max(rest, default=0.0))


def _relative(changed: float, size: float) -> float:
    """A change in proportion to what changed. NaN is never small."""
    relative = 0.0 if changed == 0 else changed / size if size > 0 else math.inf
    return math.inf if math.isnan(relative) or relative >= _HUGE else relative
