"""Is this picture one of the hard ones? Told at one early step, by how far off a forecast would have been there.

Most pictures bear skipped steps well. A few do not: the model has not made up its mind on them, and a small error turns
them into other pictures. The same few are hard to forecast from the start. So at a step that is computed anyway the
forecast is made as well, the two are compared, and a picture whose forecast is further off than usual goes on by a
schedule with more computed steps. It costs one number that is waited for in a run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SettingError, nearest
from .forecast import Outlook, take_apart


@dataclass(frozen=True)
class HardPictures:
    """How hard images are recognised, and what is done with them. `samovar.lab.fitting` makes these."""

    branch: str
    """Whose forecast is looked at."""
    step: int
    """When: a step that is computed. Up to it both schedules are the same."""
    weights: Mapping[int, float]
    """What the forecast would be made of: by number, what computed steps before it count for."""
    error: float
    """A picture whose forecast is further off than this, relative to what was computed, is hard."""
    schedule: Any
    """That of hard pictures, as `schedule` is that of the others."""
    forecast_weights: Any
    """What goes with it."""

    @staticmethod
    def read(given: Any) -> HardPictures | None:
        """From a mapping, as it is saved. The schedule is looked at by whoever reads the others."""
        if given is None or isinstance(given, HardPictures):
            return given
        known = [field.name for field in dataclasses.fields(HardPictures)]
        if not isinstance(given, Mapping) or (set(known) - set(given)):
            raise SettingError(
                f"hard={given!r:.200}; a mapping with {', '.join(known)} was expected, as tune saves it."
            )
        for name in given:
            if name not in known:
                raise SettingError(f"hard has no setting {name!r}. {nearest(str(name), known)}")
        step, error = given["step"], given["error"]
        if type(step) is not int or step < 1:
            raise SettingError(f"hard: step={step!r}; the number of a computed step from 1 upwards was expected.")
        if not isinstance(error, (int, float)) or isinstance(error, bool) or not (0 <= error < math.inf):
            raise SettingError(f"hard: error={error!r}; a number from 0 upwards was expected, such as 0.05.")
        return HardPictures(**{**given, "weights": _read_row(given["weights"])})

    def told(self, outlook: Outlook | None, output: Any) -> tuple[bool, ...]:
        """Which pictures of a batch are hard, by what a forecast would have been and what was computed. Where there is
        nothing to compare, all are."""
        _, tensors = take_apart(output)
        numbers = [index for index, tensor in enumerate(tensors or ()) if tensor is not None and tensor.dim()]
        if outlook is None or tensors is None or not numbers:
            return (True,)
        misses = [_miss(outlook.value(index), tensors[index]) for index in numbers]
        if len({len(miss) for miss in misses}) > 1:  # Not a row for each picture.
            misses = [miss.amax().reshape(1) for miss in misses]
        found: list[float] = torch.stack([miss.to(misses[0].device) for miss in misses]).amax(0).tolist()
        return tuple(not miss <= self.error for miss in found)  # What is no number is hard, too.


def _miss(guess: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor:
    """How far off each row is, relative to its size."""
    assert guess is not None
    assert value is not None
    rows, wanted = guess.float().reshape(len(guess), -1), value.float().reshape(len(value), -1)
    sizes = wanted.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((rows - wanted).square().sum(1) / sizes).sqrt()


def _read_row(weights: Any) -> dict[int, float]:
    """With whole numbers for steps, which JSON has as strings."""
    try:
        row = {int(step): float(weight) for step, weight in weights.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingError(
            f"hard: weights={weights!r:.200}; a weight for each of some computed steps was expected, such as "
            "{'2': 1.9, '1': -0.9}."
        ) from error
    if not row or not all(map(math.isfinite, row.values())):
        raise SettingError(f"hard: weights={row!r}; some finite numbers were expected.")
    return row
