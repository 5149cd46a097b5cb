"""What should a skipped step be made of, and which should be skipped? Fitted to exact runs that were watched.

    watched = [Products.of(outputs, sizes, guidance), ...]        one for each exact run, and the run may be forgotten
    plan = fit_schedule(Products.mean(watched), forwards=32)      which forwards of all branches to compute, and weights
    plan = fit_weights(Products.mean(watched), {"cond": "#..#", "uncond": "##.#"})      or weights for a given schedule
    outliers = fit_outliers(Products.mean(watched), plan, early, forwards=64)             more for images that need it
    make_cache_backend("forecast", plan.settings() | {"outliers": outliers})

`outputs` are by branch what the model gave at each step, `sizes` what each step moves the latents by (for a flow, the
difference of noise levels), `guidance` what each branch counts for in the prediction. Where only the prediction was
watched, it is a single branch named "*", which stands for all.

A forecast is a weighted sum of the last computed outputs of its branch. So the drift, which is how far the latents are
from those of the exact run, is a weighted sum of outputs too, and how large it is follows from inner products alone.
Weights are fitted in the order of the steps, for all branches that are skipped at one together, so that the drift
after the step is least: they make up for what earlier forecasts did, as far as anything stored points that way. That
the model answers a drift is left out; as long as it is small that changes little.
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
from ..errors import SettingError

Vector = npt.NDArray[np.float64]
DEPTH = 4
"""On so many computed outputs a forecast rests. A fifth gains little."""
_RIDGE = 1e-6
"""Keeps weights small where nearly equal outputs leave them open, as a part of the outputs' size."""
_WIDTH = 32
"""So many ways are followed for each number of forwards."""
_SLACK = 6
"""A way may be ahead of its share of the forwards, or behind it, by so many."""
OUTLIER_SHARE = 0.1
"""Of all pictures so many are hard: on the built-in model nearly all that turn into others are among them."""
_TOLD_AFTER = 0.06
"""Of the run, which is computed for all, hard pictures are told; they do not bear a skipped step before that."""
_BEYOND = 1.02
"""So much further off than any that was seen begins what is hard, where these are too few for a hard one."""
_EXACT = 2
"""So many times as long hard pictures are computed whole."""


@dataclass(frozen=True)
class Products:
    """How the outputs of exact runs lie to each other: mean products, of all branches and steps with all."""

    branches: tuple[str, ...]
    guidance: tuple[float, ...]
    """What each branch counts for in the prediction."""
    sizes: tuple[float, ...]
    """What each step moves the latents by."""
    values: Vector
    """A matrix, with all steps of the first branch first."""

    def __post_init__(self) -> None:
        count = len(self.branches) * len(self.sizes)
        if not count or len(self.guidance) != len(self.branches) or self.values.shape != (count, count):
            raise SettingError(
                f"Products of {len(self.branches)} branches, {len(self.guidance)} guidance weights, "
                f"{len(self.sizes)} steps and a matrix of {self.values.shape}; one weight for each branch and a matrix "
                f"of {(count, count)} were expected."
            )
        if not (np.isfinite(self.values).all() and all(map(math.isfinite, (*self.guidance, *self.sizes)))):
            raise SettingError("Products that are not finite: a run gave NaN or infinity. Leave it out.")

    @staticmethod
    def of(
        outputs: Mapping[str, Sequence[torch.Tensor]], sizes: Sequence[float], guidance: Mapping[str, float]
    ) -> Products:
        """Of one run: the outputs of each branch at all steps."""
        if set(outputs) != set(guidance) or any(len(steps) != len(sizes) for steps in outputs.values()):
            given = {name: len(steps) for name, steps in outputs.items()}
            raise SettingError(
                f"Outputs of {given!r} steps for {len(sizes)} sizes and guidance {dict(guidance)!r}; one output a step "
                "was expected, of branches of the same names."
            )
        rows = torch.stack([output.detach().flatten() for steps in outputs.values() for output in steps]).double()
        values = (rows @ rows.T / rows.shape[1]).cpu().numpy()
        return Products(tuple(outputs), tuple(guidance[name] for name in outputs), tuple(map(float, sizes)), values)

    @staticmethod
    def mean(runs: Sequence[Products]) -> Products:
        """Of several runs, of the same branches and steps."""
        if not runs or any((run.branches, run.guidance, run.sizes) != _form(runs[0]) for run in runs):
            raise SettingError(f"{len(runs)} runs; some were expected, all with the same branches, guidance and steps.")
        values: Vector = np.mean([run.values for run in runs], axis=0)
        return Products(*_form(runs[0]), values)

    def size(self, combination: Vector) -> float:
        """The mean square of a weighted sum of all outputs."""
        return max(float(combination @ self.values @ combination), 0.0)


def _form(run: Products) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
    return run.branches, run.guidance, run.sizes


Weights = Mapping[str, Mapping[int, Mapping[int, float]]]
"""By branch and skipped step: what each computed step counts for."""


@dataclass(frozen=True)
class FittedPlan:
    """Which steps of each branch are computed, and what the others are made of."""

    schedules: Mapping[str, str]
    weights: Weights
    drift: float
    """The expected root mean square of the last latents' error, in their own unit."""

    @property
    def forwards(self) -> int:
        """How many are computed, of all branches."""
        return sum(mask.count("#") for mask in self.schedules.values())

    def settings(self) -> dict[str, Any]:
        """For `cache_config`, and for JSON."""
        written = {
            branch: {str(step): {str(old): float(f"{weight:.6g}") for old, weight in row.items()}
                     for step, row in steps.items()}
            for branch, steps in self.weights.items()
        }  # fmt: skip
        fixed = {"forecast": "fitted", "forecast_of": "output"}
        return {**fixed, "schedule": dict(self.schedules), "forecast_weights": written}


class _Way(NamedTuple):
    """A run up to some step, of which nothing is known but products."""

    computed: tuple[tuple[int, ...], ...]
    """By branch, the steps that were computed."""
    drift: Vector
    """How far the latents are from those of the exact run, as weights of all exact outputs."""
    now: float = 0.0
    """The mean square of it."""
    past: float = 0.0
    """The same, summed over the steps before."""

    @property
    def forwards(self) -> int:
        return sum(map(len, self.computed))

    @property
    def cost(self) -> float:
        """How bad it is: the drift, and also that on the way, to which the model answers."""
        return self.now + self.past


def fit_weights(products: Products, schedules: Mapping[str, Sequence[bool] | str], depth: int = DEPTH) -> FittedPlan:
    """The best weights for a schedule of each branch."""
    masks = TeaCacheConfig(schedule=schedules).masks
    if set(masks) != set(products.branches) or len(next(iter(masks.values()))) != len(products.sizes):
        raise SettingError(
            f"Schedules {dict(schedules)!r}; {len(products.sizes)} steps for each of the branches "
            f"{', '.join(map(repr, products.branches))} were expected."
        )
    _check_depth(depth)
    way, weights = _follow(products, masks, depth)
    written = {branch: "".join(".#"[computed] for computed in masks[branch]) for branch in products.branches}
    return FittedPlan(written, weights, math.sqrt(way.now))


def fit_schedule(
    products: Products,
    forwards: int,
    depth: int = DEPTH,
    together: bool = False,
    begin: Mapping[str, Sequence[bool] | str] | None = None,
) -> FittedPlan:
    """The best schedule that was found with so many computed forwards of all branches, and its weights.

    Of all ways to a step with the same number of forwards and the same last two computed steps the best is followed.
    `together` computes all branches at the same steps, as a pipeline must that calls them in one batch. `begin` gives
    the first steps of each branch, which are not to be planned."""
    steps, branches = len(products.sizes), len(products.branches)
    if type(forwards) is not int or not branches <= forwards <= steps * branches:
        raise SettingError(
            f"forwards={forwards!r}; a whole number from {branches} (the first step of each branch) to "
            f"{steps * branches} (all) was expected."
        )
    if together and forwards % branches:
        raise SettingError(f"forwards={forwards} of {branches} branches together; a multiple of it was expected.")
    _check_depth(depth)
    every = range(branches)
    choices = [skip for count in range(branches + 1) for skip in itertools.combinations(every, count)]
    if together:
        choices = [(), tuple(every)]
    given = TeaCacheConfig(schedule=begin or dict.fromkeys(products.branches, "#")).masks
    first = max(map(len, given.values()))
    count = sum(map(sum, given.values()))
    if set(given) != set(products.branches) or first > steps or not 0 <= forwards - count <= branches * (steps - first):
        raise SettingError(
            f"begin={dict(begin or {})!r} for {forwards} forwards in {steps} steps; the first steps of each of the "
            f"branches {', '.join(map(repr, products.branches))} were expected, with no more of the forwards, and no "
            "fewer than leave room for the rest."
        )
    start = _follow(products, given, depth)[0]
    ways = [start]
    for step in range(first, steps):
        best: dict[tuple[Any, ...], _Way] = {}
        for way, skipped in itertools.product(ways, choices):
            count = way.forwards + branches - len(skipped)
            left = branches * (steps - 1 - step)
            share = start.forwards + (forwards - start.forwards) * (step - first + 1) / (steps - first)
            if abs(count - share) > _SLACK or not forwards - left <= count <= forwards:
                continue
            taken = _take(products, way, step, skipped, depth)[0]
            key = (count, *(of[-2:] for of in taken.computed))
            if key not in best or taken.cost < best[key].cost:
                best[key] = taken
        ways = _narrow(best.values())
    chosen = min(ways, key=lambda way: way.cost).computed
    masks = {name: [step in of for step in range(steps)] for name, of in zip(products.branches, chosen, strict=True)}
    return fit_weights(products, masks, depth)


def fit_outliers(
    products: Products, usual: FittedPlan, each: Mapping[str, Vector], forwards: int, depth: int = DEPTH
) -> dict[str, Any] | None:
    """The setting `outliers`: how images that the usual plan would change are recognised, and a plan with this many
    forwards for them. `each` has by branch the products of the first outputs of single runs: (runs, steps, steps).
    None if the usual plan skips any step up to `outlier_step`."""
    branch = max(zip(products.branches, products.guidance, strict=True), key=lambda one: abs(one[1]))[0]
    step = outlier_step(len(products.sizes))
    runs = each.get(branch, np.empty(0))
    if runs.ndim != 3 or not len(runs) or runs.shape[1] != runs.shape[2] or runs.shape[1] <= step:
        given = {name: of.shape for name, of in each.items()}
        raise SettingError(
            f"each has {given!r}; for {branch!r} products of some single runs were expected, of the first {step + 1} "
            "steps or more: (runs, steps, steps)."
        )
    if any("." in of[: step + 1] for of in usual.schedules.values()):
        return None
    old = list(range(step))[-depth:]
    mean = runs.mean(axis=0)
    gram = mean[np.ix_(old, old)]
    gram[np.diag_indices(len(old))] += _RIDGE * gram.diagonal().mean() + np.finfo(np.float64).tiny
    row = np.linalg.solve(gram, mean[old, step])
    miss = np.zeros(len(mean))
    miss[[*old, step]] = *-row, 1.0
    squares = np.einsum("i,rij,j->r", miss, runs, miss) / np.maximum(runs[:, step, step], np.finfo(np.float64).tiny)
    errors = np.sort(np.sqrt(np.maximum(squares, 0.0)))
    exact = "#" * min(_EXACT * (step + 1), forwards // len(products.branches))
    together = len(set(usual.schedules.values())) == 1
    plan = fit_schedule(products, forwards, depth, together, dict.fromkeys(products.branches, exact)).settings()
    return {
        "branch": branch,
        "step": step,
        "weights": {str(number): float(f"{weight:.6g}") for number, weight in zip(old, row, strict=True)},
        "error": _parting(errors, int(OUTLIER_SHARE * len(errors))),
        "schedule": plan["schedule"],
        "forecast_weights": plan["forecast_weights"],
    }


def _parting(errors: Vector, count: int) -> float:
    """The error beyond which a picture is hard, if so many of these are, which are in order. It is that of no picture,
    but midway between the last usual and the first hard one: another processor rounds the same picture differently, and
    must not tell it differently."""
    last = len(errors) - 1 - count
    beyond = errors[last + 1] if count else errors[last] * _BEYOND
    return float((errors[last] + beyond) / 2)


def outlier_step(steps: int) -> int:
    """The step of a run at which hard pictures are told. Up to it all are computed."""
    return max(2, round(_TOLD_AFTER * steps))


def _follow(products: Products, masks: Mapping[str, Sequence[bool]], depth: int) -> tuple[_Way, Weights]:
    """The way that schedules take, as far as they go, with the best weights."""
    weights: dict[str, dict[int, dict[int, float]]] = {branch: {} for branch in products.branches}
    way = _Way(((0,),) * len(products.branches), np.zeros(len(products.values)))  # The first step is computed.
    for step in range(1, len(masks[products.branches[0]])):
        skipped = [number for number, branch in enumerate(products.branches) if not masks[branch][step]]
        way, fitted = _take(products, way, step, skipped, depth)
        for number, row in fitted.items():
            weights[products.branches[number]][step] = row
    return way, weights


def _narrow(ways: Any) -> list[_Way]:
    """The best ways for each number of forwards."""
    kept: list[_Way] = []
    for _, alike in itertools.groupby(sorted(ways, key=lambda way: (way.forwards, way.cost)), lambda way: way.forwards):
        kept += itertools.islice(alike, _WIDTH)
    return kept


def _take(
    products: Products, way: _Way, step: int, skipped: Sequence[int], depth: int
) -> tuple[_Way, dict[int, dict[int, float]]]:
    """One step on, with some branches skipped; by branch, what the skipped ones are made of."""
    steps = len(products.sizes)
    computed = tuple(of if number in skipped else (*of, step) for number, of in enumerate(way.computed))
    past = way.past + way.now / steps
    if not skipped:
        return _Way(computed, way.drift, way.now, past), {}
    used = [(number, old) for number in skipped for old in computed[number][-depth:]]
    indices = [number * steps + old for number, old in used]
    reach = np.array([products.guidance[number] * products.sizes[step] for number, _ in used])
    drift = way.drift.copy()
    for number in skipped:  # Without these outputs the latents are off by them.
        drift[number * steps + step] -= products.guidance[number] * products.sizes[step]
    gram = products.values[np.ix_(indices, indices)] * np.outer(reach, reach)
    gram[np.diag_indices(len(used))] += _RIDGE * gram.diagonal().mean() + np.finfo(np.float64).tiny
    weights = np.linalg.solve(gram, -reach * (products.values[indices] @ drift))
    drift[indices] += reach * weights
    fitted: dict[int, dict[int, float]] = {number: {} for number in skipped}
    for (number, old), weight in zip(used, weights.tolist(), strict=True):
        fitted[number][old] = weight
    return _Way(computed, drift, products.size(drift), past), fitted


def _check_depth(depth: int) -> None:
    if type(depth) is not int or depth < 1:
        raise SettingError(f"depth={depth!r}; a whole number from 1 upwards was expected.")
