"""The settings of the cache."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..core.errors import SettingError
from ..core.settings import (
    TEXT,
    TOLERANCE,
    Kind,
    Settings,
    choice,
    count,
    is_number,
    number,
    read_tolerance,
    setting,
)

EVERY_BRANCH = "*"
"""Stands for every branch that is not named."""
Mask = tuple[bool, ...]
Row = Mapping[int, float]
"""The weights of computed steps in a skipped one."""
Forecast = Literal["reuse", "linear", "fitted"]
Target = Literal["residual", "output"]
_MASK = "one True or False for each step, or a string of '#' (computed) and '.' (skipped)"
_FIT = "Fit them: samovar tune."


# ------------------------------------------------------------------------------------------------ kinds


def _read_coefficients(value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, (list, tuple)) else ()
    if len(numbers) != 5 or not all(is_number(n) and math.isfinite(n) for n in numbers):
        raise ValueError
    return tuple(numbers)


def _read_mask(schedule: Any) -> Mask:
    steps = list(schedule) if isinstance(schedule, Sequence) else []
    steps = [step == "#" if step in ("#", ".") else step for step in steps]
    if not steps or not all(isinstance(step, (bool, int)) and step in (0, 1) for step in steps):
        raise SettingError(f"schedule={schedule!r:.200}; expected {_MASK}.", param="schedule")
    if not steps[0]:
        text = f"schedule={schedule!r} skips the first step, when there is nothing to reuse. Compute it."
        raise SettingError(text, param="schedule")
    return tuple(map(bool, steps))


def _read_schedule(schedule: Any) -> Mask | dict[str, Mask]:
    if not isinstance(schedule, Mapping):
        return _read_mask(schedule)
    masks = {name: _read_mask(mask) for name, mask in schedule.items()}
    if len(set(map(len, masks.values()))) != 1 or not all(isinstance(name, str) for name in masks):
        raise ValueError(f"{EVERY_BRANCH!r} stands for every branch that is not named.")
    return masks


def _read_row(row: Any) -> dict[int, float]:
    read = {int(step): float(weight) for step, weight in row.items()}
    if not read or not all(map(math.isfinite, read.values())):
        raise ValueError(_FIT)
    return read


def _read_weights(weights: Any) -> dict[str, dict[int, dict[int, float]]]:
    """With integers for steps, which JSON has as strings."""
    try:
        return {str(name): {int(step): _read_row(row) for step, row in of.items()} for name, of in weights.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(_FIT) from error


_SCHEDULE = Kind("one mask for each branch name, all of the same length", _read_schedule)
_WEIGHTS = Kind(
    "{branch: {skipped step: {computed step: weight}}} with finite weights, such as "
    "{'cond': {'3': {'2': 1.9, '1': -0.9}}}",
    _read_weights,
)


# ------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class TeaCacheConfig(Settings, param="cache"):
    """The settings of TeaCache. The defaults are those of plain TeaCache, with guards."""

    rel_l1_thresh: float = setting(
        0.2,
        number(0, math.inf),
        "Steps are skipped until the summed change of the modulated input reaches this threshold: 0.2 is balanced, 0.4 "
        "fast, 0 computes every step, infinity skips whatever the guards allow.",
    )
    coefficients: Sequence[float] | None = setting(
        None,
        Kind("a list of exactly five finite numbers, highest power first, or None", _read_coefficients),
        "Polynomial that turns the change of the modulated input into that of the output: five numbers, highest power "
        "first. By default the known ones of the model's class; a model without any takes the change as it is.",
    )
    transformer_type: str | None = setting(
        None,
        TEXT,
        "The class of transformer whose coefficients and extractor are used, by name; by default the model's own.",
        optional=True,
    )
    first_steps: int = setting(1, count(1), "Number of steps computed at the start; the very first always is.")
    last_steps: int = setting(1, count(0), "Number of steps computed at the end, where the number of steps is known.")
    max_skips: int | None = setting(
        4, count(1), "Maximum number of steps skipped in a row; None for no limit.", optional=True
    )
    min_steps: int = setting(8, count(0), "Runs with fewer steps are computed in full.")
    start: float = setting(0.0, number(0, 1), "Where skipping may begin, as a part of the run from 0 to 1.")
    end: float = setting(1.0, number(0, 1), "Where skipping ends, as a part of the run from 0 to 1.")
    forecast: Forecast = setting(
        "reuse",
        choice(Forecast),
        'What replaces a step that a schedule skips: the last computed one ("reuse"), a line through the last two '
        'outputs ("linear"), or the sum of outputs that `forecast_weights` gives ("fitted").',
    )
    forecast_of: Target = setting(
        "residual",
        choice(Target),
        "What is forecast: what each stack of blocks adds to its input, or the model's whole output.",
    )
    forecast_weights: Mapping[str, Mapping[Any, Mapping[Any, float]]] | None = setting(
        None,
        _WEIGHTS,
        'For "fitted": by branch and skipped step, the weights of the computed steps combined. The branch "*" stands '
        "for all that are not named.",
    )
    schedule: Sequence[bool] | str | Mapping[str, Sequence[bool] | str] | None = setting(
        None,
        _SCHEDULE,
        "Which steps are computed, decided beforehand: a mask, or a string with `#` for computed and `.` for skipped, "
        "or one of them for each branch. Nothing is measured then, and no device is waited for.",
    )

    def check(self) -> None:
        for param, problem in _problems(self):
            raise SettingError(problem, param=param)

    @functools.cached_property
    def masks(self) -> Mapping[str, Mask]:
        """The schedules by branch."""
        schedule: Any = self.schedule
        return schedule if isinstance(schedule, Mapping) else {} if schedule is None else {EVERY_BRANCH: schedule}

    def mask_for(self, branch: str | None) -> Mask | None:
        """The schedule of a branch, if it has one."""
        return self.masks.get(branch or "", self.masks.get(EVERY_BRANCH))

    @property
    def scheduled_steps(self) -> int | None:
        """Number of steps in the schedule."""
        return next((len(mask) for mask in self.masks.values()), None)

    def rows_for(self, branch: str | None) -> Mapping[int, Row]:
        """The fitted weights of a branch, by skipped step."""
        weights = self.forecast_weights or {}
        return weights.get(branch or "", weights.get(EVERY_BRANCH, {}))

    @functools.cached_property
    def never_skips(self) -> bool:
        """Whether every step is computed."""
        return all(map(all, self.masks.values())) if self.schedule is not None else self.rel_l1_thresh == 0

    def summary(self) -> str:
        """The settings that differ from the defaults, in a line."""
        shown = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name == "rel_l1_thresh" or getattr(self, field.name) != field.default
        }
        if self.schedule is not None:
            written = {name: "".join(".#"[step] for step in mask) for name, mask in self.masks.items()}
            by_branch = " ".join(f"{name}:{mask}" for name, mask in written.items())
            is_one = not isinstance(self.schedule, Mapping)
            shown = {name: value for name, value in shown.items() if name in ("forecast", "forecast_of")}
            shown["schedule"] = written[EVERY_BRANCH] if is_one else by_branch
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def __repr__(self) -> str:
        return f"TeaCacheConfig({self.summary()})"


@dataclass(frozen=True)
class AutoConfig(Settings, param="cache"):
    """The settings of the cache "auto": one."""

    tolerance: float | str = setting(
        "high",
        TOLERANCE,
        'Maximum error of the sample by the skipped steps of one gap, relative to its size: "exact" (0, computes '
        'every step), "high" (0.02), "fast" (0.06), or a number.',
    )

    scheduled_steps: ClassVar[None] = None

    @property
    def number(self) -> float:
        """The tolerance as a number."""
        return read_tolerance(self.tolerance)

    @property
    def never_skips(self) -> bool:
        """Whether every step is computed."""
        return self.number == 0

    def summary(self) -> str:
        """The settings in a line."""
        return f"tolerance={self.tolerance}"


CacheConfig = TeaCacheConfig | AutoConfig
"""The settings of a cache of ours."""


def _problems(config: TeaCacheConfig) -> Iterator[tuple[str, str]]:
    """Settings that contradict each other, and why. Weights are for one schedule: each skipped step needs some, of
    computed steps before it."""
    weights, schedule, of, masks = config.forecast_weights, config.schedule, config.forecast_of, config.masks
    if config.start > config.end:
        yield "start", f"start={config.start} comes after end={config.end}. Swap them."
    if (config.forecast == "fitted") != (weights is not None):
        given = "without" if weights is None else "with"
        text = f"forecast={config.forecast!r} {given} forecast_weights; expected 'fitted' together with its weights."
        yield "forecast_weights", f"{text} {_FIT}"
    if of == "output" and schedule is None:
        yield "schedule", "forecast_of='output' without a schedule. Give one as well, or use cache='auto'."
    if of != "output" and config.forecast != "reuse":
        text = f"forecast={config.forecast!r} with forecast_of={of!r}; it is of outputs: add forecast_of='output'."
        yield "forecast_of", text
    if weights is not None and (not weights or (isinstance(schedule, Mapping) and set(weights) != set(masks))):
        text = f"forecast_weights of the branches {sorted(weights)!r} for schedules of {sorted(masks)!r}"
        yield "forecast_weights", f"{text}; expected the same branches."
    for branch, step, row, mask in _rows(config):
        if not row or not all(0 <= old < step and mask[old] for old in row):
            yield (
                "forecast_weights",
                (
                    f"forecast_weights of {branch!r} at step {step} combine the steps {sorted(row)!r}; expected "
                    "computed steps before it. Fit the weights to the schedule that they are used with."
                ),
            )


def _rows(config: TeaCacheConfig) -> Iterator[tuple[str, int, Row, Mask]]:
    """Branch, step, weights and schedule of every skipped step."""
    for branch, rows in (config.forecast_weights or {}).items():
        mask = config.mask_for(branch) or ()
        yield from ((branch, step, rows.get(step, {}), mask) for step, computed in enumerate(mask) if not computed)
