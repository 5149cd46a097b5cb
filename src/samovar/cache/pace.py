"""How many steps are skipped next? As many as the error of the last forecast allows, as an ODE solver sets its step.

Of several forecasts that could have taken the place of a computed step, the one that came nearest makes the next ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .drift import Drifts, Rows, Seen, num_copies, products
from .forecast import polynomial

_MOST_KNOWN = 4
"""Outputs of each branch that are looked at: the newest, and as many as a forecast combines."""
LEAST_KNOWN = 3
"""Computed steps before the first gap: a line through two of them, compared with the third."""
_MOST_SKIPPED = 5
_SAFETY = 0.9
_USUAL_STEPS = 28
"""Number of steps that is assumed where the way of the sample cannot be seen."""


Summed = Callable[[torch.Tensor], torch.Tensor]


class Curve(NamedTuple):
    """A way to forecast: a polynomial through the last computed steps."""

    order: int
    by_noise: bool
    """Over the noise, or over the number of the step."""

    def weights(self, known: Sequence[Seen], place: float, number: int) -> list[float]:
        """The weights of computed steps, the newest first, for a step at this place."""
        used = known[: self.order + 1]
        points = [step.place if self.by_noise else float(step.number) for step in used]
        return polynomial(points, place if self.by_noise else float(number))


CURVES = (Curve(0, False), Curve(1, True), Curve(1, False), Curve(2, True), Curve(2, False))
HIGHEST_ORDER = max(curve.order for curve in CURVES)


class Judgement(NamedTuple):
    """What a computed step told."""

    drift: float
    """How far a forecast in its place would have taken the worst image, with the best curve for each."""
    order: float
    """The highest order of those curves; on several ranks the mean of it."""


class Pace:
    """The gaps of one run."""

    def __init__(self) -> None:
        self._branches: dict[Hashable, deque[Seen]] = {}
        self._samples: Rows = ()
        """Of the last computed step."""
        self._copies: int | None = None
        self._given: list[list[float]] = []
        """By image, the weights of computed steps in the last skipped one, if none was computed since."""
        self._used: list[list[float]] = []
        """The same of the step before the last computed one."""
        self._by_image = False
        self._gap = 1
        self.drift: float | None = None
        """The error of a forecast in place of the last computed step that was judged."""
        self.due: int | None = None
        """The next step to be computed; None until the last computed one has been judged."""
        self.curves: tuple[Curve, ...] = (Curve(1, True),)
        """How skipped steps are forecast: for each image, or for all."""
        self.error = 0.0
        """How far all skipped steps together may have taken the worst image off its way."""

    def computed(self, branch: Hashable, seen: Seen, samples: Rows, *, leads: bool, by_image: bool) -> None:
        """Note a computed step of a branch. `leads`: whether it is the first of its step. `by_image`: whether the rows
        of its output are images."""
        known = self._branches.setdefault(branch, deque(maxlen=_MOST_KNOWN))
        if known and [rows.shape for rows in known[-1].rows] != [rows.shape for rows in seen.rows]:
            known.clear()
        known.append(seen)
        self._by_image = by_image
        if leads:
            self._samples, self._used, self._given, self.due = samples, self._given, [], None

    def forecast(self, branch: Hashable, place: float, number: int) -> list[list[float]]:
        """For a skipped step of a branch the weights of the computed ones, the newest first: for each image, or for
        all."""
        known = self.known(branch)
        self._given = [curve.weights(known, place, number) for curve in self.curves]
        return self._given

    def forget(self, branch: Hashable) -> None:
        """What a branch gave no longer tells what it will give."""
        self._branches.pop(branch, None)

    def known(self, branch: Hashable) -> list[Seen]:
        """The computed steps of a branch, the newest first."""
        return list(reversed(self._branches.get(branch, ())))

    def judge(self, leader: Hashable, samples: Rows, num_steps: int | None, summed: Summed | None = None) -> Judgement:
        """What the last computed step tells, now that the next samples are known. This waits for the device. `summed`
        adds the scalar products of all ranks, each of which knows those of its tokens."""
        newest, *known = self.known(leader)
        branches = [of for of in map(self.known, self._branches) if _is_beside(of, [newest, *known])]
        depth = min(map(len, branches))
        tried = [curve for curve in CURVES if curve.order + 2 <= depth]
        parts = [[[step.rows[part] for step in of[:depth]] for of in branches] for part in range(len(newest.rows))]
        found: list[list[list[float]]] = []
        """By part, curve and image."""
        for drifts in self._drifts(samples, parts, num_steps, summed):
            found.append([drifts.of(curve.weights(known, newest.place, newest.number)) for curve in tried])
        if not self._by_image or len(found) > 1:
            found = [[[max(max(drifts) for drifts in of)] for of in zip(*found, strict=True)]]
        self.curves, worst = _best(found[0], tried)
        return Judgement(worst, max(curve.order for curve in self.curves))

    def _drifts(
        self, now: Rows, parts: list[list[list[torch.Tensor]]], num_steps: int | None, summed: Summed | None
    ) -> list[Drifts]:
        """For each part of the output."""
        if [rows.shape for rows in now] != [rows.shape for rows in self._samples] or not now:
            response = 1 / (num_steps or _USUAL_STEPS)  # The way of the sample is not seen.
            read = _read([products(of[0][0], 2 * of[0][0], of) for of in parts], summed)
            return [Drifts(found, len(parts[0]), response=response) for found in read]
        if self._copies is None:
            self._copies = num_copies(now[0]) if len(now) == 1 else 1
        images = len(now[0]) // self._copies
        split = [
            [list(rows) for of in part for rows in zip(*(torch.split(row, images) for row in of), strict=True)]
            for part in parts
        ]
        ways = zip(self._samples, now, split, strict=True)
        read = _read([products(before[:images], after[:images], of) for before, after, of in ways], summed)
        return [Drifts(found, len(split[0]), self._used or [[1.0]]) for found in read]

    def set_gap(self, leader: Hashable, judged: Judgement, tolerance: float) -> None:
        """The next gap, from the error of a forecast over the last one."""
        newest, before, *_ = self.known(leader)
        distance = newest.number - before.number
        self.drift, error = judged.drift, judged.drift * distance
        self.error += error if distance > 1 else 0.0
        ratio = tolerance / max(error, 1e-30)  # Of an infinite error, 0.
        allowed = min(distance * _SAFETY * ratio ** (1 / (judged.order + 1)), _MOST_SKIPPED + 1, 2 * self._gap + 1)
        self._gap = max(1, int(allowed))
        self.due = newest.number + self._gap


def _is_beside(branch: list[Seen], leader: list[Seen]) -> bool:
    """Whether a branch was computed at the steps at which the leader was, and can be compared with it."""
    numbers, others = ([step.number for step in of[:LEAST_KNOWN]] for of in (branch, leader))
    shapes, wanted = ([rows.shape for rows in of[0].rows] for of in (branch, leader))
    return numbers == others and shapes == wanted


def _read(found: list[torch.Tensor], summed: Summed | None) -> list[np.ndarray]:
    """In one wait for the device."""
    lengths, together = [len(part) for part in found], torch.cat(found)
    if summed is not None:
        together = summed(together.flatten()).reshape(together.shape)
    return np.split(together.cpu().numpy(), np.cumsum(lengths)[:-1])


def _best(found: list[list[float]], tried: Sequence[Curve]) -> tuple[tuple[Curve, ...], float]:
    """From errors by curve and image: the curve that came nearest for each image, and the error of the worst image."""
    chosen, worst = [], 0.0
    for drifts in zip(*found, strict=True):
        least = min(drifts)
        chosen.append(tried[drifts.index(least)])
        worst = max(worst, least)
    return tuple(chosen), worst
