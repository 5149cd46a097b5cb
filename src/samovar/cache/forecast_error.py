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
_MAX_COPIES = 4
_MAX_WAYS = 3
"""Steps whose ways a jump is compared with: some solvers go far at every second step only."""

Rows = tuple[torch.Tensor, ...]
"""For each part of an output, some elements of each image: images by elements, in float32."""


def paired(
    samples: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """What belongs together of samples and outputs; no samples where none belong to an output."""
    if len(samples) != len(outputs):
        samples, outputs = samples[:1], outputs[:1]
    pairs = [pair for sample, output in zip(samples, outputs, strict=False) if (pair := _common(sample, output))]
    return ([sample for sample, _ in pairs], [output for _, output in pairs]) if pairs else ((), outputs)


def as_rows(tensors: Sequence[torch.Tensor], are_images: bool = False) -> Rows:
    """A single tensor has a row for each image. Of several, each is a part of one image, or an image (`are_images`)."""
    is_batch = len(tensors) == 1 and not are_images
    rows = tuple(_some(tensor, is_batch) for tensor in tensors)
    return (torch.cat(rows),) if are_images and len({one.shape for one in rows}) == 1 else rows


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
            if len(rows) % copies == 0:
                first, *others = rows.chunk(copies)
                if all(torch.equal(first, other) for other in others):
                    return copies
        return 1

    def products(self, branches: Sequence[Sequence[Rows]], copies: int) -> torch.Tensor:
        """For each image of each part, the scalar products of the sample, its way, and for each branch the newest
        output and its differences to the older ones. The copies of a batch are branches of their own. Where the way
        is not seen, the newest output stands for it."""
        before, now = self._before, self._now
        if not self.is_seen:
            before, now = branches[0][0], tuple(2 * rows for rows in branches[0][0])
        found = []
        for part, (one, other) in enumerate(zip(before, now, strict=True)):
            first, way = (rows.chunk(copies)[0] for rows in (one, other - one))
            moves = (way != 0).to(way.dtype)  # What is only read, such as a picture to be edited, stays the same.
            vectors = [first, way]
            for outputs in branches:
                if _shapes(outputs[0]) == _shapes(before):
                    for own in zip(*(rows[part].chunk(copies) for rows in outputs), strict=True):
                        vectors += [own[0], *(new - old for new, old in itertools.pairwise(own))]
            stacked = torch.stack(vectors, 1) * moves[:, None]
            # Not a product of matrices: that may be rounded to ten bits.
            found.append(torch.stack([(stacked * stacked[:, i : i + 1]).sum(-1) for i in range(len(vectors))], 1))
        return torch.cat(found)


def _shapes(rows: Rows) -> list[torch.Size]:
    return [one.shape for one in rows]


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
