"""Which is the fastest setting that meets a quality target? Searched on some prompts and checked on others.

A target is about single images: "at least 30 dB" is met if 95 of 100 images reach it. A setting is therefore chosen by
the lower end of its results on the tuning prompts, with a margin if they are few.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal, get_args

from ..core.errors import SettingError, nearest
from .closed_loop import PASSES
from .image_runner import Task, check_disjoint
from .methods import PLAIN, Method, cached, plain
from .metrics import Quality
from .schedules import SchedulePlanner, choose_planner, refine
from .session import Row, Session

Metric = Literal["psnr", "lpips", "speedup"]
SHARE = 0.95
"""Share of images that must meet a target."""
CONFIDENCE = 0.9
"""How certain that must be, given the number of images."""
THRESHOLDS: Mapping[str, Sequence[Mapping[str, float]]] = {
    "auto": [{"tolerance": value} for value in (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)],
    "tea_cache": [{"rel_l1_thresh": value} for value in (0.05, 0.1, 0.2, 0.4)],
}
"""Tolerances and thresholds to try, by cache; each loses more than the one before."""
INTERVALS = (2, 3, 4, 5)
"""Forecasts in a fixed rhythm: of this number of steps, one is computed."""


@dataclass(frozen=True)
class Target:
    """A PSNR, an LPIPS, or how many times fewer forwards to compute."""

    metric: Metric
    value: float

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            hint = nearest(str(self.metric), get_args(Metric))
            raise SettingError(f"{self.metric!r} cannot be a target. {hint}", param="metric")
        low, high = {"psnr": (1.0, 99.0), "lpips": (1e-5, 1.0), "speedup": (1.0, 50.0)}[self.metric]
        is_number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not is_number or not low <= self.value <= high:
            name = f"target_{self.metric}"
            raise SettingError(f"{name}={self.value!r}; expected a number from {low} to {high}.", param=name)

    def __str__(self) -> str:
        words = {"psnr": "PSNR of at least {} dB", "lpips": "LPIPS of at most {}", "speedup": "{} times fewer forwards"}
        return words[self.metric].format(f"{self.value:g}")

    def is_met_by(self, quality: Quality) -> bool:
        """Whether one image meets the target."""
        return {"psnr": quality.psnr >= self.value, "lpips": quality.lpips <= self.value}.get(self.metric, True)

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Refuse a quality that so few images cannot show, before any is made."""
        least = next(count for count in itertools.count(1) if values_below(count) >= 0)
        if self.metric != "speedup" and len(tasks) < least:
            raise SettingError(
                f"{len(tasks)} images to tune with: {least} or more are needed to say with confidence that {SHARE:.0%} "
                f"reach a {self}. Give more prompts, or more images per prompt with seeds; a target_speedup needs none "
                "of this.",
                param="prompts",
            )

    def check_steps(self, steps: int) -> None:
        """Refuse to compute fewer steps than any setting does."""
        most = steps / SchedulePlanner.fewest
        if self.metric == "speedup" and self.value > most:
            raise SettingError(
                f"target_speedup={self.value:g} of {steps} steps leaves fewer than {SchedulePlanner.fewest} to "
                f"compute. Ask for at most {most:g}, or for more steps.",
                param="target_speedup",
            )

    def bound(self, qualities: Sequence[Quality]) -> float:
        """The PSNR, or LPIPS, that 95 of 100 images like these reach with confidence."""
        if self.metric == "lpips":  # It is distributed like its logarithm.
            return math.exp(-lower_bound([-math.log(max(quality.lpips, 1e-7)) for quality in qualities]))
        return lower_bound([quality.psnr for quality in qualities])

    def score(self, row: Row) -> float:
        """Of two settings that compute as much, the one with the higher score is better."""
        if self.metric == "speedup":
            return row.closeness
        return self.bound(row.images) * (-1 if self.metric == "lpips" else 1)

    def is_met(self, row: Row) -> bool:
        """Whether a setting meets the target, as far as its images show."""
        if self.metric == "speedup":
            return row.saving >= self.value
        bound = self.bound(row.images)
        return bound >= self.value if self.metric == "psnr" else bound <= self.value


def lower_bound(values: Sequence[float], share: float = SHARE, confidence: float = CONFIDENCE) -> float:
    """The value that this share of all values exceeds, with this confidence.

    With enough values it is one of the lowest, whatever their distribution: most images are close to the exact ones,
    and a few are outliers. With fewer, nothing is certain unless they are taken to be normally distributed (Natrella
    1963), and then the bound is at most the lowest of them.
    """
    count = len(values)
    allowed = values_below(count, share, confidence)
    if allowed >= 0:
        return sorted(values)[allowed]
    if count < 3:
        return min(values)
    z_share, z_confidence = NormalDist().inv_cdf(share), NormalDist().inv_cdf(confidence)
    a = 1 - z_confidence**2 / (2 * (count - 1))
    b = z_share**2 - z_confidence**2 / count
    factor = (z_share + math.sqrt(max(z_share**2 - a * b, 0.0))) / a
    return min(*values, fmean(values) - factor * stdev(values))


def values_below(count: int, share: float = SHARE, confidence: float = CONFIDENCE) -> int:
    """How many of `count` values may lie below a bound that this share of all values exceeds, with this confidence;
    -1 if there are too few values."""
    likely, allowed = 0.0, -1
    while allowed < count:
        likely += math.comb(count, allowed + 1) * (1 - share) ** (allowed + 1) * share ** (count - allowed - 1)
        if likely > 1 - confidence:
            break
        allowed += 1
    return allowed


def rhythm(steps: int, interval: int) -> str:
    """A schedule that computes the first three steps, then one in each interval, and the last."""
    return "".join("#" if step < 3 or step == steps - 1 or step % interval == 0 else "." for step in range(steps))


@dataclass(frozen=True)
class Tuned:
    """The result."""

    target: Target
    row: Row
    """The chosen setting on the tuning prompts."""
    held_out: Row
    """The same on prompts that were not used to choose it."""
    plain: Row
    """As many plain steps as it computes, on the same prompts."""
    tried: Sequence[Row]
    num_steps: int

    @property
    def share_met(self) -> float:
        """Share of the held-out images that meet the target. A speedup is met by all of them or none."""
        if self.target.metric == "speedup":
            return float(self.target.is_met(self.held_out))
        return sum(map(self.target.is_met_by, self.held_out.images)) / len(self.held_out.images)

    @property
    def is_met(self) -> bool:
        return self.share_met >= SHARE

    @property
    def verdict(self) -> str:
        """Whether held-out images meet the target, and by how much."""
        if self.target.metric == "speedup":
            return f"{'met' if self.is_met else 'missed'}, with {self.held_out.saving:.2f} times fewer"
        few = "" if self.is_met else f", and {100 * SHARE:g} % are asked for"
        return f"met by {100 * self.share_met:.1f} % of these images{few}"

    @property
    def is_worth_it(self) -> bool:
        """Whether it is closer than as many plain steps, by the target metric."""
        if self.target.metric == "lpips":
            return self.held_out.quality.lpips < self.plain.quality.lpips
        return self.held_out.quality.psnr > self.plain.quality.psnr

    @property
    def is_plain(self) -> bool:
        """Whether fewer steps and no cache are the best."""
        return self.row.family == PLAIN

    def setting(self, origin: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The file to save, with the sampling parameters that it was tuned for."""
        return {
            "cache": {"backend": "none"} if self.is_plain else self.row.settings,
            **params,
            "num_inference_steps": self.row.steps if self.is_plain else self.num_steps,
            "target": str(self.target),
            "met_on_held_out": round(self.share_met, 4),
            "origin": origin,
        }

    def to_dict(self) -> dict[str, Any]:
        """The report, for JSON."""
        images = self.held_out.images
        return {
            "target": str(self.target),
            "chosen": self.row.to_dict(),
            "held_out": {
                **self.held_out.to_dict(),
                "share_met": self.share_met,
                "bound": None if self.target.metric == "speedup" else self.target.bound(images),
                "worst": {"psnr": min(q.psnr for q in images), "lpips": max(q.lpips for q in images)},
            },
            "plain_steps_on_held_out": self.plain.to_dict(),
            "is_worth_it": self.is_worth_it,
            "tried": [{**row.to_dict(), "meets_target": self.target.is_met(row)} for row in self.tried],
        }


def tune(tuning: Session, testing: Session, target: Target, refinements: int = 0) -> Tuned:
    """Search on one session's tasks and check on another's. `refinements` is the number of changes of the best
    schedule to try on images."""
    check_disjoint(tuning.tasks, testing.tasks)
    target.check_steps(tuning.runner.steps)
    progress = tuning.progress
    progress.expect(**_expected(tuning, testing, target, refinements))
    search = _Search(tuning, target)
    tuning.exact()
    progress.begin("thresholds")
    search.try_thresholds()
    progress.begin("rhythms")
    search.try_rhythms()
    progress.begin("schedules")
    planner = search.try_schedules()
    progress.begin("refinements")
    if refinements and "schedule" in search.best().settings:
        search.refine(planner, refinements)
    progress.begin("plain")
    search.try_plain()
    progress.begin("testing")
    best = search.best()
    held_out = testing.measure(search.methods[best.method])
    baseline = testing.measure(plain(max(1, round(best.computed))))
    return Tuned(target, best, held_out, baseline, list(search.tried.values()), tuning.runner.steps)


def _expected(tuning: Session, testing: Session, target: Target, refinements: int) -> dict[str, float]:
    """About how much each stage has to make, in exact images. A stage may end early, and then the next begins."""
    exact, usual = float(len(tuning.tasks)), tuning.work([cached("auto", {})])
    fitted = PASSES * exact + usual  # Weights fitted in closed loop, and images made with them.
    searched = 0.0 if target.metric == "speedup" else math.log2(tuning.runner.steps)
    return {
        "exact": exact,
        "thresholds": sum(map(len, THRESHOLDS.values())) * usual,
        "rhythms": len(INTERVALS) * usual,
        "schedules": 2 * (exact + usual) + (2 + searched) * fitted,
        "refinements": refinements * fitted,
        "plain": usual,
        "testing": testing.work([plain(tuning.runner.steps), *[cached("auto", {})] * 2]),
    }


class _Search:
    """The settings tried so far."""

    def __init__(self, session: Session, target: Target) -> None:
        self._session, self._target, self._steps = session, target, session.runner.steps
        self._is_speedup = target.metric == "speedup"
        self.methods: dict[str, Method] = {}
        self.tried: dict[str, Row] = {}

    def best(self) -> Row:
        """The fastest setting that meets the target; for a speedup, the closest to the exact images."""
        skipping = [row for row in self.tried.values() if row.computed < self._steps]
        fitting = [row for row in skipping if self._target.is_met(row)]
        if not fitting:
            raise SettingError(self._none_meets(skipping))
        if self._is_speedup:
            return max(fitting, key=self._target.score)
        return min(fitting, key=lambda row: (row.computed, -row.quality.psnr))

    def _none_meets(self, skipping: Sequence[Row]) -> str:
        text = f"No setting that skips steps reaches a {self._target}"
        if not skipping:
            return f"{text}: none of the {len(self.tried)} settings tried skips a step. Use the model without a cache."
        best = max(skipping, key=self._target.score)
        text += (
            f". The best of {len(skipping)}, {best.method!r}, has {best.quality.psnr:.1f} dB and LPIPS "
            f"{best.quality.lpips:.5f} on average with {best.computed:g} of {self._steps} steps computed"
        )
        if not self._is_speedup:
            unit = " dB" if self._target.metric == "psnr" else ""
            bound = self._target.bound(best.images)
            text += f"; from its {len(best.images)} images, 95 of 100 can be expected to reach {bound:.5g}{unit}"
        is_few = values_below(len(self._session.tasks)) < 0
        more = " With fewer than 45 images the bound has an extra margin: give more prompts." if is_few else ""
        return f"{text}. Choose an easier target, or use the model without a cache.{more}"

    def try_thresholds(self) -> None:
        """Higher thresholds are faster and worse: stop when a quality breaks, or when a speedup is reached."""
        for backend, settings in THRESHOLDS.items():
            self._descend([cached(backend, of) for of in settings])

    def try_rhythms(self) -> None:
        """A line through the last two computed outputs, which come in a fixed rhythm."""
        fixed = {"forecast": "linear", "forecast_of": "output"}
        masks = dict.fromkeys(rhythm(self._steps, interval) for interval in INTERVALS)
        self._descend([cached("tea_cache", fixed | {"schedule": mask}, family="samovar linear") for mask in masks])

    def try_plain(self) -> None:
        """As many plain steps as the best setting computes, and fewer as long as these are the best."""
        try:
            count = round(self.best().computed)
        except SettingError:
            return
        while count >= 1:
            method = plain(count)
            self._measure(method)
            if self._is_speedup or self.best().method != method.name:
                break
            count -= 1

    def _descend(self, methods: Sequence[Method]) -> None:
        for method in methods:
            if self._target.is_met(self._measure(method)) is self._is_speedup:
                break

    def try_schedules(self) -> SchedulePlanner:
        """Choose a planner at one number of computed steps, then find the fewest steps that meet the target; more
        steps are taken to be better."""
        most = max(1, math.floor(self._steps / self._target.value + 1e-9)) if self._is_speedup else None
        planner, tried = choose_planner(self._session, self._target.score, most)
        for name, (method, row) in tried.items():
            self.methods[name], self.tried[name] = method, row
        low, high = planner.fewest, self._steps
        while most is None and low < high:
            middle = (low + high) // 2
            if self._target.is_met(self._measure(planner.method(planner.plan(middle)))):
                high = middle
            else:
                low = middle + 1
        return planner

    def refine(self, planner: SchedulePlanner, attempts: int) -> None:
        """Move single computed steps of a schedule as long as images get closer; if the target is a quality, of the
        schedule with one step fewer than the best."""
        computed = max(planner.fewest, round(self.best().computed) - (not self._is_speedup))

        def score(mask: str) -> float:
            return self._target.score(self._measure(planner.method(mask)))

        refine(planner.plan(computed), score, attempts)

    def _measure(self, method: Method) -> Row:
        if method.name not in self.tried:
            self.methods[method.name] = method
            self.tried[method.name] = self._session.measure(method)
        return self.tried[method.name]
