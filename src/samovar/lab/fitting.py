"""Which steps should be skipped, and what should a skipped step be made of? Fitted to exact runs.

    runs = [Products.of(outputs, sizes, guidance), ...]          one per exact run
    plan = fit_schedule(Products.mean(runs), forwards=32)        which forwards to compute, and weights for the others
    plan = fit_weights(Products.mean(runs), {"cond": "#..#", "uncond": "##.#"})      or weights for a given schedule
    outliers = fit_outliers(Products.mean(runs), plan, early, forwards=64)           more forwards for difficult images

`outputs` are the model's outputs at each step, by branch. `sizes` says how far each step moves the latents (for a flow,
the difference of noise levels), `guidance` how much each branch counts in the prediction. If only the prediction is
known, it is a single branch named "*", which stands for all.

A forecast is a weighted sum of the last computed outputs of its branch. The drift, the distance of the latents from
those of the exact run, is therefore a weighted sum of outputs too, and its size follows from inner products alone.
Weights are fitted step by step, for all branches that are skipped at that step together, to make the drift after the
step as small as possible: they make up for earlier forecasts, as far as stored outputs allow. The model's reaction to
the drift is left out; it is small as long as the drift is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..cache.config import TeaCacheConfig
from ..core.errors import SettingError

Vector = npt.NDArray[np.float64]
DEPTH = 4
"""Computed outputs per forecast. A fifth gains little."""
_RIDGE = 1e-6
"""Keeps weights small where nearly equal outputs leave them open, relative to the size of the outputs."""
_WIDTH = 32
"""Candidates that the search keeps for each number of forwards."""
_SLACK = 6
"""How many forwards a candidate may be ahead of an even distribution, or behind it."""
OUTLIER_SHARE = 0.1
"""Share of images treated as outliers: on the built-in model this includes nearly all that change into others."""
_OUTLIER_POSITION = 0.06
"""Where in the run outliers are recognised. Until then every step is computed, as outliers cannot do without any."""
_BEYOND = 1.02
"""Where outliers begin if none was seen, relative to the largest error seen."""
_EXACT_BEGINNING = 2
"""Outliers are computed without a gap for this many times as long as all images are."""


@dataclass(frozen=True)
class Products:
    """Mean inner products of the outputs of exact runs, for every pair of steps and branches."""

    branches: tuple[str, ...]
    guidance: tuple[float, ...]
    """How much each branch counts in the prediction."""
    sizes: tuple[float, ...]
    """How far each step moves the latents."""
    values: Vector
    """A square matrix: all steps of the first branch, then of the next."""

    def __post_init__(self) -> None:
        count = len(self.branches) * len(self.sizes)
        if not count or len(self.guidance) != len(self.branches) or self.values.shape != (count, count):
            raise SettingError(
                f"Products of {len(self.branches)} branches and {len(self.sizes)} steps with {len(self.guidance)} "
                f"guidance weights and a matrix of {self.values.shape}; expected one weight per branch and a matrix of "
                f"{(count, count)}."
            )
        if not (np.isfinite(self.values).all() and all(map(math.isfinite, (*self.guidance, *self.sizes)))):
            raise SettingError("Products are not finite: a run produced NaN or infinity. Leave that run out.")

    @staticmethod
    def of(
        outputs: Mapping[str, Sequence[torch.Tensor]], sizes: Sequence[float], guidance: Mapping[str, float]
    ) -> Products:
        """The products of one run, from the outputs of each branch at all steps."""
        if set(outputs) != set(guidance) or any(len(steps) != len(sizes) for steps in outputs.values()):
            given = {name: len(steps) for name, steps in outputs.items()}
            raise SettingError(
                f"Outputs of {given!r} steps for {len(sizes)} sizes and guidance {dict(guidance)!r}; expected one "
                "output per step, and guidance for the same branches."
            )
        rows = torch.stack([output.detach().flatten() for steps in outputs.values() for output in steps]).double()
        values = (rows @ rows.T / rows.shape[1]).cpu().numpy()
        return Products(tuple(outputs), tuple(guidance[name] for name in outputs), tuple(map(float, sizes)), values)

    @staticmethod
    def mean(runs: Sequence[Products]) -> Products:
        """The mean of several runs with the same branches and steps."""
        if not runs or any((run.branches, run.sizes) != (runs[0].branches, runs[0].sizes) for run in runs):
            raise SettingError(f"{len(runs)} runs; expected at least one, and all with the same branches and steps.")
        guidance = np.mean([run.guidance for run in runs], axis=0)
        values: Vector = np.mean([run.values for run in runs], axis=0)
        return Products(runs[0].branches, tuple(guidance.tolist()), runs[0].sizes, values)

    def mixed(self) -> Products:
        """The same for the prediction alone, as guidance mixes it from the branches."""
        mix = np.kron(np.array(self.guidance), np.eye(len(self.sizes)))
        return Products(("*",), (1.0,), self.sizes, mix @ self.values @ mix.T)


Weights = Mapping[str, Mapping[int, Mapping[int, float]]]
"""By branch and skipped step: the weight of each computed step."""


@dataclass(frozen=True)
class FittedPlan:
    """The computed steps of each branch, and the weights that the others are made with."""

    schedules: Mapping[str, str]
    weights: Weights
    drift: float
    """Expected root mean square error of the final latents, in their own unit."""

    def settings(self) -> dict[str, Any]:
        """Settings of a cache, as plain JSON values."""
        weights = {
            branch: {str(step): _rounded(row) for step, row in steps.items()} for branch, steps in self.weights.items()
        }
        fixed = {"forecast": "fitted", "forecast_of": "output"}
        return {**fixed, "schedule": dict(self.schedules), "forecast_weights": weights}


def _rounded(weights: Mapping[int, float]) -> dict[str, float]:
    return {str(step): float(f"{weight:.6g}") for step, weight in weights.items()}


class _Candidate(NamedTuple):
    """A run up to some step."""

    computed: tuple[tuple[int, ...], ...]
    """The computed steps of each branch."""
    drift: Vector
    """The drift as weights of all exact outputs."""
    now: float = 0.0
    """The mean square of the drift."""
    past: float = 0.0
    """The same, summed over the steps before."""

    @property
    def forwards(self) -> int:
        return sum(map(len, self.computed))

    @property
    def cost(self) -> float:
        """The drift now, and the drift on the way, to which the model reacts."""
        return self.now + self.past


def fit_weights(products: Products, schedules: Mapping[str, Sequence[bool] | str]) -> FittedPlan:
    """The best weights for a schedule of each branch."""
    masks = TeaCacheConfig(schedule=schedules).masks
    if set(masks) != set(products.branches) or len(next(iter(masks.values()))) != len(products.sizes):
        raise SettingError(
            f"Schedules {dict(schedules)!r}; expected {len(products.sizes)} steps for each of the branches "
            f"{', '.join(map(repr, products.branches))}."
        )
    candidate, weights = _follow(products, masks)
    written = {branch: "".join(".#"[computed] for computed in masks[branch]) for branch in products.branches}
    return FittedPlan(written, weights, math.sqrt(candidate.now))


def fit_schedule(
    products: Products,
    forwards: int,
    together: bool = False,
    begin: Mapping[str, Sequence[bool] | str] | None = None,
) -> FittedPlan:
    """The best schedule that the search finds with this many computed forwards of all branches, and its weights.

    Of all candidates with the same number of forwards and the same last two computed steps, the best is kept.
    `together` computes all branches at the same steps, which a pipeline that calls them in one batch needs. `begin`
    fixes the first steps of each branch."""
    steps, branches = len(products.sizes), len(products.branches)
    if type(forwards) is not int or not branches <= forwards <= steps * branches:
        raise SettingError(
            f"forwards={forwards!r}; expected a whole number from {branches} (the first step of each branch) to "
            f"{steps * branches} (all of them)."
        )
    if together and forwards % branches:
        raise SettingError(f"forwards={forwards}; expected a multiple of {branches}, the number of branches.")
    choices = [skip for count in range(branches + 1) for skip in itertools.combinations(range(branches), count)]
    if together:
        choices = [(), tuple(range(branches))]
    given = TeaCacheConfig(schedule=begin or dict.fromkeys(products.branches, "#")).masks
    first = max(map(len, given.values()))
    rest = forwards - sum(map(sum, given.values()))
    if set(given) != set(products.branches) or first > steps or not 0 <= rest <= branches * (steps - first):
        raise SettingError(
            f"begin={dict(begin or {})!r} for {forwards} forwards in {steps} steps; expected the first steps of each "
            f"of the branches {', '.join(map(repr, products.branches))}, with at most {forwards} of them computed and "
            "room for the others."
        )
    start = _follow(products, given)[0]
    candidates = [start]
    for step in range(first, steps):
        best: dict[tuple[Any, ...], _Candidate] = {}
        for candidate, skipped in itertools.product(candidates, choices):
            count = candidate.forwards + branches - len(skipped)
            left = branches * (steps - 1 - step)
            even = start.forwards + rest * (step - first + 1) / (steps - first)
            if abs(count - even) > _SLACK or not forwards - left <= count <= forwards:
                continue
            taken = _take(products, candidate, step, skipped)[0]
            key = (count, *(of[-2:] for of in taken.computed))
            if key not in best or taken.cost < best[key].cost:
                best[key] = taken
        ordered = sorted(best.values(), key=lambda candidate: (candidate.forwards, candidate.cost))
        groups = itertools.groupby(ordered, lambda candidate: candidate.forwards)
        candidates = [candidate for _, group in groups for candidate in itertools.islice(group, _WIDTH)]
    chosen = min(candidates, key=lambda candidate: candidate.cost).computed
    masks = {name: [step in of for step in range(steps)] for name, of in zip(products.branches, chosen, strict=True)}
    return fit_weights(products, masks)


def fit_outliers(
    products: Products, usual: FittedPlan, each: Mapping[str, Vector], forwards: int
) -> dict[str, Any] | None:
    """A cache's setting for outliers: how to recognise images that the usual plan would change, and a plan with this
    many forwards for them. `each` holds the products of the first outputs of single runs, by branch: (runs, steps,
    steps). None if the usual plan skips any step up to `outlier_step`."""
    branch = max(zip(products.branches, products.guidance, strict=True), key=lambda one: abs(one[1]))[0]
    step = outlier_step(len(products.sizes))
    runs = each.get(branch, np.empty(0))
    if runs.ndim != 3 or not len(runs) or runs.shape[1] != runs.shape[2] or runs.shape[1] <= step:
        given = {name: of.shape for name, of in each.items()}
        raise SettingError(
            f"each has {given!r}; expected products of single runs for {branch!r}, (runs, steps, steps), of at least "
            f"the first {step + 1} steps."
        )
    if any("." in of[: step + 1] for of in usual.schedules.values()):
        return None
    old = list(range(step))[-DEPTH:]
    mean = runs.mean(axis=0)
    row = solve(mean[np.ix_(old, old)], mean[old, step])
    miss = np.zeros(len(mean))
    miss[[*old, step]] = *-row, 1.0
    squares = np.einsum("i,rij,j->r", miss, runs, miss) / np.maximum(runs[:, step, step], np.finfo(np.float64).tiny)
    errors = np.sort(np.sqrt(np.maximum(squares, 0.0)))
    exact = "#" * min(_EXACT_BEGINNING * (step + 1), forwards // len(products.branches))
    together = len(set(usual.schedules.values())) == 1
    plan = fit_schedule(products, forwards, together, dict.fromkeys(products.branches, exact)).settings()
    return {
        "branch": branch,
        "step": step,
        "weights": _rounded(dict(zip(old, row.tolist(), strict=True))),
        "error": _boundary(errors, int(OUTLIER_SHARE * len(errors))),
        "schedule": plan["schedule"],
        "forecast_weights": plan["forecast_weights"],
    }


def _boundary(errors: Vector, count: int) -> float:
    """The error beyond which an image is an outlier, if `count` of these, in ascending order, are. It lies midway
    between the last usual image and the first outlier: another processor rounds the same image differently, and must
    not judge it differently."""
    last = len(errors) - 1 - count
    beyond = errors[last + 1] if count else errors[last] * _BEYOND
    return float((errors[last] + beyond) / 2)


def outlier_step(steps: int) -> int:
    """The step of a run at which outliers are recognised. All steps up to it are computed."""
    return max(2, round(_OUTLIER_POSITION * steps))


def _follow(products: Products, masks: Mapping[str, Sequence[bool]]) -> tuple[_Candidate, Weights]:
    """The candidate with these schedules, as far as they go, and its weights."""
    weights: dict[str, dict[int, dict[int, float]]] = {branch: {} for branch in products.branches}
    candidate = _Candidate(((0,),) * len(products.branches), np.zeros(len(products.values)))
    for step in range(1, len(masks[products.branches[0]])):
        skipped = [number for number, branch in enumerate(products.branches) if not masks[branch][step]]
        candidate, fitted = _take(products, candidate, step, skipped)
        for number, row in fitted.items():
            weights[products.branches[number]][step] = row
    return candidate, weights


def _take(
    products: Products, before: _Candidate, step: int, skipped: Sequence[int]
) -> tuple[_Candidate, dict[int, dict[int, float]]]:
    """A candidate one step further, with some branches skipped; and the weights of these branches."""
    steps = len(products.sizes)
    computed = tuple(of if number in skipped else (*of, step) for number, of in enumerate(before.computed))
    past = before.past + before.now / steps
    if not skipped:
        return _Candidate(computed, before.drift, before.now, past), {}
    used = [(number, old) for number in skipped for old in computed[number][-DEPTH:]]
    indices = [number * steps + old for number, old in used]
    reach = np.array([products.guidance[number] * products.sizes[step] for number, _ in used])
    drift = before.drift.copy()
    for number in skipped:  # Without these outputs the latents are off by them.
        drift[number * steps + step] -= products.guidance[number] * products.sizes[step]
    gram = products.values[np.ix_(indices, indices)] * np.outer(reach, reach)
    weights = solve(gram, -reach * (products.values[indices] @ drift))
    drift[indices] += reach * weights
    fitted: dict[int, dict[int, float]] = {number: {} for number in skipped}
    for (number, old), weight in zip(used, weights.tolist(), strict=True):
        fitted[number][old] = weight
    return _Candidate(computed, drift, max(float(drift @ products.values @ drift), 0.0), past), fitted


def solve(gram: Vector, target: Vector) -> Vector:
    """Least squares with a small ridge."""
    gram = gram.copy()
    gram[np.diag_indices(len(gram))] += _RIDGE * gram.diagonal().mean() + np.finfo(np.float64).tiny
    return np.linalg.solve(gram, target).astype(np.float64)
