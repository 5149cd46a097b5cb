"""How far would a forecast have taken the sample off its way? Known at every computed step, for free.

Where a step was computed, the forecast that would have taken its place is compared with it. What the error would have
done to the sample is learnt from what the sampler did with the outputs: the way from one sample to the next is a sum of
the sample and the outputs, and its weights are found by least squares, for each image. So neither the sampler nor the
guidance needs to be known, nor does noise that is added disturb. All that is needed of the tensors are their scalar
products with each other: a few numbers for each image, read in one wait for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

_MOST_ELEMENTS = 2**18
"""Of each image, enough to know an error within a percent."""
_RIDGE = 1e-4
"""Keeps the answer of a sampler determinate where outputs and sample hardly differ; far above rounding."""
_SAMPLE, _WAY, _OUTPUTS = 0, 1, 2
"""Where the sample, its way to the next one, and the outputs are among the vectors."""

Rows = tuple[torch.Tensor, ...]
"""For each part of an output, some elements of each image: images by elements, in float32."""
Given = tuple[Sequence[float], Sequence[float] | None]
"""The weights of the outputs in what a sampler was given, the newest first; and those of the older ones in what it was
given at the step before, if that is known."""
Products = np.ndarray
"""Scalar products of all vectors: images by vectors by vectors."""


def rows_of(samples: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, by_image: bool) -> tuple[Rows, Rows]:
    """The samples and the outputs that belong together, as rows: one for each image, or for each part of a sample. No
    samples where none belong to an output."""
    if len(samples) != len(outputs):
        samples, outputs = samples[:1], outputs[:1]
    found = [pair for sample, output in zip(samples, outputs, strict=False) if (pair := _common(sample, output))]
    pairs = found or [(output, output) for output in outputs]
    rows = [[_some(tensor, by_image and len(pairs) == 1) for tensor in side] for side in zip(*pairs, strict=True)]
    return tuple(rows[0]) if found else (), tuple(rows[1])


def _common(sample: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Those elements of both that belong together: a sample may have channels or tokens that are only read, and an
    output some that only tell a variance. They come last."""
    if sample.dim() != output.dim():
        return None
    for dim, (one, other) in enumerate(zip(sample.shape, output.shape, strict=True)):
        if one != other and dim == 0:
            return None
        length = min(one, other)
        sample, output = sample.narrow(dim, 0, length), output.narrow(dim, 0, length)
    return (sample, output) if output.numel() else None


def _some(tensor: torch.Tensor, by_image: bool) -> torch.Tensor:
    rows = tensor.detach().reshape(len(tensor) if by_image else 1, -1)
    apart = -(-rows.shape[1] // _MOST_ELEMENTS) | 1  # Odd: else the same few channels would be compared everywhere.
    return rows[:, ::apart].to(torch.float32, copy=True)


def num_copies(samples: torch.Tensor) -> int:
    """How often a batch repeats its samples, for the branches of guidance. This waits for the device."""
    for copies in range(min(len(samples), 4), 1, -1):
        if len(samples) % copies == 0:
            first, *others = samples.chunk(copies)
            if all(torch.equal(first, other) for other in others):
                return copies
    return 1


def products(before: torch.Tensor, now: torch.Tensor, branches: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Of the sample, its way, and for each branch the newest output and its differences to the older ones."""
    way = now - before
    moves = (way != 0).to(way.dtype)  # What is only read, such as a picture to be edited, stays the same.
    vectors = [before, way]
    for outputs in branches:
        vectors += [outputs[0], *(one - other for one, other in itertools.pairwise(outputs))]
    stacked = torch.stack(vectors, 1) * moves[:, None]
    # Not a product of matrices: that may be rounded to ten bits.
    return torch.stack([(stacked * stacked[:, i : i + 1]).sum(-1) for i in range(len(vectors))], 1)


class Compared(NamedTuple):
    """What is found out on the device at a computed step."""

    products: torch.Tensor
    """Of all parts of the output, one after the other."""
    lengths: tuple[int, ...]
    """How many of them belong to each part."""
    num_branches: int
    """Copies of a batch count as branches."""
    sees_way: bool
    """Whether the way of the sample was seen."""


Taken = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[Sequence[Sequence[torch.Tensor]]]]
"""The samples, rows of those of the last computed step, and for each branch the outputs of its last computed steps."""


def compared(given: Taken, by_image: bool, images: int) -> Compared:
    """Compare outputs, the newest first, and the way of the sample. Nothing here waits for the device."""
    samples, before, branches = given
    rows = [[rows_of(samples, outputs, by_image=by_image) for outputs in of] for of in branches]
    after, newest = rows[0][0]
    parts = [[[outputs[part] for _, outputs in of] for of in rows] for part in range(len(newest))]
    sees_way = bool(after) and [one.shape for one in before] == [other.shape for other in after]
    if not sees_way:
        before, after = [of[0][0] for of in parts], tuple(2 * of[0][0] for of in parts)
    apart = [_copies_apart(part, images) for part in parts]
    ways = zip(before, after, apart, strict=True)
    found = [products(one[:images], other[:images], of) for one, other, of in ways]
    return Compared(torch.cat(found), tuple(map(len, found)), len(apart[0]), sees_way)


def _copies_apart(branches: list[list[torch.Tensor]], images: int) -> list[list[torch.Tensor]]:
    """The copies of a batch as branches of their own."""
    return [list(rows) for of in branches for rows in zip(*(torch.split(row, images) for row in of), strict=True)]


class Drifts:
    """What the products of one computed step tell."""

    def __init__(
        self, found: Products, num_branches: int, given: Sequence[Given] = (), response: float | None = None
    ) -> None:
        """`given`: what the sampler was given, for each image, or for all. `response`: what it does with an output,
        where that cannot be seen."""
        self._products = found.astype(np.float64)
        self._are_numbers = np.logical_and.reduce(np.isfinite(self._products), (1, 2))
        self._num_known = (self._products.shape[1] - _OUTPUTS) // num_branches - 1
        self._starts = [_OUTPUTS + branch * (1 + self._num_known) for branch in range(num_branches)]
        if response is None:
            each = [given[image % len(given)] if given else ([1.0], None) for image in range(len(found))]
            self._response = np.stack([self._answer(image, of) for image, of in enumerate(each)])
        else:
            self._response = np.full((len(found), num_branches), response)

    def of(self, forecasts: Sequence[Sequence[float]], image: int) -> list[float]:
        """How far each of some forecasts would have taken an image off its way, relative to its size. A forecast is the
        weights of the older outputs, the newest first."""
        if not self._are_numbers[image]:
            return [math.inf] * len(forecasts)
        # All at once: the device waits for this.
        found, tails = self._products[image], np.array([self._tails(weights) for weights in forecasts])
        miss = np.zeros((len(forecasts), len(found)))
        for answer, start in zip(self._response[image], self._starts, strict=True):
            miss[:, start + 1 : start + 1 + self._num_known] = -answer * tails
        squares, size = ((miss @ found) * miss).sum(1).tolist(), float(found[_SAMPLE, _SAMPLE])
        drifts = [math.sqrt(max(square, 0.0) / size) if size else math.inf for square in squares]
        return [drift if math.isfinite(drift) else math.inf for drift in drifts]

    def _tails(self, weights: Sequence[float]) -> list[float]:
        """The same sum by the differences between outputs, with the newest one subtracted."""
        sums = [*itertools.accumulate(reversed(weights))][::-1]
        return [*sums, *[0.0] * self._num_known][: self._num_known]

    def _answer(self, image: int, given: Given) -> np.ndarray:
        """By branch, how the sampler answers to an output."""
        (newest, *older), used = given
        found, size, count = self._products[image], self._products.shape[1], len(self._starts)
        if not self._are_numbers[image]:
            return np.full(count, np.nan)
        basis = np.zeros((size, 1 + (1 if used is None else 2) * count))
        basis[_SAMPLE, 0] = 1.0
        for column, start in enumerate(self._starts, 1):
            basis[start, column] = newest + sum(older)
            basis[start + 1 : start + 1 + self._num_known, column] = np.negative(self._tails(older))
        if used is not None:  # Samplers of higher order add the change from the step before.
            for column, start in enumerate(self._starts, 1 + count):
                basis[start + 1 : start + 1 + self._num_known, column] = self._tails(used)
        seen = basis.T @ found
        gram, aim = seen @ basis, seen[:, _WAY]
        scale = 1 / np.sqrt(np.maximum(gram.diagonal(), np.finfo(np.float64).tiny))
        scaled = gram * scale[:, None] * scale
        scaled.flat[:: len(gram) + 1] += _RIDGE
        answer = np.linalg.solve(scaled, aim * scale) * scale
        by_value: np.ndarray = answer[1 : 1 + count]
        by_change: np.ndarray = answer[1 + count :]
        return by_change if np.abs(by_change).sum() > np.abs(by_value).sum() else by_value
