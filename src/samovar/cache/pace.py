"""How many steps are skipped next? As many as the error of the last forecast allows, as an ODE solver sets its step.

Each image of a batch has its own gaps. Of several forecasts that could have taken the place of its last computed step,
the one that came nearest makes the next ones.

The constants were chosen on the built-in model, on captions that no table of results is made from. Gaps that grow by
one step, and forecasts that go half the way of a line instead of repeating the last output, gain most: 1 to 4 dB with
as many computed steps, and twice that in the worst images.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from .drift import Compared, Drifts, Rows, compared, num_copies, rows_of
from .forecast import polynomial
from .misses import Misses, Skipped
from .rows import RowHistory, Tensors

LEAST_KNOWN = 3
"""Computed steps before the first gap: a line through two of them, compared with the third."""
_LONGEST, _SHORTEST = 0.1, 2
"""Steps that may be skipped in a row: a share of the run, and how many at least."""
_SAFETY = 0.9
_CAREFUL, _CAREFUL_UNTIL = 0.25, 0.4
"""The share of the tolerance at the first step, and of the run after which all of it is used. Early errors steer what
an image becomes: with as many computed steps, the worst of 96 images is 1.8 dB nearer, and the average as near."""
_RISE = 1.5
"""How much faster than a curve's order its error may grow with the gap: by how much the exponent is above it."""
_USUAL_STEPS = 28
"""Number of steps that is assumed where it cannot be seen."""

_ROUNDING = 1e-6
"""A drift that is rounding: then the simplest curve is chosen."""

Summed = Callable[[torch.Tensor], torch.Tensor]
"""Runs a function on what is given; functions of one name do the same."""


class Curve(NamedTuple):
    """A way to forecast: a polynomial through the last computed steps."""

    order: int
    by_noise: bool
    """Over the noise, or over the number of the step."""
    share: float = 1.0
    """Of the way from the last computed step to the polynomial."""

    def weights(self, places: Sequence[float], numbers: Sequence[int], place: float, number: int) -> list[float]:
        """The weights of computed steps, the newest first, for a step at this place."""
        points = [float(point) for point in (places if self.by_noise else numbers)]
        newest, *others = polynomial(points[: self.order + 1], place if self.by_noise else float(number))
        return [1 - self.share + self.share * newest, *(self.share * weight for weight in others)]


CURVES = (Curve(1, True, 0.5), Curve(1, True), Curve(1, False, 0.5), Curve(1, False), Curve(2, True), Curve(2, False))


class Image:
    """The gaps of one image of a batch."""

    def __init__(self) -> None:
        self.gap = 1
        self.due = 0
        """The next step to be computed."""
        self.curve = CURVES[0]
        """How its skipped steps are forecast."""
        self.misses = Misses()
        self.given: list[float] = [1.0]
        """What its sampler was given at the last step: the weights of the computed ones, the newest first."""
        self.used: list[float] = [1.0]
        """The same at the step before its last computed one, by those that were computed then."""
        self._judged = self._expected = 0.0
        """The errors of its gaps that were judged, and that of the one after them."""

    @property
    def error(self) -> float:
        """How far all of its skipped steps may have taken it off its way."""
        return self._judged + self._expected

    def set_gap(
        self, drift: float, order: float, number: int, before: int, tolerance: float, num_steps: int = _USUAL_STEPS
    ) -> None:
        """The next gap, from the error of a forecast over the last one, which ended at step `number`."""
        distance = number - before
        error = drift * distance
        self._judged += error if distance > 1 else 0.0
        share = _CAREFUL + (1 - _CAREFUL) * min(1.0, number / (_CAREFUL_UNTIL * num_steps))
        ratio = share * tolerance / max(error, 1e-30)  # Of an infinite error, 0.
        longest = 1 + max(_SHORTEST, round(_LONGEST * num_steps))
        allowed = min(distance * _SAFETY * ratio ** (1 / (order + _RISE)), longest, self.gap + 1)
        self.gap = max(1, int(allowed))
        self.due = number + self.gap
        # No step after the last gap of a run judges it.
        self._expected = error * (self.gap / distance) ** (order + _RISE) if self.gap > 1 else 0.0


class Judged(NamedTuple):
    """What the last computed step showed of an image."""

    drift: float
    """How far a forecast in its place would have taken the image, with the best curve."""
    order: float
    """The order of that curve; on several ranks the mean of it."""


class Pace:
    """The gaps of one run."""

    def __init__(self) -> None:
        self.images: list[Image] = []
        self._by_image = False
        """Whether the outputs have rows for images, and for copies of them."""
        self._copies = 1
        """Of each image in a batch, for the branches of guidance."""
        self._branches: dict[Hashable, RowHistory] = {}
        self._samples: Rows = ()
        """Of the last computed step."""
        self._open: tuple[bool, ...] = ()
        """The images whose last computed step has not been judged yet."""
        self.due: list[bool] = []
        """The images that are due at the running step."""
        self.drift: float | None = None
        """How far a forecast in place of the last computed step would have taken the worst image, if judged now."""

    def begins(self, num_known: int) -> bool:
        """Whether the images of a call are looked for, after some computed steps. At the first, images with the same
        seed look like copies of one."""
        return num_known == 0 or (num_known == 1 and self._copies > 1)

    def begin(self, samples: Sequence[torch.Tensor], outputs: Tensors) -> None:
        """Begin with the images that a call is about."""
        count, self._copies = count_images(samples, outputs)
        self.images, self._by_image, self._open = [Image() for _ in range(count or 1)], count is not None, ()

    def computed(
        self,
        branch: Hashable,
        history: RowHistory,
        samples: Sequence[torch.Tensor] | None,
        due: Sequence[bool],
        length: float = 1.0,
    ) -> list[list[float]]:
        """Note a computed step of a branch, which goes this far; `samples` if it is the first branch of its step. For
        each image, the weights of its computed steps in what is returned for this one; those not due are left out."""
        self._branches[branch] = history
        if samples is not None:
            self._samples, self._open = self.rows(samples, history.newest)[0], tuple(due)
        weights = [[1.0] for _ in self.images]
        for index in (index for index, is_due in enumerate(due) if is_due):
            image, (places, numbers) = self.images[index], _known(history, index)
            if samples is not None:
                image.misses.computed(places, numbers, length)
                image.used, image.given = image.given, image.misses.corrected([1.0], numbers)
            weights[index] = image.misses.corrected([1.0], numbers)
        return weights

    def forecast(self, history: RowHistory, step: Skipped) -> list[list[float]]:
        """For each image that is not due, the weights of its computed steps in this one, the newest first."""
        for index, (image, is_due) in enumerate(zip(self.images, self.due, strict=True)):
            if not is_due:
                places, numbers = _known(history, index)
                own = image.curve.weights(places, numbers, step.place, step.number)
                image.given = image.misses.skipped(step, own, numbers)
        return [[1.0] if is_due else image.given for image, is_due in zip(self.images, self.due, strict=True)]

    def rows(self, samples: Sequence[torch.Tensor], outputs: Tensors) -> tuple[Rows, Rows]:
        """Samples and outputs with a row for each image, and for each of its copies."""
        return rows_of(samples, numbers_in(outputs), by_image=self._by_image)

    def forget(self, branch: Hashable) -> None:
        """What a branch gave no longer tells what it will give."""
        self._branches.pop(branch, None)

    @property
    def is_open(self) -> bool:
        """Whether the last computed step has not been judged yet."""
        return any(self._open)

    def judge(
        self,
        leader: RowHistory,
        samples: Sequence[torch.Tensor],
        num_steps: int | None,
        summed: Summed | None = None,
    ) -> list[Judged | None]:
        """For each image what its last computed step tells, now that the next samples are known; None for those that
        were not due. This waits for the device. `summed` adds the scalar products of all ranks, each of which knows
        those of its tokens."""
        histories = [of for of in self._branches.values() if _is_beside(of, leader)]
        depth = min(map(len, histories))
        outputs = [[numbers_in(step.tensors) for step in of.steps[:depth]] for of in histories]
        how = self._by_image, len(self.images)
        measured = compared((list(samples), list(self._samples), outputs), *how)
        each = [index for index, is_open in enumerate(self._open) if is_open]
        curves = [curve for curve in CURVES if curve.order + 2 <= depth]
        known = (_known(leader, index) for index in each)
        weights = [[of.weights(places[1:], steps[1:], places[0], steps[0]) for of in curves] for places, steps in known]
        found = self._drifts(measured, num_steps, summed)  # What does not need the device is done before.
        judged: list[Judged | None] = [None] * len(self.images)
        for index, own in zip(each, weights, strict=True):
            drifts = map(max, zip(*(of.of(own, index) for of in found), strict=True))
            drift, curve = min(zip(drifts, curves, strict=True), key=lambda pair: max(pair[0], _ROUNDING))
            self.images[index].curve = curve
            judged[index] = Judged(drift, curve.order)
        return judged

    def set_gaps(
        self, leader: RowHistory, judged: Sequence[Judged | None], tolerance: float, num_steps: int | None = None
    ) -> None:
        """The next gap of each image that was judged."""
        for index, (image, found) in enumerate(zip(self.images, judged, strict=True)):
            if found is not None:
                _, numbers = _known(leader, index)
                image.set_gap(*found, numbers[0], numbers[1], tolerance, num_steps or _USUAL_STEPS)
        self.drift = max(found.drift for found in judged if found is not None)
        self._open = ()

    def _drifts(self, measured: Compared, num_steps: int | None, summed: Summed | None) -> list[Drifts]:
        """For each part of the output."""
        response = None if measured.sees_way else 1 / (num_steps or _USUAL_STEPS)
        together = measured.products
        if summed is not None:
            together = summed(together.flatten()).reshape(together.shape)
        given = [(image.given, image.used) for image in self.images]
        read, ends = together.cpu().numpy(), accumulate(measured.lengths)
        each = [read[end - length : end] for length, end in zip(measured.lengths, ends, strict=True)]
        return [Drifts(found, measured.num_branches, given, response) for found in each]


def count_images(samples: Sequence[torch.Tensor], outputs: Tensors) -> tuple[int | None, int]:
    """How many images a call is about, None where its outputs have no row for each; and how many copies it has of
    them. This waits for the device."""
    lengths = {tensor.shape[:1] for tensor in outputs if tensor is not None}
    found, rows = rows_of(samples, numbers_in(outputs), by_image=True)
    if len(rows) != 1 or lengths != {rows[0].shape[:1]}:
        return None, 1
    copies = num_copies(found[0]) if found else 1
    return len(rows[0]) // copies, copies


def numbers_in(tensors: Tensors) -> list[torch.Tensor]:
    """Those of an output's tensors that can be forecast."""
    return [tensor for tensor in tensors if tensor is not None and tensor.is_floating_point() and tensor.dim()]


def _known(history: RowHistory, image: int) -> tuple[list[float], list[int]]:
    """The places and numbers of an image's computed steps, the newest first."""
    return [step.places[image] for step in history.steps], [step.numbers[image] for step in history.steps]


def _is_beside(branch: RowHistory, leader: RowHistory) -> bool:
    """Whether a branch was computed at the steps at which the leader was, and can be compared with it."""
    numbers, others = ([step.numbers for step in of.steps[:LEAST_KNOWN]] for of in (branch, leader))
    shapes, wanted = ([tensor.shape for tensor in numbers_in(of.newest)] if len(of) else [] for of in (branch, leader))
    return numbers == others and shapes == wanted
