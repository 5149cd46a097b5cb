"""What may a user ask of the cache? Every setting, checked when it is given."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ..errors import SettingError, nearest
from .forecast import Forecast, Target
from .hard import HardPictures

EVERY_BRANCH = "*"
"""The name that stands for every branch that is not named."""
Mask = tuple[bool, ...]


@dataclass(frozen=True)
class TeaCacheConfig:
    """The settings of TeaCache. The defaults are those of plain TeaCache, with guards."""

    rel_l1_thresh: float = 0.2
    """Steps are skipped until the summed change of the modulated input reaches this: 0.2 is balanced, 0.4 fast,
    0 computes every step, infinity skips whatever the guards allow."""
    coefficients: Sequence[float] | None = None
    """Five numbers, highest power first, of the polynomial that turns the change of the modulated input into
    that of the output. By default the model's own, where they are known, else the change is taken as it is."""

    first_steps: int = 1
    """So many steps at the start are computed; the very first always is."""
    last_steps: int = 1
    """So many steps at the end are computed, where the number of steps is known."""
    max_skips: int | None = 4
    """At most so many steps are skipped in a row; None for any number."""
    min_steps: int = 8
    """A run of fewer steps is computed whole: it has none to spare."""
    start: float = 0.0
    end: float = 1.0
    """Steps are skipped only within this part of the run, from 0 to 1."""

    forecast: Forecast = "reuse"
    """What takes the place of a step that is skipped: what the last computed one added ("reuse"), or that carried
    on along a line through the last two ("linear") or a curve through the last `forecast_order` + 1 ("taylor"), or
    what `forecast_weights` make of the computed ones ("fitted")."""
    forecast_order: int = 2
    """The order of "taylor"."""
    forecast_of: Target = "residual"
    """What is carried on: what each stack of blocks added to its input, or the model's output as a whole."""
    forecast_damping: float = 1.0
    """How much of the way from reuse to a curve is gone."""
    forecast_weights: Mapping[str, Mapping[Any, Mapping[Any, float]]] | None = None
    """For "fitted": by branch, for each skipped step, what each of some computed steps before it counts for. The
    branch "*" stands for all that are not named."""

    schedule: Sequence[bool] | str | Mapping[str, Sequence[bool] | str] | None = None
    """Which steps are computed, decided beforehand: a mask, or a string with `#` for computed and `.` for
    skipped, or one of them for each branch by name. Nothing is measured then, and no device has to be waited for."""
    hard: HardPictures | Mapping[str, Any] | None = None
    """For "fitted": how pictures are told that do not bear so many skipped steps, and the schedule for them. A batch is
    hard if one of its pictures is."""

    def __post_init__(self) -> None:
        _check_number("rel_l1_thresh", self.rel_l1_thresh, "a number from 0 upwards, such as 0.2", 0.0, math.inf)
        object.__setattr__(self, "coefficients", _read_coefficients(self.coefficients))
        _check_count("first_steps", self.first_steps, 1)
        _check_count("last_steps", self.last_steps, 0)
        _check_count("min_steps", self.min_steps, 0)
        if self.max_skips is not None:
            _check_count("max_skips", self.max_skips, 1)
        _check_number("start", self.start, "a part of the run from 0 to 1", 0.0, 1.0)
        _check_number("end", self.end, "a part of the run from 0 to 1", 0.0, 1.0)
        if self.start > self.end:
            raise SettingError(f"start={self.start} comes after end={self.end}. Exchange them.")
        _check_choice("forecast", self.forecast, get_args(Forecast))
        _check_choice("forecast_of", self.forecast_of, get_args(Target))
        _check_count("forecast_order", self.forecast_order, 1)
        _check_number("forecast_damping", self.forecast_damping, "a number from 0 (reuse) to 1 (all the way)", 0.0, 1.0)
        object.__setattr__(self, "schedule", _read_schedule(self.schedule))
        object.__setattr__(self, "forecast_weights", _read_weights(self.forecast_weights))
        _check_fitted(self)
        object.__setattr__(self, "hard", HardPictures.read(self.hard))
        _check_hard(self)

    @classmethod
    def read(cls, settings: TeaCacheConfig | Mapping[str, Any] | None) -> TeaCacheConfig:
        """The settings from a mapping, as they come from a command line or a file."""
        if settings is None or isinstance(settings, TeaCacheConfig):
            return settings or cls()
        if not isinstance(settings, Mapping):
            raise SettingError(
                f"cache_config is {settings!r}; a mapping such as {{'rel_l1_thresh': 0.2}} or a TeaCacheConfig was "
                "expected."
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                raise SettingError(f"tea_cache has no setting {name!r}. {nearest(str(name), known)}")
        return cls(**settings)

    @property
    def mask(self) -> Mask | None:
        """The schedule as a mask, if there is one for all branches."""
        return None if isinstance(self.schedule, Mapping) else self.schedule  # type: ignore[return-value]  # Read above.

    @property
    def masks(self) -> Mapping[str, Mask]:
        """The schedules by branch."""
        if isinstance(self.schedule, Mapping):
            return self.schedule  # type: ignore[return-value]  # Read above.
        return {} if self.mask is None else {EVERY_BRANCH: self.mask}

    def mask_for(self, branch: str | None) -> Mask | None:
        """The schedule of a branch, if it has one."""
        masks = self.masks
        return masks.get(branch or "", masks.get(EVERY_BRANCH))

    @property
    def scheduled_steps(self) -> int | None:
        """How many steps the schedule is for."""
        return next((len(mask) for mask in self.masks.values()), None)

    @property
    def is_by_branch(self) -> bool:
        """Whether each branch goes by what is saved for it, whatever the first one does."""
        return isinstance(self.schedule, Mapping) or self.forecast == "fitted"

    def weights_for(self, branch: str | None, step: int) -> Mapping[int, float] | None:
        """What a skipped step of a branch is made of, if that was fitted."""
        weights = self.forecast_weights or {}
        return weights.get(branch or "", weights.get(EVERY_BRANCH, {})).get(step)

    @property
    def order(self) -> int:
        """How many computed steps, less one, a forecast rests on."""
        if self.forecast == "fitted":
            plans = [self] if self.plan_of_hard is None else [self, self.plan_of_hard]
            return max(_depth(plan, branch) for plan in plans for branch in plan.forecast_weights or {}) - 1
        return {"reuse": 0, "linear": 1, "taylor": self.forecast_order}[self.forecast]

    @functools.cached_property
    def plan_of_hard(self) -> TeaCacheConfig | None:
        """The settings by which hard pictures go on, if there are such."""
        hard = self.hard
        if not isinstance(hard, HardPictures):
            return None
        return dataclasses.replace(self, schedule=hard.schedule, forecast_weights=hard.forecast_weights, hard=None)

    def summary(self) -> str:
        """The settings that are not the usual ones, in a line."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in usual}
        shown = {name: value for name, value in given.items() if name == "rel_l1_thresh" or value != usual[name]}
        shown.pop("forecast_weights", None)  # Too many for a line.
        shown.pop("hard", None)
        if self.schedule is not None:
            shown = {name: value for name, value in shown.items() if name.startswith("forecast")}
            written = {name: "".join(".#"[computed] for computed in mask) for name, mask in self.masks.items()}
            shown["schedule"] = " ".join(mask if self.mask else f"{name}:{mask}" for name, mask in written.items())
        if self.plan_of_hard is not None:
            shown["hard"] = f"({self.plan_of_hard.summary().rpartition('schedule=')[2]})"
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    @property
    def never_skips(self) -> bool:
        """Whether these settings are those of the bare model."""
        return all(map(all, self.masks.values())) if self.schedule is not None else self.rel_l1_thresh == 0


def _check_number(name: str, value: Any, expected: str, least: float, most: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or not least <= value <= most:
        raise SettingError(f"{name}={value!r}; {expected} was expected.")


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name}={value!r}; a whole number from {least} upwards was expected.")


def _check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        hint = nearest(value, known) if isinstance(value, str) else ""
        raise SettingError(f"{name}={value!r}; one of {', '.join(map(repr, known))} was expected. {hint}".rstrip())


def _read_coefficients(coefficients: Any) -> tuple[float, ...] | None:
    if coefficients is None:
        return None
    numbers = coefficients if isinstance(coefficients, Sequence) and not isinstance(coefficients, str) else ()
    if len(numbers) != 5:
        raise SettingError(
            f"coefficients={coefficients!r}; exactly five numbers were expected, highest power first, or None for the "
            "model's own."
        )
    for number in numbers:
        _check_number("coefficients", number, "five finite numbers", -1e300, 1e300)
    return tuple(numbers)


def _read_schedule(schedule: Any) -> Mask | dict[str, Mask] | None:
    if schedule is None:
        return None
    if not isinstance(schedule, Mapping):
        return _read_mask(schedule)
    masks = {name: _read_mask(mask) for name, mask in schedule.items()}
    if len({len(mask) for mask in masks.values()}) != 1 or not all(isinstance(name, str) for name in masks):
        raise SettingError(
            f"schedule={schedule!r}; by name of branch one mask each was expected, all for as many steps. "
            f"{EVERY_BRANCH!r} stands for every branch that is not named."
        )
    return masks


def _read_weights(weights: Any) -> dict[str, dict[int, dict[int, float]]] | None:
    """With whole numbers for steps, which JSON has as strings."""
    if weights is None:
        return None
    try:
        read = {
            str(branch): {
                int(step): {int(old): float(weight) for old, weight in row.items()} for step, row in steps.items()
            }
            for branch, steps in weights.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingError(
            f"forecast_weights={weights!r:.200}; by branch and skipped step a weight for each of some computed steps "
            f"was expected, such as {{'cond': {{'3': {{'2': 1.9, '1': -0.9}}}}}}. Fit them: samovar.lab.fitting."
        ) from error
    for branch, steps in read.items():
        for step, row in steps.items():
            if not row or not all(map(math.isfinite, row.values())):
                raise SettingError(
                    f"forecast_weights of {branch!r} at step {step} are {row!r}; some finite numbers were expected."
                )
    return read


def _check_fitted(config: TeaCacheConfig) -> None:
    """Weights are for one schedule: each skipped step must have some, of computed steps before it."""
    weights = config.forecast_weights
    if (config.forecast == "fitted") != (weights is not None):
        raise SettingError(
            f"forecast={config.forecast!r} with {'no' if weights is None else 'some'} forecast_weights; 'fitted' and "
            "its weights were expected together. Fit them: samovar.lab.fitting."
        )
    if weights is None:
        return
    if config.schedule is None or config.forecast_of != "output":
        raise SettingError(
            f"forecast='fitted' with schedule={config.schedule!r} and forecast_of={config.forecast_of!r}; the schedule "
            "that its weights were fitted for was expected, and forecast_of='output'."
        )
    if not weights or (config.mask is None and set(weights) != set(config.masks)):
        raise SettingError(
            f"forecast_weights of the branches {sorted(weights)!r} for schedules of {sorted(config.masks)!r}; the same "
            "branches were expected."
        )
    for branch, steps in weights.items():
        mask = config.mask or config.masks[branch]
        for step in (number for number, computed in enumerate(mask) if not computed):
            row = steps.get(step, {})
            if not row or not all(0 <= old < step and mask[old] for old in row):
                raise SettingError(
                    f"forecast_weights of {branch!r} at step {step} rest on {sorted(row)!r}; computed steps before it "
                    "were expected. Fit them to the schedule that they are used with."
                )


def _check_hard(config: TeaCacheConfig) -> None:
    """Both schedules are one up to the step where they part, and what is compared there is stored."""
    hard, plan = config.hard, config.plan_of_hard
    if not isinstance(hard, HardPictures) or plan is None:
        return
    if config.forecast != "fitted" or set(config.masks) != set(plan.masks):
        raise SettingError(
            f"hard: a schedule of {sorted(plan.masks)!r} beside one of {sorted(config.masks)!r} with "
            f"forecast={config.forecast!r}; the same branches and 'fitted' were expected."
        )
    mask = config.mask_for(hard.branch)
    if mask is None or hard.step >= len(mask) or not mask[hard.step]:
        raise SettingError(
            f"hard: step {hard.step} of {hard.branch!r}; a step that the schedule has computed was expected, of one of "
            f"the branches {', '.join(map(repr, config.masks))}."
        )
    if not all(old < hard.step and mask[old] for old in hard.weights):
        raise SettingError(
            f"hard: weights of the steps {sorted(hard.weights)!r}; computed steps before {hard.step} were expected."
        )
    for branch, usual in config.masks.items():
        other = plan.masks[branch]
        if len(other) != len(usual) or other[: hard.step + 1] != usual[: hard.step + 1]:
            raise SettingError(
                f"hard: a schedule of {branch!r} that differs in its first {hard.step + 1} steps or its length; only "
                "later steps may differ, when it is known which pictures are hard."
            )


def _depth(config: TeaCacheConfig, branch: str) -> int:
    """How many computed steps back the weights of a branch reach."""
    mask, weights = config.mask or config.masks[branch], config.forecast_weights
    assert weights is not None
    rows = dict(weights[branch])
    if isinstance(config.hard, HardPictures) and config.hard.branch == branch:
        rows[config.hard.step] = config.hard.weights
    return max((sum(mask[min(row) : step]) for step, row in rows.items()), default=1)


def _read_mask(schedule: Any) -> Mask:
    steps: Sequence[Any] = schedule if isinstance(schedule, Sequence) else ()
    if isinstance(schedule, str):
        steps = [{"#": True, ".": False}.get(sign) for sign in schedule]
    if not steps or not all(isinstance(step, (bool, int)) and step in (0, 1) for step in steps):
        raise SettingError(
            f"schedule={schedule!r}; a mask with one True or False for each step was expected, or a string of '#' "
            "(computed) and '.' (skipped)."
        )
    if not steps[0]:
        raise SettingError(f"schedule={schedule!r} skips the first step, when there is nothing to reuse. Compute it.")
    return tuple(map(bool, steps))
