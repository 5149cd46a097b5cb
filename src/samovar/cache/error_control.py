"""Error-controlled step skipping for one run of a sampler.

A skipped step returns a forecast: a weighted sum of the last computed outputs. At the next computed step the forecast
is compared with the truth, so the error of skipping is known for free, and sets how many steps are skipped next, as an
ODE solver adapts its step size. All that is decided here is weights of computed outputs; tensors are elsewhere.

The constants were chosen on the built-in model, on captions that no table of results is made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .clock import Step

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

Weights = dict[int, float]
"""A linear combination of computed outputs, by step index."""


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

    def __init__(self) -> None:
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
        self._curve, self._rivals = CURVES[0], list[Curve]()
        self._past_error = self._expected_error = 0.0
        self._skipped: list[tuple[Step, Weights]] = []
        """Forecasts since the last computed step."""
        self._debt: Weights = {}
        """Error of past forecasts times their step lengths, not corrected yet."""

        self.copies: int | None = None
        """How often its batch repeats the sample, once that is known."""

    @property
    def has_computed(self) -> bool:
        """Whether the step before was computed."""
        return not self._skipped

    @property
    def is_young(self) -> bool:
        """Whether too little is known to skip a step."""
        return len(self.computed) < MIN_COMPUTED

    @property
    def error(self) -> float:
        """How far all skipped steps together may have moved the sample, relative to its size."""
        return self._past_error + self._expected_error

    def restart(self) -> None:
        """Forget the outputs: they do not predict those that follow. Errors that were made stay."""
        error, fresh = self.error, ErrorControl()
        vars(self).update(vars(fresh), _past_error=error)

    def begin_computed(self, step: Step) -> None:
        """The running step is computed: it shows what the forecasts before it have missed."""
        self.computed = [step, *self.computed][:MAX_STORED]
        oldest = self.computed[-1].index
        # Between computed steps a polynomial is far nearer than beyond them.
        points = self.computed[:_CURVE_POINTS]
        for skipped, forecast in self._skipped:
            truth = polynomial([point.place for point in points], skipped.place)
            missed = subtract(forecast, dict(zip((point.index for point in points), truth, strict=True)))
            self._debt = subtract(self._debt, {index: -skipped.length * weight for index, weight in missed.items()})
        self._debt = merge_old(self._debt, oldest)
        self._skipped = []
        self.given_before = merge_old(self.given, oldest)
        self.given = subtract({step.index: 1.0}, self._correction(step.length))

    def begin_skipped(self, step: Step) -> None:
        """The running step is forecast."""
        forecast = self._curve.forecast(self.computed, step)
        self._skipped.append((step, forecast))
        self.given = subtract(forecast, self._correction(step.length))

    def _correction(self, length: float) -> Weights:
        """The part of the debt that this step pays back."""
        size = sum(map(abs, self._debt.values()))
        rate = min(1 / length, _MAX_CORRECTION / size) if length > 0 and size else 0.0
        paid = {index: rate * weight for index, weight in self._debt.items()} if rate else {}
        self._debt = {index: (1 - rate * length) * weight for index, weight in self._debt.items()}
        return paid

    def rivals(self) -> list[Weights]:
        """What each curve would have forecast for the last computed step."""
        newest, *older = self.computed
        self._rivals = [curve for curve in CURVES if len(older) > curve.order]
        return [curve.forecast(older, newest) for curve in self._rivals]

    def choose(self, drifts: Sequence[float]) -> tuple[float, float]:
        """Go on with the curve that came nearest; how far it was off, and its order."""
        rivals = zip(drifts, self._rivals, strict=True)
        drift, self._curve = min(rivals, key=lambda pair: max(pair[0], _ROUNDING))
        return drift, self._curve.order

    def set_gap(self, drift: float, order: float, tolerance: float, num_steps: int) -> None:
        """The next gap, from the error of a forecast over the last one."""
        newest, before = (step.index for step in self.computed[:2])
        distance, self.drift = newest - before, drift
        error, exponent = drift * distance, order + _ORDER_MARGIN
        self._past_error += error if distance > 1 else 0.0
        share = _EARLY_SHARE + (1 - _EARLY_SHARE) * min(1.0, newest / (_EARLY_UNTIL * num_steps))
        allowed = distance * _SAFETY * (share * tolerance / max(error, 1e-30)) ** (1 / exponent)
        longest = 1 + max(_MIN_MAX_GAP, round(_MAX_GAP_SHARE * num_steps))
        self.gap = max(1, int(min(allowed, longest, self.gap + 1)))
        self.next_computed = newest + self.gap
        # No step after the last gap of a run judges it.
        self._expected_error = error * (self.gap / distance) ** exponent if self.gap > 1 else 0.0


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
