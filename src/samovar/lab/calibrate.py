"""How does a change of the modulated input turn into one of the output, on this model? Measured, then fitted.

Pictures are made one at a time and nothing is skipped. Of every branch the last signal and the last output are held,
to compare the next with; what is kept is numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..arch import find_denoisers
from ..arch.modules import unwrapped
from ..cache import TeaCacheBackend, TeaCacheHook
from ..cache.teacache import HOOK_NAME as CACHE_HOOK
from ..errors import ModelError, SettingError
from ..hooks import HookOrder, HookRegistry, ModelHook, current_context
from .methods import Method, Notes
from .session import Session
from .studio import Task
from .trajectory import Trajectory, watched_exact

FEWEST_STEPS = 2
HIGHEST_DEGREE = 4
"""What coefficients of TeaCache have: five numbers."""
LEAST_EXPLAINED = 0.05
"""A polynomial that explains less than this of what a constant leaves open is not worth having."""

_ALWAYS_COMPUTED = {"rel_l1_thresh": 1e-30, "min_steps": 0}
_HOOK = "lab_signals"


@dataclass(frozen=True)
class Fit:
    """A polynomial from change of signal to change of output, of one branch."""

    coefficients: tuple[float, ...]
    """Five, highest power first."""
    degree: int
    """The one that does best on pictures that it was not fitted to."""
    explained: float
    """R², on pictures that it was not fitted to: 0 for a constant, 1 for all."""
    num_points: int
    signal_from: float
    signal_to: float
    """Beyond these the polynomial is a guess."""

    @property
    def is_useful(self) -> bool:
        return self.degree > 0 and self.explained >= LEAST_EXPLAINED

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.is_useful:
            return (
                "no better than a constant: the signal does not tell how the output changes. Use a schedule, which "
                "needs no signal (samovar tune)"
            )
        return f"explains {self.explained:.0%} of the output's change on pictures that it was not fitted to"


@dataclass(frozen=True)
class Calibration:
    """What was found of a model."""

    model_class: str
    origin: str
    leader: str
    """The branch that is called first, and decides for all: its fit is the one to use."""
    branches: Mapping[str, Fit]
    trajectory: Trajectory | None
    """None where the pipeline's scheduler cannot be watched."""

    @property
    def fit(self) -> Fit:
        return self.branches[self.leader]

    def to_dict(self) -> dict[str, Any]:
        """For JSON. `cache` is what `attach(cache=...)` takes, `coefficients` an entry as in coefficients.json."""
        values = [float(f"{value:.9g}") for value in self.fit.coefficients]
        entry = {"coefficients": values, "origin": self.origin}
        errors = None if self.trajectory is None else self.trajectory.reuse_errors()
        return {
            "cache": {"coefficients": values} if self.fit.is_useful else {},
            "coefficients": {self.model_class: entry} if self.fit.is_useful else {},
            "verdict": self.fit.verdict,
            "leader": self.leader,
            "branches": {name: {**asdict(fit), "verdict": fit.verdict} for name, fit in self.branches.items()},
            "reuse_errors": None if errors is None else [[round(e, 5) for e in row] for row in errors.tolist()],
            "places": None if self.trajectory is None else self.trajectory.places,
        }


def check_tasks(tasks: Sequence[Task]) -> None:
    """Refuse what nothing can be learnt from."""
    if len(tasks) < 2:
        raise SettingError(
            f"{len(tasks)} picture to calibrate with; at least two were expected, as one says nothing about another. "
            "Give more prompts, or more seeds."
        )


def calibrate(session: Session, origin: str) -> Calibration:
    """Fit the polynomial of each branch, and measure what reusing an output costs, on a session's tasks."""
    if session.studio.config.batch != 1:
        raise SettingError("Calibration makes one picture at a time, as a cache judges one: give a batch of 1.")
    check_tasks(session.tasks)
    if session.studio.steps < FEWEST_STEPS:
        raise SettingError(
            f"{session.studio.steps} steps; at least {FEWEST_STEPS} were expected, as changes from step to step are "
            "looked at."
        )
    denoisers = session.studio.denoisers
    if len(denoisers) > 1:
        raise ModelError(
            f"There are several denoisers ({', '.join(denoisers)}), and coefficients are of one. Use a schedule, which "
            "needs none: samovar tune."
        )
    method = watched_signals()
    session.exact(method)
    notes = session.notes(method)
    names = list(notes[0]["branches"])
    # In order: branches that a pipeline does not name have other names in each run.
    rows = [list(note["branches"].values()) for note in notes]
    fits = {
        name: fit([(row[number]["signal"], row[number]["output"]) for row in rows]) for number, name in enumerate(names)
    }
    watched = [note["trajectory"] for note in notes if note["trajectory"] is not None]
    (denoiser,) = denoisers.values()
    return Calibration(
        type(unwrapped(denoiser)).__name__, origin, names[0], fits, Trajectory.read(watched) if watched else None
    )


def fit(pictures: Sequence[tuple[Sequence[float], Sequence[float]]], num_folds: int = 4) -> Fit:
    """The polynomial through (signal, output) of several pictures, of the degree that cross-validation prefers."""
    folds = min(num_folds, len(pictures))
    explained = {degree: _explained(pictures, degree, folds) for degree in range(HIGHEST_DEGREE + 1)}
    degree = max(explained, key=lambda d: (explained[d], -d))
    x, y = _joined(pictures)
    powers = _polynomial(x, y, degree)
    coefficients = [0.0] * (HIGHEST_DEGREE + 1 - len(powers)) + powers[::-1]
    return Fit(tuple(coefficients), degree, explained[degree], len(x), float(x.min()), float(x.max()))


def _explained(pictures: Sequence[Any], degree: int, folds: int) -> float:
    """R² on pictures left out of the fit, beside the mean of those that were not."""
    missed = missed_by_mean = 0.0
    for fold in range(folds):
        x, y = _joined([picture for number, picture in enumerate(pictures) if number % folds != fold])
        left_x, left_y = _joined(pictures[fold::folds])
        if len(set(x.tolist())) <= degree:  # No curve is determined by so few places.
            return -float("inf")
        predicted = np.polynomial.polynomial.polyval(left_x, _polynomial(x, y, degree))
        missed += float(((left_y - predicted) ** 2).sum())
        missed_by_mean += float(((left_y - y.mean()) ** 2).sum())
    return 1.0 - missed / missed_by_mean if missed_by_mean > 0 else 0.0


def _polynomial(x: Any, y: Any, degree: int) -> list[float]:
    """Lowest power first. Fitted within -1 and 1, where powers are told apart, and then rewritten."""
    if degree == 0:
        return [float(y.mean())]
    found = np.polynomial.Polynomial.fit(x, y, degree).convert().coef
    return [float(value) for value in found]


def _joined(pictures: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[Any, Any]:
    return np.concatenate([p[0] for p in pictures]), np.concatenate([p[1] for p in pictures])


# ------------------------------------------------------------------------------------------------ watching


def watched_signals() -> Method:
    """The exact pictures, with a note for each call: by branch, how much signal and output changed a step."""
    exact = watched_exact()

    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Notes]:
        backend = TeaCacheBackend(_ALWAYS_COMPUTED, agree=_WithItself())
        denoisers = find_denoisers(pipeline)
        with contextlib.ExitStack() as undo:
            trajectory = undo.enter_context(exact.attached(pipeline))
            undo.enter_context(backend.enable(pipeline))
            hooks = {}
            for name, denoiser in denoisers.items():
                registry = HookRegistry.get_or_create(denoiser)
                hooks[name] = SignalHook()
                registry.register_hook(_HOOK, hooks[name])
                undo.callback(registry.remove_hook, _HOOK)
            yield lambda: {"branches": taken(hooks), "trajectory": _or_none(trajectory)}

    return Method("exact, by branches", exact.family, {}, attached)


class _WithItself:
    """To agree with oneself makes every branch read its signal, and not the leading one alone."""

    def __call__(self, figures: torch.Tensor) -> torch.Tensor:
        return figures

    within_branch = __call__


class SignalHook(ModelHook):
    """Compares each call of a denoiser with the one before it in the same branch."""

    order = HookOrder.OTHER  # Its end comes before that of the hook that knows the branch.

    def __init__(self) -> None:
        self._last: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._changes: dict[str, list[torch.Tensor]] = {}

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        branch = current_context().branch
        cache = HookRegistry.get_or_create(module).get_hook(CACHE_HOOK)
        assert isinstance(cache, TeaCacheHook)
        signal = cache.state_manager.get_state().signal if branch is not None else None
        if branch is None or signal is None:
            raise ModelError(
                f"Of a call of {type(module).__name__} neither branch nor signal is known, so that there is nothing to "
                "calibrate. Schedules need neither: samovar tune."
            )
        leaf = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
        now = signal.value, leaf.detach().clone()
        before = self._last.get(branch)
        if before is not None:
            pairs = [_change(old, new) for old, new in zip(before, now, strict=True)]
            self._changes.setdefault(branch, []).append(torch.stack(pairs))
        self._last[branch] = now
        return output

    def take(self) -> dict[str, dict[str, list[float]]]:
        """The changes of the run that has ended, which is then forgotten. No device was waited for until now."""
        changes, self._changes, self._last = self._changes, {}, {}
        columns = {branch: torch.stack(pairs).T.tolist() for branch, pairs in changes.items()}
        return {branch: {"signal": signal, "output": output} for branch, (signal, output) in columns.items()}


def _change(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Relative, as the cache has it: mean absolute difference over mean absolute value."""
    return (new.float() - old.float()).abs().mean() / old.float().abs().mean().clamp_min(1e-30)


def taken(hooks: Mapping[str, SignalHook]) -> dict[str, Any]:
    return {branch: changes for hook in hooks.values() for branch, changes in hook.take().items()}


def _or_none(trajectory: Notes) -> Any:
    try:
        return trajectory()
    except ModelError:  # Coefficients do not need it.
        return None
