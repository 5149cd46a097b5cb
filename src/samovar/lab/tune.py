"""The fastest setting that meets a quality target: searched on some prompts and checked on others.

A target is about single images: "at least 30 dB" is met if 95 of 100 images reach it. A setting is therefore chosen by
the lower end of its results on the tuning prompts, with a margin if they are few.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..core.errors import SettingError, nearest
from ..core.settings import number, read_as
from .methods import PLAIN, Method, cached, plain
from .metrics import Quality
from .planner import FEWEST, Planner
from .session import Row, Session
from .tasks import Task, check_disjoint
from .verdict import SHARE, lower_bound, values_below

Metric = Literal["psnr", "lpips", "speedup"]
TOLERANCES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Of the cache "auto"; each loses more than the one before."""


@dataclass(frozen=True)
class Target:
    """A PSNR, an LPIPS, or how many times fewer steps to compute."""

    metric: Metric
    value: float

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            hint = nearest(str(self.metric), get_args(Metric))
            raise SettingError(f"{self.metric!r} cannot be a target. {hint}", param="metric")
        low, high = {"psnr": (1.0, 99.0), "lpips": (1e-5, 1.0), "speedup": (1.0, 50.0)}[self.metric]
        read_as(number(low, high), self.value, f"target_{self.metric}")

    def __str__(self) -> str:
        words = {"psnr": "PSNR of at least {} dB", "lpips": "LPIPS of at most {}", "speedup": "{} times fewer steps"}
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
        most = steps / FEWEST
        if self.metric == "speedup" and self.value > most:
            raise SettingError(
                f"target_speedup={self.value:g} of {steps} steps leaves fewer than {FEWEST} to compute. Ask for at "
                f"most {most:g}, or for more steps.",
                param="target_speedup",
            )

    def closeness(self, quality: Quality) -> float:
        """How close an image is to the exact one: higher is closer."""
        return -quality.lpips if self.metric == "lpips" else quality.psnr

    def score(self, row: Row) -> float:
        """How close 95 of 100 images like these are, with confidence."""
        return lower_bound([self.closeness(quality) for quality in row.images])

    def bound(self, row: Row) -> float:
        """The PSNR, or LPIPS, that 95 of 100 images like these reach with confidence."""
        return -self.score(row) if self.metric == "lpips" else self.score(row)

    def is_met(self, row: Row) -> bool:
        """Whether a setting meets the target, as far as its images show."""
        if self.metric == "speedup":
            return row.saving >= self.value
        return self.bound(row) <= self.value if self.metric == "lpips" else self.bound(row) >= self.value


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
        few = "" if self.is_met else f", and {SHARE:.0%} are asked for"
        return f"met by {self.share_met:.1%} of these images{few}"

    @property
    def is_worth_it(self) -> bool:
        """Whether it is closer than as many plain steps, by the target metric."""
        ours, theirs = (self.target.closeness(row.quality) for row in (self.held_out, self.plain))
        return ours > theirs

    def setting(self, origin: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The file to save, with the sampling parameters that it was tuned for."""
        return {
            "cache": {"backend": "none"} if self.row.method.family == PLAIN else dict(self.row.method.settings),
            **params,
            "num_inference_steps": self.row.steps,
            "target": str(self.target),
            "met_on_held_out": round(self.share_met, 4),
            "origin": origin,
        }

    def to_dict(self) -> dict[str, Any]:
        """The report, for JSON."""
        return {
            "target": str(self.target),
            "chosen": self.row.to_dict(),
            "held_out": {**self.held_out.to_dict(), "share_met": self.share_met},
            "plain_steps_on_held_out": self.plain.to_dict(),
            "is_worth_it": self.is_worth_it,
            "tried": [{**row.to_dict(), "meets_target": self.target.is_met(row)} for row in self.tried],
        }


def tune(tuning: Session, testing: Session, target: Target, folder: Path | None = None) -> Tuned:
    """Search on one session's tasks and check on another's. `folder` receives the images that it is checked on, those
    of the setting in "chosen" and the exact ones in "exact"."""
    check_disjoint(tuning.tasks, testing.tasks)
    target.check_steps(tuning.runner.steps)
    search = _Search(tuning, target)
    search.try_tolerances()
    search.try_schedules()
    search.try_plain()
    row = search.best()
    testing.exact(folder and folder / "exact")
    held_out = testing.measure(row.method, folder and folder / "chosen")
    baseline = testing.measure(plain(max(1, round(row.computed))))
    return Tuned(target, row, held_out, baseline, list(search.tried.values()))


class _Search:
    """The settings tried so far."""

    def __init__(self, session: Session, target: Target) -> None:
        self._session, self._target, self._steps = session, target, session.runner.steps
        self._is_speedup = target.metric == "speedup"
        self.tried: dict[str, Row] = {}

    def _is_met(self, method: Method) -> bool:
        """Whether images made with a method meet the target."""
        if method.name not in self.tried:
            self.tried[method.name] = self._session.measure(method)
        return self._target.is_met(self.tried[method.name])

    def try_tolerances(self) -> None:
        """Higher tolerances are faster and worse: stop when a quality breaks, or when a speed-up is reached."""
        for tolerance in TOLERANCES:
            if self._is_met(cached("auto", {"tolerance": tolerance})) is self._is_speedup:
                break

    def try_schedules(self) -> None:
        """The fewest computed steps that meet the target; more steps are taken to be better."""
        planner = Planner(self._session)
        if self._is_speedup:
            self._is_met(planner.method(max(FEWEST, math.floor(self._steps / self._target.value + 1e-9))))
            return
        low, high = FEWEST, self._steps
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_met(planner.method(middle)) else (middle + 1, high)

    def try_plain(self) -> None:
        """As many plain steps as the best setting computes, and fewer as long as these are the best."""
        best = self._fitting()
        count = round(min(row.computed for row in best)) if best else 0
        for steps in range(count, 0, -1):
            method = plain(steps)
            self._is_met(method)
            if self._is_speedup or self.best().method is not method:
                break

    def _skipping(self) -> list[Row]:
        return [row for row in self.tried.values() if row.computed < self._steps]

    def _fitting(self) -> list[Row]:
        return [row for row in self._skipping() if self._target.is_met(row)]

    def best(self) -> Row:
        """The fastest setting that meets the target; for a speed-up, the closest to the exact images."""
        fitting = self._fitting()
        if not fitting:
            raise SettingError(self._none_meets())
        if self._is_speedup:
            return max(fitting, key=self._target.score)
        return min(fitting, key=lambda row: (row.computed, -row.quality.psnr))

    def _none_meets(self) -> str:
        skipping = self._skipping()
        text = f"No setting that skips steps reaches a {self._target}"
        if not skipping:
            return f"{text}: none of the {len(self.tried)} settings tried skips a step. Use the model without a cache."
        best = max(skipping, key=self._target.score)
        reach = "" if self._is_speedup else f", and 95 of 100 images like these reach {self._target.bound(best):.5g}"
        return (
            f"{text}. The best of {len(skipping)}, {best.method.name!r}, has {best.quality.psnr:.1f} dB and LPIPS "
            f"{best.quality.lpips:.5f} on average with {best.computed:g} of {self._steps} steps computed{reach}. "
            "Choose an easier target, give more prompts, or use the model without a cache."
        )
