"""TeaCache's polynomial for a model, fitted: how a change of the signal relates to a change of the output."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.polynomial import Polynomial

from ..arch import find_denoisers
from ..arch.modules import unwrapped
from ..cache import TeaCacheBackend
from ..core import nested
from ..core.errors import ModelError, SettingError
from ..hooks import current_context
from .journal import Journal
from .methods import EXACT, Method, Report
from .progress import Progress
from .runner import Runner
from .tasks import Task

_HIGHEST_DEGREE = 4
"""TeaCache takes five coefficients."""
_LEAST_EXPLAINED = 0.05
"""A polynomial that explains less than this, compared with a constant, is useless."""
_NEVER_SKIPS = {"rel_l1_thresh": 1e-30, "min_steps": 0, "first_steps": 1, "last_steps": 0}

Changes = Sequence[Sequence[float]]
"""Relative changes of the signal, and of the output, from step to step of one image."""


@dataclass(frozen=True)
class Fit:
    """A polynomial from the change of the signal to the change of the output, in the branch that the pipeline calls
    first: it decides for all."""

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

    def to_dict(self, runner: Runner, origin: str) -> dict[str, Any]:
        """For JSON. `cache` has the settings, `coefficients` an entry for coefficients.json."""
        (denoiser,) = runner.denoisers.values()
        values = [float(f"{value:.9g}") for value in self.coefficients]
        entry = {type(unwrapped(denoiser)).__name__: {"coefficients": values, "origin": origin}}
        return {
            "cache": {"backend": "tea_cache"} | ({"coefficients": values} if self.is_useful else {}),
            "num_inference_steps": runner.steps,
            "coefficients": entry if self.is_useful else {},
            "verdict": self.verdict,
            "fit": asdict(self),
        }


def check_tasks(tasks: Sequence[Task]) -> None:
    """Refuse too few tasks."""
    if len(tasks) < 2:
        raise SettingError(f"{len(tasks)} image to calibrate with; expected at least 2. Give more prompts or seeds.")


def calibrate(runner: Runner, tasks: Sequence[Task], journal: Journal, progress: Progress | None = None) -> Fit:
    """Fit the polynomial on the exact images of some tasks."""
    check_tasks(tasks)
    if runner.steps < 2:
        raise SettingError(
            "num_inference_steps=1; calibration looks at changes from step to step. Give 2 or more.",
            param="num_inference_steps",
        )
    if len(runner.denoisers) > 1:
        raise ModelError(
            f"There are several denoisers ({', '.join(runner.denoisers)}), and coefficients belong to one. Use a "
            "schedule instead: samovar tune."
        )
    progress = progress or Progress()
    progress.expect(len(tasks))
    with runner.under(_WITH_SIGNALS) as make:
        for number, task in enumerate(tasks):
            key = f"changes {number}"
            progress.say(f"{number} of {len(tasks)} images")
            if is_made := key not in journal:
                journal.record(key, make([task]).report["changes"])
            progress.add(1, is_made)
    return fit([journal[f"changes {number}"] for number in range(len(tasks))])


@contextlib.contextmanager
def _with_signals(pipeline: Any) -> Iterator[Report]:
    backend, outputs = TeaCacheBackend(_NEVER_SKIPS), dict[str, list[torch.Tensor]]()
    (denoiser,) = find_denoisers(pipeline).values()

    def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
        first = next(nested.tensors(output))
        outputs.setdefault(current_context().branch or "", []).append(first.detach().clone())

    def report() -> Mapping[str, Any]:
        found = _changes(backend, outputs)
        outputs.clear()
        return {"changes": found}

    with unwrapped(denoiser).register_forward_hook(keep), backend.enable(pipeline):
        yield report


_WITH_SIGNALS = Method("exact, with signals", EXACT.family, attached=_with_signals)


def _changes(backend: TeaCacheBackend, outputs: Mapping[str, Sequence[torch.Tensor]]) -> Changes:
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
