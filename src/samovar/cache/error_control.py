"""Error-controlled step skipping for one run of a sampler.

A skipped step returns a forecast: a weighted sum of the last computed outputs. At the next computed step the forecast
is compared with the truth, so the error of skipping is known for free, and sets how many steps are skipped next, as an
ODE solver adapts its step size. What is decided are weights of computed outputs.

The way from one sample to the next is a sum of the sample and the outputs, whose weights are found by least squares for
each image. So neither the sampler nor the guidance needs to be known, nor does added noise disturb. All that is needed
of the tensors are their scalar products: a few numbers for each image, read in one wait for the device.

The constants were chosen on the built-in model, on captions that no table of results is made from.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

MIN_COMPUTED = 3
"""Computed steps before the first gap: a line through two outputs, checked against a third."""
MAX_STORED = 4
_MAX_GAP_SHARE, _MIN_MAX_GAP = 0.1, 2
"""Steps that may be skipped in a row: a share of the run, but at least this many."""
_SAFETY = 0.9
_ORDER_MARGIN = 1.5
"""Errors grow faster with the gap than the order of the polynomial says."""
_EARLY_SHARE, _EARLY_UNTIL = 0.25, 0.4
"""The share of the tolerance at the first step, and of the run after which all of it is used: early errors steer what
an image becomes."""
_CURVE_POINTS = 3
"""Computed steps through which the curve goes that shows what forecasts missed."""
_MAX_CORRECTION = 20.0
"""By how much a step may change its output, as the sum of the weights."""
_ROUNDING = 1e-6
"""An error that is rounding: then the simplest curve is chosen."""
USUAL_STEPS = 28
"""Number of steps that is assumed where it cannot be seen."""

_MAX_ELEMENTS = 2**18
"""Of each image, enough to know an error within a percent."""
_RIDGE = 1e-4
"""Keeps the answer of a sampler determinate where outputs and sample hardly differ; far above rounding."""
_SAMPLE, _WAY, _OUTPUTS = 0, 1, 2
"""Where the sample, its way to the next one, and the outputs are among the vectors."""
_MAX_COPIES = 4
_MAX_WAYS = 3
"""Steps whose ways a jump is compared with: some solvers go far at every second step only."""

Weights = dict[int, float]
"""A linear combination of computed outputs, by step index."""
Rows = tuple[torch.Tensor, ...]
"""For each part of an output, some elements of each image: images by elements, in float32."""


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


@dataclass(frozen=True)
class Curve:
    """A polynomial through the last computed outputs, followed for part of the way."""

    order: int
    over_noise: bool
    """In the noise level, else in the step index."""
    share: float = 1.0

    def forecast(self, known: Sequence[Step], step: Step) -> Weights:
        """The weights of computed steps, the newest first, in one that takes the place of a step."""
        points = known[: self.order + 1]
        at = [point.place if self.over_noise else float(point.index) for point in points]
        weights = [self.share * w for w in polynomial(at, step.place if self.over_noise else float(step.index))]
        weights[0] += 1 - self.share
        return {point.index: weight for point, weight in zip(points, weights, strict=True)}


CURVES = (Curve(1, True, 0.5), Curve(1, True), Curve(1, False, 0.5), Curve(1, False), Curve(2, True), Curve(2, False))


class ErrorControl:
    """Decides which steps of a run are computed, and what the sampler is given at each."""

    def __init__(self, tolerance: float = 0.0, num_steps: int = USUAL_STEPS) -> None:
        self.tolerance, self.num_steps = tolerance, num_steps
        self.path = Path()
        """Where the sample has been."""
        self.computed: list[Step] = []
        """The last computed steps, the newest first."""
        self.given: Weights = {}
        """What the sampler is given at the running step."""
        self.given_before: Weights = {}
        """What it was given at the step before the last computed one."""
        self.gap = 1
        self.next_computed = 0
        self.drift: float | None = None
        """How far a forecast in place of the last computed step would have moved the sample, if judged now."""
        self.error = 0.0
        """How far all skipped steps together may have moved the sample, relative to its size."""
        self._curve, self._past_error = CURVES[0], 0.0
        self.skipped: list[tuple[Step, Weights]] = []
        """Forecasts since the last computed step."""
        self._debt: Weights = {}
        """Error of past forecasts times their step lengths, not corrected yet."""

        self.copies: int | None = None
        """How often its batch repeats the sample, once that is known."""

    def restart(self) -> None:
        """Forget the outputs: they do not predict those that follow. Errors that were made stay."""
        path, error, fresh = self.path, self.error, ErrorControl(self.tolerance, self.num_steps)
        vars(self).update(vars(fresh), path=path, error=error, _past_error=error)

    def due(self, step: Step) -> str | None:
        """Why a step is computed by the counts, if it is."""
        if step.is_last or len(self.computed) < MIN_COMPUTED:
            return "last_steps" if step.is_last else "first_steps"
        if step.index < self.next_computed:
            return None
        return "the tolerance is reached" if self.gap > 1 else "skipping one step would exceed the tolerance"

    def begin_computed(self, step: Step) -> None:
        """The running step is computed: it shows what the forecasts before it have missed."""
        self.computed = [step, *self.computed][:MAX_STORED]
        oldest = self.computed[-1].index
        # Between computed steps a polynomial is far nearer than beyond them.
        points = self.computed[:_CURVE_POINTS]
        for skipped, forecast in self.skipped:
            truth = polynomial([point.place for point in points], skipped.place)
            missed = subtract(forecast, dict(zip((point.index for point in points), truth, strict=True)))
            self._debt = subtract(self._debt, {index: -skipped.length * weight for index, weight in missed.items()})
        self._debt = merge_old(self._debt, oldest)
        self.skipped = []
        self.given_before = merge_old(self.given, oldest)
        self.given = subtract({step.index: 1.0}, self._correction(step.length))

    def begin_skipped(self, step: Step) -> None:
        """The running step is forecast."""
        forecast = self._curve.forecast(self.computed, step)
        self.skipped.append((step, forecast))
        self.given = subtract(forecast, self._correction(step.length))

    def _correction(self, length: float) -> Weights:
        """The part of the debt that this step pays back."""
        size = sum(map(abs, self._debt.values()))
        rate = min(1 / length, _MAX_CORRECTION / size) if length > 0 and size else 0.0
        paid = {index: rate * weight for index, weight in self._debt.items()} if rate else {}
        self._debt = {index: (1 - rate * length) * weight for index, weight in self._debt.items()}
        return paid

    def judge(self, products: np.ndarray) -> tuple[float, float]:
        """Go on with the curve that would have forecast the last computed step best; its drift and its order."""
        newest, *older = self.computed
        curves = [curve for curve in CURVES if len(older) > curve.order]
        response = None if self.path.is_seen else 1 / self.num_steps
        drifts = worst_drifts(products, self, [curve.forecast(older, newest) for curve in curves], response)
        drift, self._curve = min(zip(drifts, curves, strict=True), key=lambda pair: max(pair[0], _ROUNDING))
        return drift, self._curve.order

    def set_gap(self, drift: float, order: float) -> None:
        """The next gap, from the error of a forecast over the last one."""
        newest, before = (step.index for step in self.computed[:2])
        distance, self.drift = newest - before, drift
        error, exponent = drift * distance, order + _ORDER_MARGIN
        self._past_error += error if distance > 1 else 0.0
        share = _EARLY_SHARE + (1 - _EARLY_SHARE) * min(1.0, newest / (_EARLY_UNTIL * self.num_steps))
        allowed = distance * _SAFETY * (share * self.tolerance / max(error, 1e-30)) ** (1 / exponent)
        longest = 1 + max(_MIN_MAX_GAP, round(_MAX_GAP_SHARE * self.num_steps))
        self.gap = max(1, int(min(allowed, longest, self.gap + 1)))
        self.next_computed = newest + self.gap
        # No step after the last gap of a run judges it.
        self.error = self._past_error + (error * (self.gap / distance) ** exponent if self.gap > 1 else 0.0)


def polynomial(points: Sequence[float], at: float) -> list[float]:
    """The weight of each known value in a polynomial through all of them (Lagrange)."""
    if len(set(points)) < len(points):  # Time stood still: no line goes through one point.
        return [1.0] + [0.0] * (len(points) - 1)
    weights = []
    for i, own in enumerate(points):
        weight = 1.0
        for k, other in enumerate(points):
            weight *= (at - other) / (own - other) if k != i else 1.0
        weights.append(weight)
    return weights


def subtract(one: Weights, other: Weights) -> Weights:
    """The difference of two combinations."""
    return {index: one.get(index, 0.0) - other.get(index, 0.0) for index in one.keys() | other.keys()}


def merge_old(weights: Weights, oldest: int) -> Weights:
    """Weights of outputs that are not stored any more go to the oldest one that is."""
    merged: Weights = {}
    for index, weight in weights.items():
        merged[max(index, oldest)] = merged.get(max(index, oldest), 0.0) + weight
    return merged


def rows_of(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], are_images: bool = False) -> Rows:
    """Of each tensor what its counterpart has as well; nothing where they are of different kinds. A sample may have
    channels or tokens that are only read, and an output some that only tell a variance. They come last. A single
    tensor has a row for each image. Of several, each is a part of one image, or an image (`are_images`)."""
    if len(tensors) != len(others):
        tensors, others = tensors[:1], others[:1]
    common = [
        one[tuple(map(slice, other.shape))]
        for one, other in zip(tensors, others, strict=False)
        if one.dim() == other.dim() and one.shape[:1] == other.shape[:1]
    ]
    is_batch = len(common) == 1 and not are_images
    flat = [tensor.detach().reshape(len(tensor) if is_batch else 1, -1) for tensor in common]
    # The distance is odd: else the same few channels would be compared everywhere.
    rows = [one[:, :: -(-one.shape[1] // _MAX_ELEMENTS) | 1].to(torch.float32, copy=True) for one in flat]
    return (torch.cat(rows),) if are_images and len({one.shape for one in rows}) == 1 else tuple(rows)


class Path:
    """Where the sample of a run has been: rows of it at the last two steps, and how far it went in the steps before."""

    def __init__(self) -> None:
        self._before: Rows = ()
        self._now: Rows = ()
        self.is_seen = False
        """Whether the last step can be seen in the sample."""
        self._ways: list[torch.Tensor] = []
        self.ratio: torch.Tensor | None = None
        """How many times as far the sample has gone as in the last steps, for the worst image; None if unknown."""

    def move(self, rows: Rows) -> None:
        """Go on to where the sample is now."""
        self._before, self._now, self.ratio = self._now, rows, None
        self.is_seen = bool(rows) and [one.shape for one in rows] == [one.shape for one in self._before]
        if not self.is_seen:
            self._ways = []
            return
        way = torch.cat([(one - other).norm(dim=1) for one, other in zip(self._now, self._before, strict=True)])
        if self._ways:
            longest = torch.stack(self._ways).amax(0)
            self.ratio = (way / longest.clamp_min(torch.finfo(way.dtype).tiny)).amax()
        self._ways = [way, *self._ways][:_MAX_WAYS]

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
        shapes = [rows.shape for rows in before]
        alike = [outputs for outputs in branches if [rows.shape for rows in outputs[0]] == shapes]
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
