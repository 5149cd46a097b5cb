"""The settings of the cache."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    read_as,
    read_tolerance,
    setting,
    settings_of,
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
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 5
        or not all(is_number(n) and math.isfinite(n) for n in value)
    ):
        raise ValueError
    return tuple(value)


def _read_mask(schedule: Any) -> Mask:
    steps = [{"#": 1, ".": 0}.get(sign) for sign in schedule] if isinstance(schedule, str) else schedule
    if (
        not isinstance(steps, Sequence)
        or not steps
        or not all(type(step) in (bool, int) and step in (0, 1) for step in steps)
    ):
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
_ANY = Kind("settings", lambda value: value)
"""Read together with others."""


# ------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class OutlierSchedule(Settings, param="outliers"):
    """How outliers are recognised, and the schedule for them. `samovar.lab.fitting` makes these.

    Most images tolerate skipped steps well. On a few the model is undecided, and a small error turns them into other
    images. The same few are hard to forecast from the start. So at one step that is computed anyway the forecast is
    made as well, and an image whose forecast is too far off goes on with a denser schedule. This waits for the device
    once per run.
    """

    branch: str = setting("", TEXT, "The branch whose forecast is compared.")
    step: int = setting(1, count(1), "The computed step at which it is compared. Up to it both schedules are the same.")
    weights: Mapping[int, float] = setting(dict, _ANY, "The weights of the forecast, by earlier computed step.")
    error: float = setting(0.0, number(), "Relative error of the forecast above which an image is an outlier.")
    schedule: Any = setting(
        "",
        _ANY,
        "The schedule for outliers, in the form of `TeaCacheConfig.schedule`.",
    )
    forecast_weights: Any = setting(dict, _ANY, "The weights that go with it.")

    def check(self) -> None:
        read = read_as(_WEIGHTS, {self.branch: {self.step: self.weights}}, "outliers")
        object.__setattr__(self, "weights", read[self.branch][self.step])

    @classmethod
    def read(cls, value: Any) -> OutlierSchedule:
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(value, cls) and not (isinstance(value, Mapping) and set(names) <= set(value)):
            expected = f"a mapping with {', '.join(names)}, as samovar tune saves it"
            raise SettingError(f"outliers={value!r:.200}; expected {expected}.", param="outliers")
        return super().read(value)


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
    outliers: OutlierSchedule | Mapping[str, Any] | None = setting(
        None,
        settings_of(OutlierSchedule),
        'For "fitted": how images that tolerate fewer skipped steps are recognised, and their schedule. A batch with '
        "one outlier uses it as a whole.",
    )

    def check(self) -> None:
        if self.start > self.end:
            raise SettingError(f"start={self.start} comes after end={self.end}. Swap them.", param="start")
        checks = (
            (_forecast_problems, "forecast"),
            (_weights_problems, "forecast_weights"),
            (_outlier_problems, "outliers"),
        )
        for problems, param in checks:
            for problem in problems(self):
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
    def outlier_plan(self) -> TeaCacheConfig | None:
        """The settings for outliers, if there are any."""
        known = self.outliers
        if not isinstance(known, OutlierSchedule):
            return None
        return dataclasses.replace(
            self, schedule=known.schedule, forecast_weights=known.forecast_weights, outliers=None
        )

    @functools.cached_property
    def never_skips(self) -> bool:
        """Whether every step is computed."""
        return all(map(all, self.masks.values())) if self.schedule is not None else self.rel_l1_thresh == 0

    def summary(self) -> str:
        """The settings that differ from the defaults, in a line."""
        long = ("forecast_weights", "schedule", "outliers")
        usual = {field.name: field.default for field in dataclasses.fields(self) if field.name not in long}
        given = {name: getattr(self, name) for name in usual}
        shown = {name: value for name, value in given.items() if name == "rel_l1_thresh" or value != usual[name]}
        if self.schedule is not None:
            shown = {name: value for name, value in shown.items() if name.startswith("forecast")}
            shown["schedule"] = _written(self)
        if self.outlier_plan is not None:
            shown["outliers"] = f"({_written(self.outlier_plan)})"
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def __repr__(self) -> str:
        return f"TeaCacheConfig({self.summary()})"


@dataclass(frozen=True)
class AutoConfig(Settings, param="cache"):
    """The settings of the cache "auto": one."""

    tolerance: float | str = setting(
        "high",
        TOLERANCE,
        'How far the skipped steps of a gap may take the sample off its way, relative to its size: "exact" (0, '
        'computes every step), "high" (0.02), "fast" (0.06), or a number.',
    )

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


def _written(config: TeaCacheConfig) -> str:
    """The schedule as `#` and `.`, with the names of branches where it differs by branch."""
    written = {name: "".join(".#"[computed] for computed in mask) for name, mask in config.masks.items()}
    names = (f"{name}:" if isinstance(config.schedule, Mapping) else "" for name in written)
    return " ".join(map("".join, zip(names, written.values(), strict=True)))


# ------------------------------------------------------------------------------------------------ checks


def _forecast_problems(config: TeaCacheConfig) -> Iterator[str]:
    """A signal decides by the blocks, and reuses what they added; only a schedule can do without the whole forward."""
    forecast = config.forecast, config.forecast_of
    if config.schedule is None and config.forecast != "fitted" and forecast != ("reuse", "residual"):
        yield (
            f"forecast={config.forecast!r} and forecast_of={config.forecast_of!r} without a schedule; expected 'reuse' "
            "of the 'residual'. Give a schedule as well, or use cache='auto', which forecasts outputs."
        )
    if forecast == ("linear", "residual"):
        yield "forecast='linear' is of outputs: add forecast_of='output'."


def _weights_problems(config: TeaCacheConfig) -> Iterator[str]:
    """Weights are for one schedule: each skipped step needs some, of computed steps before it."""
    weights = config.forecast_weights
    if (config.forecast == "fitted") != (weights is not None):
        yield (
            f"forecast={config.forecast!r} {'without' if weights is None else 'with'} forecast_weights; expected "
            f"'fitted' together with its weights. {_FIT}"
        )
    if weights is None:
        return
    if config.schedule is None or config.forecast_of != "output":
        yield (
            f"forecast='fitted' with schedule={config.schedule!r} and forecast_of={config.forecast_of!r}; expected "
            "the schedule that its weights were fitted for, and forecast_of='output'."
        )
    if not weights or (isinstance(config.schedule, Mapping) and set(weights) != set(config.masks)):
        yield (
            f"forecast_weights of the branches {sorted(weights)!r} for schedules of {sorted(config.masks)!r}; expected "
            "the same branches."
        )
    for branch in weights:
        mask, rows = config.mask_for(branch) or (), config.rows_for(branch)
        for step in (step for step, is_computed in enumerate(mask) if not is_computed):
            row = rows.get(step, {})
            if not row or not _are_computed(row, mask, step):
                yield (
                    f"forecast_weights of {branch!r} at step {step} combine the steps {sorted(row)!r}; expected "
                    "computed steps before it. Fit the weights to the schedule that they are used with."
                )


def _outlier_problems(config: TeaCacheConfig) -> Iterator[str]:
    """Both schedules agree up to the step where they part, and what is compared there is stored."""
    known, plan = config.outliers, config.outlier_plan
    if not isinstance(known, OutlierSchedule) or plan is None:
        return
    masks, mask, step = config.masks, config.mask_for(known.branch) or (), known.step
    if config.forecast != "fitted" or set(masks) != set(plan.masks):
        yield (
            f"outliers: a schedule of {sorted(plan.masks)!r} beside one of {sorted(masks)!r} with "
            f"forecast={config.forecast!r}; expected the same branches and 'fitted'."
        )
    if step >= len(mask) or not mask[step]:
        yield f"outliers: step {step} of {known.branch!r}; expected a computed step of one of {sorted(masks)!r}."
    if not _are_computed(known.weights, mask, step):
        steps = sorted(known.weights)
        yield f"outliers: weights of the steps {steps!r}; expected computed steps before {step}."
    if any(plan.masks[name][: step + 1] != usual[: step + 1] for name, usual in masks.items()):
        yield f"outliers: a schedule that differs in its first {step + 1} steps; only later steps may differ."
    if plan.scheduled_steps != len(mask):
        yield f"outliers: a schedule of {plan.scheduled_steps} steps; expected {len(mask)} steps."


def _are_computed(steps: Iterable[int], mask: Mask, before: int) -> bool:
    """Whether all of these steps are computed, and come before another."""
    return all(0 <= step < before and mask[step] for step in steps)
