"""The settings of the cache."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
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
Forecast = Literal["reuse", "linear", "fitted"]
Target = Literal["residual", "output"]
Weights = Mapping[str, Mapping[int, Mapping[int, float]]]
"""By branch and skipped step, the weights of computed steps."""


# ------------------------------------------------------------------------------------------------ kinds


def _read_coefficients(value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if len(numbers) != 5 or not all(is_number(n) and math.isfinite(n) for n in numbers):
        raise ValueError
    return tuple(numbers)


_MASK = "one True or False for each step, or a string of '#' (computed) and '.' (skipped)"


def _read_mask(schedule: Any) -> Mask:
    steps: Sequence[Any] = schedule if isinstance(schedule, Sequence) else ()
    if isinstance(schedule, str):
        steps = [{"#": True, ".": False}.get(sign) for sign in schedule]
    if not steps or not all(isinstance(step, (bool, int)) and step in (0, 1) for step in steps):
        raise SettingError(f"schedule={schedule!r:.200}; expected {_MASK}.", param="schedule")
    if not steps[0]:
        raise SettingError(
            f"schedule={schedule!r} skips the first step, when there is nothing to reuse. Compute it.", param="schedule"
        )
    return tuple(map(bool, steps))


def _read_schedule(schedule: Any) -> Mask | dict[str, Mask]:
    if not isinstance(schedule, Mapping):
        return _read_mask(schedule)
    masks = {name: _read_mask(mask) for name, mask in schedule.items()}
    if len({len(mask) for mask in masks.values()}) != 1 or not all(isinstance(name, str) for name in masks):
        raise ValueError(f"{EVERY_BRANCH!r} stands for every branch that is not named.")
    return masks


def _read_weights(weights: Any) -> dict[str, dict[int, dict[int, float]]]:
    """With integers for steps, which JSON has as strings."""
    remedy = "Fit them: samovar.lab.fitting."
    try:
        read = {
            str(branch): {int(step): {int(old): float(w) for old, w in row.items()} for step, row in steps.items()}
            for branch, steps in weights.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(remedy) from error
    if not all(row and all(map(math.isfinite, row.values())) for steps in read.values() for row in steps.values()):
        raise ValueError(remedy)
    return read


_SCHEDULE = Kind("one mask for each branch name, all of the same length", _read_schedule)
_WEIGHTS = Kind(
    "{branch: {skipped step: {computed step: weight}}} with finite weights, such as "
    "{'cond': {'3': {'2': 1.9, '1': -0.9}}}",
    _read_weights,
)


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
    weights: Mapping[int, float] = setting(
        dict, Kind("weights", lambda value: value), "The weights of the forecast, by earlier computed step."
    )
    error: float = setting(0.0, number(), "Relative error of the forecast above which an image is an outlier.")
    schedule: Any = setting(
        "",
        Kind("a schedule", lambda value: value),
        "The schedule for outliers, in the form of `TeaCacheConfig.schedule`.",
    )
    forecast_weights: Any = setting(dict, Kind("weights", lambda value: value), "The weights that go with it.")

    def check(self) -> None:
        read = read_as(_WEIGHTS, {self.branch: {self.step: self.weights}}, "outliers")
        object.__setattr__(self, "weights", read[str(self.branch)][self.step])

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
        _check_forecast(self)
        _check_fitted(self)
        _check_outliers(self)

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

    def weights_for(self, branch: str | None, step: int) -> Mapping[int, float] | None:
        """The fitted weights for a skipped step of a branch, if there are any."""
        weights = self.forecast_weights or {}
        return weights.get(branch or "", weights.get(EVERY_BRANCH, {})).get(step)

    @property
    def order(self) -> int:
        """Computed outputs combined per forecast, less one."""
        if self.forecast != "fitted":
            return int(self.forecast == "linear")
        rows, outliers = list(_rows(self)), self.outliers
        if isinstance(outliers, OutlierSchedule) and self.outlier_plan is not None:
            mask = self.mask_for(outliers.branch) or ()
            rows += [*_rows(self.outlier_plan), (outliers.branch, outliers.step, outliers.weights, mask)]
        return max((sum(mask[min(row) : step]) for _, step, row, mask in rows), default=1) - 1

    @functools.cached_property
    def outlier_plan(self) -> TeaCacheConfig | None:
        """The settings for outliers, if there are any."""
        outliers = self.outliers
        if not isinstance(outliers, OutlierSchedule):
            return None
        weights = outliers.forecast_weights
        return dataclasses.replace(self, schedule=outliers.schedule, forecast_weights=weights, outliers=None)

    @functools.cached_property
    def never_skips(self) -> bool:
        """Whether every step is computed."""
        return all(map(all, self.masks.values())) if self.schedule is not None else self.rel_l1_thresh == 0

    def summary(self) -> str:
        """The settings that differ from the defaults, in a line."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        for long in ("forecast_weights", "schedule", "outliers"):
            usual.pop(long)
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
    return " ".join(
        f"{name}:{mask}" if isinstance(config.schedule, Mapping) else mask for name, mask in written.items()
    )


# ------------------------------------------------------------------------------------------------ checks


def _check_forecast(config: TeaCacheConfig) -> None:
    """A signal decides by the blocks, and reuses what they added; only a schedule can do without the whole forward."""
    if (
        config.schedule is None
        and config.forecast != "fitted"
        and (config.forecast, config.forecast_of) != ("reuse", "residual")
    ):
        raise SettingError(
            f"forecast={config.forecast!r} and forecast_of={config.forecast_of!r} without a schedule; expected "
            "'reuse' of the 'residual'. Give a schedule as well, or use cache='auto', which forecasts outputs.",
            param="forecast",
        )
    if config.forecast == "linear" and config.forecast_of != "output":
        raise SettingError("forecast='linear' is of outputs: add forecast_of='output'.", param="forecast")


def _check_fitted(config: TeaCacheConfig) -> None:
    """Weights are for one schedule: each skipped step needs some, of computed steps before it."""
    weights, problem = config.forecast_weights, None
    if (config.forecast == "fitted") != (weights is not None):
        problem = (
            f"forecast={config.forecast!r} {'without' if weights is None else 'with'} forecast_weights; expected "
            "'fitted' together with its weights. Fit them: samovar.lab.fitting."
        )
    elif weights is not None and (config.schedule is None or config.forecast_of != "output"):
        problem = (
            f"forecast='fitted' with schedule={config.schedule!r} and forecast_of={config.forecast_of!r}; expected "
            "the schedule that its weights were fitted for, and forecast_of='output'."
        )
    elif weights == {} or (weights and isinstance(config.schedule, Mapping) and set(weights) != set(config.masks)):
        problem = (
            f"forecast_weights of the branches {sorted(weights)!r} for schedules of {sorted(config.masks)!r}; expected "
            "the same branches."
        )
    else:
        for branch, step, row, mask in _rows(config):
            if not row or not all(0 <= old < step and mask[old] for old in row):
                problem = (
                    f"forecast_weights of {branch!r} at step {step} combine the steps {sorted(row)!r}; expected "
                    "computed steps before it. Fit the weights to the schedule that they are used with."
                )
                break
    if problem is not None:
        raise SettingError(problem, param="forecast_weights")


def _rows(config: TeaCacheConfig) -> Iterator[tuple[str, int, Mapping[int, float], Mask]]:
    """Branch, step, weights and schedule of every skipped step."""
    for branch, steps in (config.forecast_weights or {}).items():
        mask = config.mask_for(branch) or ()
        yield from ((branch, step, steps.get(step, {}), mask) for step, computed in enumerate(mask) if not computed)


def _check_outliers(config: TeaCacheConfig) -> None:
    """Both schedules agree up to the step where they part, and what is compared there is stored."""
    outliers, plan = config.outliers, config.outlier_plan
    if not isinstance(outliers, OutlierSchedule) or plan is None:
        return
    problem, mask, step = None, config.mask_for(outliers.branch), outliers.step
    if config.forecast != "fitted" or set(config.masks) != set(plan.masks):
        problem = (
            f"a schedule of {sorted(plan.masks)!r} beside one of {sorted(config.masks)!r} with "
            f"forecast={config.forecast!r}; expected the same branches and 'fitted'"
        )
    elif mask is None or step >= len(mask) or not mask[step]:
        problem = f"step {step} of {outliers.branch!r}; expected a computed step of one of {sorted(config.masks)!r}"
    elif not all(0 <= old < step and mask[old] for old in outliers.weights):
        problem = f"weights of the steps {sorted(outliers.weights)!r}; expected computed steps before {step}"
    elif any(plan.masks[name][: step + 1] != usual[: step + 1] for name, usual in config.masks.items()):
        problem = f"a schedule that differs in its first {step + 1} steps; only later steps may differ"
    elif plan.scheduled_steps != config.scheduled_steps:
        problem = f"a schedule of {plan.scheduled_steps} steps; expected {config.scheduled_steps} steps"
    if problem is not None:
        raise SettingError(f"outliers: {problem}.", param="outliers")
