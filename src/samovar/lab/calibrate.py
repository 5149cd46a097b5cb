"""How does a change of TeaCache's signal relate to a change of the output, on this model? Measured, then fitted."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial

from ..arch.modules import unwrapped
from ..cache import TeaCacheBackend
from ..core.errors import ModelError, SettingError
from .image_runner import Task
from .methods import EXACT, Method, Notes
from .session import Session
from .trajectory import Outputs, watch

_FEWEST_STEPS = 2
_HIGHEST_DEGREE = 4
"""TeaCache takes five coefficients."""
_LEAST_EXPLAINED = 0.05
"""A polynomial that explains less than this, compared with a constant, is useless."""
_NEVER_SKIPS = {"rel_l1_thresh": 1e-30, "min_steps": 0, "first_steps": 1, "last_steps": 0}

Changes = tuple[Sequence[float], Sequence[float]]
"""Relative changes of the signal and of the output, from step to step of one image."""


@dataclass(frozen=True)
class Fit:
    """A polynomial from the change of the signal to the change of the output."""

    coefficients: tuple[float, ...]
    """Five, highest power first."""
    degree: int
    """The one that does best on images left out of the fit."""
    explained: float
    """R² on images left out of the fit: 0 for a constant, 1 for a perfect fit."""
    num_points: int
    signal_from: float
    signal_to: float
    """Outside this range the polynomial is a guess."""

    @property
    def is_useful(self) -> bool:
        return self.degree > 0 and self.explained >= _LEAST_EXPLAINED

    @property
    def verdict(self) -> str:
        if self.is_useful:
            return f"explains {self.explained:.0%} of the output's change on images left out of the fit"
        return "no better than a constant: the signal does not predict the output. Use a schedule instead: samovar tune"


@dataclass(frozen=True)
class Calibration:
    """The fit for one model, from the branch that decides for all: the one that the pipeline calls first."""

    model_class: str
    num_steps: int
    fit: Fit

    def to_dict(self, origin: str) -> dict[str, Any]:
        """For JSON. `cache` has the settings, `coefficients` an entry for coefficients.json."""
        values = [float(f"{value:.9g}") for value in self.fit.coefficients] if self.fit.is_useful else None
        return {
            "cache": {"backend": "tea_cache"} | ({"coefficients": values} if values else {}),
            "num_inference_steps": self.num_steps,
            "coefficients": {self.model_class: {"coefficients": values, "origin": origin}} if values else {},
            "verdict": self.fit.verdict,
            "fit": asdict(self.fit),
        }


def check_tasks(tasks: Sequence[Task]) -> None:
    """Refuse too few tasks."""
    if len(tasks) < 2:
        raise SettingError(f"{len(tasks)} image to calibrate with; expected at least 2. Give more prompts or seeds.")


def calibrate(session: Session) -> Calibration:
    """Fit the polynomial on a session's tasks."""
    check_tasks(session.tasks)
    runner = session.runner
    if runner.batch != 1:
        raise SettingError(f"batch={runner.batch}; calibration needs 1, as a cache decides by one image.")
    if runner.steps < _FEWEST_STEPS:
        raise SettingError(
            f"num_inference_steps={runner.steps}; calibration looks at changes from step to step and needs at least "
            f"{_FEWEST_STEPS}.",
            param="num_inference_steps",
        )
    if len(runner.denoisers) > 1:
        raise ModelError(
            f"There are several denoisers ({', '.join(runner.denoisers)}), and coefficients belong to one. Use a "
            "schedule instead: samovar tune."
        )
    session.progress.expect(all=len(session.tasks))
    session.exact(WITH_SIGNALS)
    (denoiser,) = runner.denoisers.values()
    return Calibration(type(unwrapped(denoiser)).__name__, runner.steps, fit(session.notes(WITH_SIGNALS)))


@contextlib.contextmanager
def _with_signals(pipeline: Any) -> Iterator[Notes]:
    backend = TeaCacheBackend(_NEVER_SKIPS)
    with watch(pipeline) as run, backend.enable(pipeline):
        yield lambda: _changes(backend, run.take_outputs())


WITH_SIGNALS = Method("exact, with signals", EXACT.family, attached=_with_signals)
"""The exact images, with notes on how much signal and output changed at each step."""


def _changes(backend: TeaCacheBackend, outputs: Outputs) -> Changes:
    (denoiser,) = backend.stats().denoisers.values()
    leader, branch = next(iter(denoiser.branches.items()))
    pairs = itertools.pairwise(output.float() for output in outputs.get(leader, []))
    # As the cache measures its signal: mean absolute difference relative to the mean absolute value.
    changes = [float((new - old).abs().mean() / old.abs().mean().clamp_min(1e-30)) for old, new in pairs]
    known = [(r.distance, c) for r, c in zip(branch.steps[1:], changes, strict=False) if r.distance is not None]
    if not known:
        raise ModelError(
            f"The signal of {denoiser.model} is not known ({denoiser.problem or branch.steps[-1].reason}), so there is "
            "nothing to calibrate. Use a schedule instead: samovar tune."
        )
    signal, output = zip(*known, strict=True)
    return signal, output


def fit(images: Sequence[Changes], num_folds: int = 4) -> Fit:
    """The polynomial through the changes of several images, with the degree that cross-validation prefers."""
    folds = min(num_folds, len(images))
    explained = {degree: _explained(images, degree, folds) for degree in range(_HIGHEST_DEGREE + 1)}
    degree = max(explained, key=lambda d: (explained[d], -d))
    x, y = _joined(images)
    powers = Polynomial.fit(x, y, degree).convert().coef.tolist()
    coefficients = [0.0] * (_HIGHEST_DEGREE + 1 - len(powers)) + powers[::-1]
    return Fit(tuple(coefficients), degree, explained[degree], len(x), float(x.min()), float(x.max()))


def _explained(images: Sequence[Changes], degree: int, folds: int) -> float:
    """R² on images left out of the fit, relative to the mean of the others."""
    missed = missed_by_mean = 0.0
    for fold in range(folds):
        x, y = _joined([image for number, image in enumerate(images) if number % folds != fold])
        left_x, left_y = _joined(images[fold::folds])
        if len(set(x.tolist())) <= degree:  # Too few points for a curve.
            return -float("inf")
        missed += float(((left_y - Polynomial.fit(x, y, degree)(left_x)) ** 2).sum())
        missed_by_mean += float(((left_y - y.mean()) ** 2).sum())
    return 1.0 - missed / missed_by_mean if missed_by_mean > 0 else 0.0


def _joined(images: Sequence[Changes]) -> tuple[Any, Any]:
    return np.concatenate([image[0] for image in images]), np.concatenate([image[1] for image in images])
