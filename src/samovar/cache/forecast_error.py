"""The error that a forecast makes in the sample, from what the sampler did with the outputs.

The way from one sample to the next is a sum of the sample and the outputs, whose weights are found by least squares for
each image. So neither the sampler nor the guidance needs to be known, nor does added noise disturb. All that is needed
of the tensors are their scalar products: a few numbers for each image, read in one wait for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from .error_control import Weights, merge_old, subtract

_MAX_ELEMENTS = 2**18
"""Of each image, enough to know an error within a percent."""
_RIDGE = 1e-4
"""Keeps the answer of a sampler determinate where outputs and sample hardly differ; far above rounding."""
_SAMPLE, _WAY, _OUTPUTS = 0, 1, 2
"""Where the sample, its way to the next one, and the outputs are among the vectors."""
MAX_COPIES = 4

Rows = tuple[torch.Tensor, ...]
"""For each part of an output, some elements of each image: images by elements, in float32."""


def paired_rows(
    samples: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], are_images: bool = False
) -> tuple[Rows, Rows]:
    """The samples and the outputs that belong together, as rows; no samples where none belong to an output. A single
    sample has a row for each image. Of several, each is a part of one image, or an image (`are_images`)."""
    if len(samples) != len(outputs):
        samples, outputs = samples[:1], outputs[:1]
    found = [pair for sample, output in zip(samples, outputs, strict=False) if (pair := _common(sample, output))]
    pairs = found or [(output, output) for output in outputs]
    is_batch = len(pairs) == 1 and not are_images
    before, after = (tuple(_some(tensor, is_batch) for tensor in side) for side in zip(*pairs, strict=True))
    if are_images and len({rows.shape for rows in after}) == 1:
        before, after = (torch.cat(before),), (torch.cat(after),)
    return before if found else (), after


def _common(sample: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Those elements of both that belong together: a sample may have channels or tokens that are only read, and an
    output some that only tell a variance. They come last."""
    if sample.dim() != output.dim() or sample.shape[:1] != output.shape[:1]:
        return None
    for dim, (one, other) in enumerate(zip(sample.shape, output.shape, strict=True)):
        sample, output = sample.narrow(dim, 0, min(one, other)), output.narrow(dim, 0, min(one, other))
    return (sample, output) if output.numel() else None


def _some(tensor: torch.Tensor, is_batch: bool) -> torch.Tensor:
    rows = tensor.detach().reshape(len(tensor) if is_batch else 1, -1)
    apart = -(-rows.shape[1] // _MAX_ELEMENTS) | 1  # Odd: else the same few channels would be compared everywhere.
    return rows[:, ::apart].to(torch.float32, copy=True)


def num_copies(rows: Rows) -> int:
    """How often a batch repeats its samples, for the branches of guidance. This waits for the device."""
    for copies in range(min(len(rows[0]), MAX_COPIES) if len(rows) == 1 else 1, 1, -1):
        if len(rows[0]) % copies == 0:
            first, *others = rows[0].chunk(copies)
            if all(torch.equal(first, other) for other in others):
                return copies
    return 1


def products(before: Rows, now: Rows, branches: Sequence[Sequence[Rows]], copies: int) -> torch.Tensor:
    """For each image of each part, the scalar products of the sample, its way, and for each branch the newest output
    and its differences to the older ones. The copies of a batch are branches of their own."""
    found = []
    for part, (one, other) in enumerate(zip(before, now, strict=True)):
        first, way = (rows.chunk(copies)[0] for rows in (one, other - one))
        moves = (way != 0).to(way.dtype)  # What is only read, such as a picture to be edited, stays the same.
        vectors = [first, way]
        for outputs in branches:
            for own in zip(*(rows[part].chunk(copies) for rows in outputs), strict=True):
                vectors += [own[0], *(new - old for new, old in itertools.pairwise(own))]
        stacked = torch.stack(vectors, 1) * moves[:, None]
        # Not a product of matrices: that may be rounded to ten bits.
        found.append(torch.stack([(stacked * stacked[:, i : i + 1]).sum(-1) for i in range(len(vectors))], 1))
    return torch.cat(found)


def worst_drifts(
    gram: np.ndarray,
    indices: Sequence[int],
    given: Weights,
    given_before: Weights,
    forecasts: Sequence[Weights],
    response: float | None = None,
) -> list[float]:
    """How far each forecast would have moved the worst image off its way, relative to its size. `indices`: of the
    outputs, the newest first. `response`: what the sampler does with an output, where that cannot be seen."""
    newest, num_known = {indices[0]: 1.0}, len(indices)
    num_branches = (gram.shape[1] - _OUTPUTS) // num_known
    misses = [_coordinates(subtract(newest, forecast), indices) for forecast in forecasts]
    own = _coordinates(given, indices), _coordinates(subtract(newest, given_before), indices)
    drifts = []
    for image in gram.astype(np.float64):
        if not np.isfinite(image).all():
            return [math.inf] * len(forecasts)
        answer = np.full(num_branches, response) if response is not None else _response(image, own, num_branches)
        miss = np.zeros((len(misses), len(image)))
        miss[:, _OUTPUTS:] = np.array([np.outer(answer, one).ravel() for one in misses])
        squares, size = ((miss @ image) * miss).sum(1), image[_SAMPLE, _SAMPLE]
        drifts.append(np.sqrt(np.maximum(squares, 0) / size) if size else np.full(len(misses), np.inf))
    worst: list[float] = np.nan_to_num(np.max(drifts, 0), nan=np.inf, posinf=np.inf).tolist()
    return worst


def _response(image: np.ndarray, own: tuple[np.ndarray, np.ndarray], num_branches: int) -> np.ndarray:
    """By branch, how the sampler answers to an output: to its value or, if of higher order, to its change."""
    blocks = [np.kron(np.eye(num_branches), coordinates) for coordinates in own]
    basis = np.zeros((1 + 2 * num_branches, len(image)))
    basis[0, _SAMPLE] = 1.0
    basis[1:, _OUTPUTS:] = np.concatenate(blocks)
    seen = basis @ image
    gram, aim = seen @ basis.T, seen[:, _WAY]
    scale = 1 / np.sqrt(np.maximum(gram.diagonal(), np.finfo(np.float64).tiny))
    scaled = gram * scale[:, None] * scale + _RIDGE * np.eye(len(gram))
    answer = np.linalg.solve(scaled, aim * scale) * scale
    by_value: np.ndarray = answer[1 : 1 + num_branches]
    by_change: np.ndarray = answer[1 + num_branches :]
    return by_change if np.abs(by_change).sum() > np.abs(by_value).sum() else by_value


def _coordinates(weights: Weights, indices: Sequence[int]) -> np.ndarray:
    """A combination of outputs by the newest of them and the differences between them."""
    stored = merge_old(weights, indices[-1])
    tails = [*itertools.accumulate(stored.get(index, 0.0) for index in reversed(indices))][::-1]
    return np.array([tails[0], *(-tail for tail in tails[1:])])
