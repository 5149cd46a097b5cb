"""How does a change of the modulated input turn into one of the output? A polynomial for each known model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

import torch

Rescale = Callable[[float], float]


class Coefficients(NamedTuple):
    """A model's polynomial, highest power first."""

    values: tuple[float, ...]
    origin: str


@cache
def known_coefficients() -> dict[str, Coefficients]:
    """Those of coefficients.json, by the class name of the model."""
    text = resources.files(__package__).joinpath("coefficients.json").read_text(encoding="utf-8")
    return {
        name: Coefficients(tuple(entry["coefficients"]), entry["origin"]) for name, entry in json.loads(text).items()
    }


def coefficients_for(model: torch.nn.Module, given: Sequence[float] | None) -> Coefficients | None:
    """Those that were given, else those of the model's own class, else none: no model borrows another's."""
    if given is not None:
        return Coefficients(tuple(given), "the settings")
    return known_coefficients().get(type(model).__name__)


def rescaling(coefficients: Coefficients | None) -> Rescale:
    """The polynomial; without coefficients a change is taken as it is.

    Beyond where it was fitted a polynomial may fall below zero, where it says nothing. There, too, a change is taken
    as it is, lest the largest be taken for none.
    """
    if coefficients is None:
        return lambda distance: distance

    def rescale(distance: float) -> float:
        total = 0.0
        for value in coefficients.values:
            total = total * distance + value
        return total if total > 0 else distance

    return rescale
