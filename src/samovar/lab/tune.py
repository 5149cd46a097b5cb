"""Which setting is the fastest that keeps a promise? Searched on some prompts, and checked on others.

A promise is about single pictures: "at least 30 dB" is kept if 95 of 100 pictures keep it. So a setting is chosen by
the lower end of what it does on the prompts for tuning, with allowance for how few they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal, get_args

from ..errors import SettingError, nearest
from .methods import Method, ours, plain
from .metrics import Quality
from .schedules import SchedulePlanner, choose_planner, refine, scheduled
from .session import Row, Session
from .studio import keep_apart

Target = Literal["psnr", "lpips", "speedup"]
SHARE = 0.95
"""Of the pictures, so many keep a promise."""
CONFIDENCE = 0.9
"""How sure that is to be, given how few pictures it rests on."""

THRESHOLDS: Mapping[str, Sequence[float]] = {"tea_cache": (0.05, 0.1, 0.2, 0.4), "forecast": (0.1, 0.2, 0.4, 0.8, 1.6)}
"""Settings that decide by the signal, by cache; the search stops at the first that breaks the promise."""


@dataclass(frozen=True)
class Promise:
    """What is asked for."""

    target: Target
    value: float

    def __post_init__(self) -> None:
        if self.target not in get_args(Target):
            raise SettingError(f"{self.target!r} is nothing to promise. {nearest(str(self.target), get_args(Target))}")
        low, high = {"psnr": (1.0, 99.0), "lpips": (1e-5, 1.0), "speedup": (1.0, 50.0)}[self.target]
        is_number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not is_number or not low <= self.value <= high:
            raise SettingError(f"target {self.target}={self.value!r}; a number from {low} to {high} was expected.")

    def __str__(self) -> str:
        words = {"psnr": "PSNR of at least {} dB", "lpips": "LPIPS of at most {}", "speedup": "{} times fewer forwards"}
        return words[self.target].format(f"{self.value:g}")

    def keeps(self, quality: Quality) -> bool:
        """Whether one picture keeps it."""
        if self.target == "psnr":
            return quality.psnr >= self.value
        return self.target == "speedup" or quality.lpips <= self.value

    def bound(self, qualities: Sequence[Quality]) -> float:
        """What 95 of 100 pictures like these surely reach: dB, or LPIPS, which is spread like its logarithm."""
        if self.target == "lpips":
            return math.exp(-lower_bound([-math.log(max(q.lpips, 1e-7)) for q in qualities]))
        return lower_bound([q.psnr for q in qualities])

    def score(self, row: Row) -> float:
        """Of two settings that cost as much, the one that scores higher is the safer one."""
        if self.target == "speedup":
            return row.nearness
        return -self.bound(row.pictures) if self.target == "lpips" else self.bound(row.pictures)

    def is_kept(self, row: Row) -> bool:
        """Whether a setting keeps it, as far as its pictures tell."""
        if self.target == "speedup":
            return denoiser_speedup(row) >= self.value
        bound = self.bound(row.pictures)
        return bound >= self.value if self.target == "psnr" else bound <= self.value


def denoiser_speedup(row: Row) -> float:
    """How many times fewer forwards are computed. Unlike a time it is the same on every machine and in every run."""
    return row.steps / row.computed


def lower_bound(values: Sequence[float], share: float = SHARE, confidence: float = CONFIDENCE) -> float:
    """What a share of all values exceeds, with some confidence.

    Of enough values it is one of the lowest, however they are spread: most pictures are near the exact ones, and a few
    are of another kind, on which a model has not made up its mind. Of fewer, nothing is sure without taking them to be
    spread normally (Natrella 1963), and then it is no higher than the lowest of them.
    """
    count = len(values)
    allowed = values_below(count, share, confidence)
    if allowed >= 0:
        return sorted(values)[allowed]
    if count < 3:
        return min(values)
    z_share, z_sure = NormalDist().inv_cdf(share), NormalDist().inv_cdf(confidence)
    a = 1 - z_sure**2 / (2 * (count - 1))
    b = z_share**2 - z_sure**2 / count
    factor = (z_share + math.sqrt(max(z_share**2 - a * b, 0.0))) / a
    return min(*values, fmean(values) - factor * stdev(values))


def values_below(count: int, share: float = SHARE, confidence: float = CONFIDENCE) -> int:
    """How many of so many values may lie below a bound that a share of all exceeds, with some confidence; -1 if there
    are too few to tell."""
    likely, allowed = 0.0, -1
    while allowed < count:
        likely += math.comb(count, allowed + 1) * (1 - share) ** (allowed + 1) * share ** (count - allowed - 1)
        if likely > 1 - confidence:
            break
        allowed += 1
    return allowed


@dataclass(frozen=True)
class Tuned:
    """What was found."""

    promise: Promise
    row: Row
    """The chosen setting on the prompts for tuning."""
    held_out: Row
    """The same on prompts that had no say in the choice."""
    plain: Row
    """As many plain steps as it computes, on the same."""
    tried: Sequence[Row]
    num_steps: int

    @property
    def share_kept(self) -> float:
        """Of the held-out pictures, how many keep the promise. All or none keep a speed, which is that of them all."""
        if self.promise.target == "speedup":
            return float(self.promise.is_kept(self.held_out))
        return sum(map(self.promise.keeps, self.held_out.pictures)) / len(self.held_out.pictures)

    @property
    def is_kept(self) -> bool:
        return self.share_kept >= SHARE

    @property
    def is_worth_it(self) -> bool:
        """Whether it is nearer than as many plain steps, by the measure that was promised."""
        if self.promise.target == "lpips":
            return self.held_out.quality.lpips < self.plain.quality.lpips
        return self.held_out.quality.psnr > self.plain.quality.psnr

    def setting(self, origin: str) -> dict[str, Any]:
        """What is saved, for `attach(cache=FILE)` to load."""
        return {
            "cache": dict(self.row.settings),
            "num_inference_steps": self.num_steps,
            "promise": str(self.promise),
            "kept_on_held_out": round(self.share_kept, 4),
            "origin": origin,
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the report."""
        values = {"psnr": [q.psnr for q in self.held_out.pictures], "lpips": [q.lpips for q in self.held_out.pictures]}
        return {
            "promise": str(self.promise),
            "chosen": self.row.to_dict(),
            "held_out": {
                **self.held_out.to_dict(),
                "share_kept": self.share_kept,
                "bound": None if self.promise.target == "speedup" else self.promise.bound(self.held_out.pictures),
                "worst": {"psnr": min(values["psnr"]), "lpips": max(values["lpips"])},
            },
            "plain_steps_on_held_out": self.plain.to_dict(),
            "is_worth_it": self.is_worth_it,
            "tried": [{**row.to_dict(), "keeps": self.promise.is_kept(row)} for row in self.tried],
        }


def tune(tuning: Session, testing: Session, promise: Promise, refinements: int = 0) -> Tuned:
    """Search on one session's tasks, check on another's. `refinements` is how many changes of the best schedule are
    tried on real pictures."""
    keep_apart(tuning.tasks, testing.tasks)
    search = _Search(tuning, promise)
    search.try_thresholds()
    search.try_schedules()
    if refinements:
        search.refine(refinements)
    best = search.best()
    method = search.methods[best.method]
    held_out = testing.measure(method)
    computed = max(1, round(best.computed))
    return Tuned(promise, best, held_out, testing.measure(plain(computed)), search.tried, tuning.studio.steps)


class _Search:
    """What was tried so far."""

    def __init__(self, session: Session, promise: Promise) -> None:
        self._session, self._promise, self._steps = session, promise, session.studio.steps
        self.methods: dict[str, Method] = {}
        self.tried: list[Row] = []
        self._planner: SchedulePlanner | None = None

    def best(self) -> Row:
        """The fastest that keeps the promise; of a promised speed, the nearest to the exact pictures."""
        kept = [row for row in self.tried if self._promise.is_kept(row) and row.computed < self._steps]
        if not kept:
            raise SettingError(self._none_kept())
        if self._promise.target == "speedup":
            return max(kept, key=self._promise.score)
        return min(kept, key=lambda row: (row.computed, -row.quality.psnr))

    def _none_kept(self) -> str:
        skipping = [row for row in self.tried if row.computed < self._steps]
        words = f"No setting that skips anything keeps a {self._promise}"
        if not skipping:
            return f"{words}: none of {len(self.tried)} that were tried skips a step. Run the model as it is."
        best = max(skipping, key=self._promise.score)
        words += f". The best of {len(skipping)}, {best.method!r}, has {best.quality.psnr:.1f} dB and LPIPS "
        words += f"{best.quality.lpips:.5f} on average with {best.computed:g} of {self._steps} steps computed"
        if self._promise.target != "speedup":
            unit = " dB" if self._promise.target == "psnr" else ""
            words += f"; of {len(best.pictures)} pictures it can be said that 95 of 100 reach "
            words += f"{self._promise.bound(best.pictures):.5g}{unit}"
        more = "" if values_below(len(self._session.tasks)) >= 0 else ", give more prompts (45 and more need no margin)"
        return f"{words}. Promise less{more}, or run the model as it is."

    def try_thresholds(self) -> None:
        for backend, thresholds in THRESHOLDS.items():
            for threshold in thresholds:
                row = self._measure(ours(backend, {"rel_l1_thresh": threshold}))
                if self._promise.target != "speedup" and not self._promise.is_kept(row):
                    break
                if self._promise.target == "speedup" and self._promise.is_kept(row):
                    break  # Higher thresholds are faster, and worse.

    def try_schedules(self) -> None:
        """Which way of planning is best is seen at one number of computed steps; with that one the search goes on."""
        most = self._most_computed()
        choice = choose_planner(self._session, self._promise.score, most)
        self.methods |= {method.name: method for method, _ in choice.tried}
        self.tried += [row for _, row in choice.tried if row.method not in {known.method for known in self.tried}]
        self._planner = choice.planner
        if most is None:
            self._bisect(choice.planner)

    def _most_computed(self) -> int | None:
        """How many steps may be computed at a promised speed; None if another thing is promised."""
        if self._promise.target != "speedup":
            return None
        return max(1, math.floor(self._steps / self._promise.value + 1e-9))

    def _bisect(self, planner: SchedulePlanner) -> None:
        """The fewest computed steps that keep the promise; more steps are taken to be better."""
        low, high = planner.fewest, self._steps
        while high - low > 0:
            middle = (low + high) // 2
            if self._promise.is_kept(self._measure(planner.method(middle))):
                high = middle
            else:
                low = middle + 1

    def refine(self, attempts: int) -> None:
        """Move single computed steps of the best schedule, by what the pictures say; then try one step fewer."""
        best, planner = self.best(), self._planner
        if "schedule" not in best.settings or planner is None:
            return
        fewer = max(planner.fewest, round(best.computed) - (self._promise.target != "speedup"))

        def score(candidate: str) -> float:
            return self._promise.score(self._measure(scheduled(planner.settings(candidate))))

        refine(planner.plan(fewer), score, attempts)  # What is tried is remembered.

    def _measure(self, method: Method) -> Row:
        known = next((row for row in self.tried if row.method == method.name), None)
        if known is not None:
            return known
        self.methods[method.name] = method
        row = self._session.measure(method)
        self.tried.append(row)
        return row
