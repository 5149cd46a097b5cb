"""The error that a forecast makes in the sample, from what the sampler did with the outputs.

The way from one sample to the next is a sum of the sample and the outputs, whose weights are found by least squares for
each image. So neither the sampler nor the guidance needs to be known, nor does added noise disturb. All that is needed
of the tensors are their scalar products: a few numbers for each image, read in one wait for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from .error_control import ErrorControl, Weights, subtract

_MAX_ELEMENTS = 2**18
"""Of each image, enough to know an error within a percent."""
_RIDGE = 1e-4
"""Keeps the answer of a sampler determinate where outputs and sample hardly differ; far above rounding."""
_SAMPLE, _WAY, _OUTPUTS = 0, 1, 2
"""Where the sample, its way to the next one, and the outputs are among the vectors."""
_MAX_COPIES = 4
_MAX_WAYS = 3
"""Steps whose ways a jump is compared with: some solvers go far at every second step only."""

Rows = tuple[torch.Tensor, ...]
"""For each part of an output, some elements of each image: images by elements, in float32."""


def in_common(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each tensor what its counterpart has as well; nothing where they are of different kinds. A sample may have
    channels or tokens that are only read, and an output some that only tell a variance. They come last."""
    if len(tensors) != len(others):
        tensors, others = tensors[:1], others[:1]
    return [
        one[tuple(map(slice, other.shape))]
        for one, other in zip(tensors, others, strict=False)
        if one.dim() == other.dim() and one.shape[:1] == other.shape[:1]
    ]


def as_rows(tensors: Sequence[torch.Tensor], are_images: bool = False) -> Rows:
    """A single tensor has a row for each image. Of several, each is a part of one image, or an image (`are_images`)."""
    is_batch = len(tensors) == 1 and not are_images
    flat = [tensor.detach().reshape(len(tensor) if is_batch else 1, -1) for tensor in tensors]
    # The distance is odd: else the same few channels would be compared everywhere.
    rows = tuple(one[:, :: -(-one.shape[1] // _MAX_ELEMENTS) | 1].to(torch.float32, copy=True) for one in flat)
    return (torch.cat(rows),) if are_images and len(set(_shapes(rows))) == 1 else rows


def _shapes(rows: Rows) -> list[torch.Size]:
    return [one.shape for one in rows]


class Path:
    """Where the sample of a run has been: rows of it at the last two steps, and how far it went in the steps before."""

    def __init__(self) -> None:
        self._before: Rows = ()
        self._now: Rows = ()
        self._ways: list[torch.Tensor] = []
        self.ratio: torch.Tensor | None = None
        """How many times as far the sample has gone as in the last steps, for the worst image; None if unknown."""

    def move(self, rows: Rows) -> None:
        """Go on to where the sample is now."""
        self._before, self._now, self.ratio = self._now, rows, None
        if not self.is_seen:
            self._ways = []
            return
        way = torch.cat([(one - other).norm(dim=1) for one, other in zip(self._now, self._before, strict=True)])
        if self._ways:
            longest = torch.stack(self._ways).amax(0)
            self.ratio = (way / longest.clamp_min(torch.finfo(way.dtype).tiny)).amax()
        self._ways = [way, *self._ways][:_MAX_WAYS]

    @property
    def is_seen(self) -> bool:
        """Whether the last step can be seen in the sample."""
        return bool(self._now) and _shapes(self._now) == _shapes(self._before)

    def num_copies(self) -> int:
        """How often the batch repeats its samples, for the branches of guidance. This waits for the device."""
        rows = self._before[0] if self.is_seen and len(self._before) == 1 else torch.empty(1)
        for copies in range(min(len(rows), _MAX_COPIES), 1, -1):
            parts = rows.chunk(copies)
            if len(rows) % copies == 0 and all(torch.equal(parts[0], other) for other in parts):
                return copies
        return 1

    def products(self, branches: Sequence[Sequence[Rows]], copies: int) -> torch.Tensor:
        """For each image of each part, the scalar products of the sample, its way, and for each branch the newest
        output and its differences to the older ones. The copies of a batch are branches of their own. Where the way
        is not seen, the newest output stands for it."""
        before, now = self._before, self._now
        if not self.is_seen:
            before, now = branches[0][0], tuple(2 * rows for rows in branches[0][0])
        alike = [outputs for outputs in branches if _shapes(outputs[0]) == _shapes(before)]
        found = []
        for part, (one, other) in enumerate(zip(before, now, strict=True)):
            vectors = [rows.chunk(copies)[0] for rows in (one, other - one)]
            moves = vectors[_WAY] != 0  # What is only read, such as a picture to be edited, stays the same.
            for own in (own for of in alike for own in zip(*(rows[part].chunk(copies) for rows in of), strict=True)):
                vectors += [own[0], *(new - old for new, old in itertools.pairwise(own))]
            stacked = torch.stack(vectors, 1) * moves[:, None]
            # Not a product of matrices: that may be rounded to ten bits.
            found.append(torch.stack([(stacked * stacked[:, i : i + 1]).sum(-1) for i in range(len(vectors))], 1))
        return torch.cat(found)


def worst_drifts(
    products: np.ndarray, control: ErrorControl, forecasts: Sequence[Weights], response: float | None = None
) -> list[float]:
    """The relative error of the worst image that each forecast would have caused in place of the last computed step.
    `response`: what the sampler does with an output, where that cannot be seen."""
    gram = products.astype(np.float64)
    known = [step.index for step in control.computed]
    num_branches = (gram.shape[1] - _OUTPUTS) // len(known)
    newest = {known[0]: 1.0}
    given = _coordinates(control.given, known), _coordinates(subtract(newest, control.given_before), known)
    with np.errstate(all="ignore"):
        answers = np.full((len(gram), num_branches), response) if response else _responses(gram, given, num_branches)
        misses = np.array([_coordinates(subtract(newest, forecast), known) for forecast in forecasts])
        errors = np.einsum("ib,fk->ifbk", answers, misses).reshape(len(gram), len(misses), -1)
        squares = np.einsum("ifn,inm,ifm->if", errors, gram[:, _OUTPUTS:, _OUTPUTS:], errors)
        drifts = np.sqrt(np.maximum(squares, 0) / gram[:, _SAMPLE, _SAMPLE, None])
    worst: list[float] = np.nan_to_num(drifts, nan=np.inf, posinf=np.inf).max(0).tolist()
    return worst


def _responses(gram: np.ndarray, given: Sequence[np.ndarray], num_branches: int) -> np.ndarray:
    """By image and branch, how the sampler answers to an output: to its value or, if of higher order, to its change."""
    basis = np.zeros((1 + 2 * num_branches, gram.shape[1]))
    basis[0, _SAMPLE] = 1.0
    basis[1:, _OUTPUTS:] = np.concatenate([np.kron(np.eye(num_branches), coordinates) for coordinates in given])
    seen = basis @ gram
    inner, aim = seen @ basis.T, seen[:, :, _WAY]
    scale = 1 / np.sqrt(np.maximum(np.diagonal(inner, axis1=1, axis2=2), np.finfo(np.float64).tiny))
    scaled = inner * scale[:, :, None] * scale[:, None] + _RIDGE * np.eye(len(basis))
    answer = np.linalg.solve(scaled, (aim * scale)[:, :, None])[:, 1:, 0] * scale[:, 1:]
    by_value, by_change = np.split(answer, 2, axis=1)
    sizes = [np.abs(one).sum(1, keepdims=True) for one in (by_value, by_change)]
    return np.where(sizes[1] > sizes[0], by_change, by_value)


def _coordinates(weights: Weights, known: Sequence[int]) -> np.ndarray:
    """A combination of outputs by the newest of them and the differences between them."""
    tails = np.cumsum([weights.get(index, 0.0) for index in reversed(known)])[::-1]
    return tails * ([1] + [-1] * (len(known) - 1))
