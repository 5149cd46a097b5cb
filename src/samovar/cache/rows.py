"""What did the last computed steps of each image of a batch give? Images of a batch are computed at steps of their own.

A batch is computed when one of its images is due. The others go on with their forecasts all the same, as if they were
alone: an image does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..trace.passes import Outlook

Tensors = Sequence[torch.Tensor | None]
MOST_KNOWN = 4
"""The newest step, and as many older ones as a forecast combines."""


class Past(NamedTuple):
    """A computed step of each image, with its place and number."""

    places: tuple[float, ...]
    numbers: tuple[int, ...]
    tensors: Tensors


class RowHistory:
    """The last computed steps of each image of a branch."""

    def __init__(self) -> None:
        self.steps: list[Past] = []
        """The newest first."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def newest(self) -> Tensors:
        """What the last computed step gave each image."""
        return self.steps[0].tensors

    @property
    def num_images(self) -> int:
        return len(self.steps[0].numbers) if self.steps else 1

    def push(self, place: float, number: int, tensors: Tensors, due: Sequence[bool]) -> None:
        """Add a computed step of the images that were due."""
        count = len(due)
        new = Past((place,) * count, (number,) * count, tensors)
        if self.steps and (self.num_images != count or not _are_alike(self.newest, tensors)):
            self.steps.clear()
        shifted = [new, *self.steps][:MOST_KNOWN]
        if all(due) or not self.steps:
            self.steps = shifted
            return
        olds = [*self.steps, *shifted[len(self.steps) :]][: len(shifted)]  # The last is looked at by those due alone.
        self.steps = [
            Past(
                tuple(a if is_due else b for is_due, a, b in zip(due, one.places, other.places, strict=True)),
                tuple(a if is_due else b for is_due, a, b in zip(due, one.numbers, other.numbers, strict=True)),
                chosen(due, one.tensors, other.tensors),
            )
            for one, other in zip(shifted, olds, strict=True)
        ]

    def combined(self, weights: Sequence[Sequence[float]]) -> Outlook | None:
        """For each image a weighted sum of its computed steps, the newest first; None if there are not as many."""
        length = max(map(len, weights))
        if length > len(self.steps):
            return None
        stored = [step.tensors for step in self.steps[:length]]
        if len(weights) == 1:
            return Outlook(weights[0], stored, is_precise=True)
        first = next(tensor for tensor in self.newest if tensor is not None)
        padded = [[*of, *[0.0] * (length - len(of))] for of in weights]
        rows = torch.tensor(padded, device=first.device).repeat(len(first) // len(weights), 1)
        return Outlook(list(rows.unbind(1)), stored, is_precise=True)

    def clear(self) -> None:
        """Forget all steps."""
        self.steps.clear()


def chosen(due: Sequence[bool], one: Tensors, other: Tensors) -> list[torch.Tensor | None]:
    """The rows of the images that are due from one list of tensors, the rest from another."""
    mask: torch.Tensor | None = None
    found: list[torch.Tensor | None] = []
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            found.append(a)
            continue
        if mask is None:
            mask = torch.tensor(due, device=a.device).repeat(len(a) // len(due))
        found.append(torch.where(mask.reshape(-1, *[1] * (a.dim() - 1)), a, b))
    return found


def _are_alike(one: Tensors, other: Tensors) -> bool:
    forms = ([None if t is None else (t.shape, t.dtype, t.device) for t in of] for of in (one, other))
    return next(forms) == next(forms)
