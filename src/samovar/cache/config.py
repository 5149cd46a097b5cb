"""What may a user ask of the cache? Every setting, checked when it is given."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ..errors import SettingError, nearest
from .forecast import Forecast, Target


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
    on along a line through the last two ("linear") or a curve through the last `forecast_order` + 1 ("taylor")."""
    forecast_order: int = 2
    """The order of "taylor"."""
    forecast_of: Target = "residual"
    """What is carried on: what each stack of blocks added to its input, or the model's output as a whole."""
    forecast_damping: float = 1.0
    """How much of the way from reuse to the forecast is gone."""

    schedule: Sequence[bool] | str | None = None
    """Which steps are computed, decided beforehand: a mask, or a string with `#` for computed and `.` for
    skipped. Nothing is measured then, and no device has to be waited for."""

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
        object.__setattr__(self, "schedule", _read_mask(self.schedule))

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
    def mask(self) -> tuple[bool, ...] | None:
        """The schedule as a mask."""
        return self.schedule  # type: ignore[return-value]  # `__post_init__` made it one.

    @property
    def order(self) -> int:
        """How many computed steps, less one, a forecast rests on."""
        return {"reuse": 0, "linear": 1, "taylor": self.forecast_order}[self.forecast]

    def summary(self) -> str:
        """The settings that are not the usual ones, in a line."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in usual}
        shown = {name: value for name, value in given.items() if name == "rel_l1_thresh" or value != usual[name]}
        if self.mask is not None:
            shown = {name: value for name, value in shown.items() if name.startswith("forecast")}
            shown["schedule"] = "".join(".#"[computed] for computed in self.mask)
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    @property
    def never_skips(self) -> bool:
        """Whether these settings are those of the bare model."""
        return all(self.mask) if self.mask is not None else self.rel_l1_thresh == 0


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


def _read_mask(schedule: Any) -> tuple[bool, ...] | None:
    if schedule is None:
        return None
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
