"""A denoiser whose steps can be skipped, and what is known about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch

from ..arch import Coverage
from ..core import nested
from ..trace.model_state import Generation
from .inputs import Inputs

Forward = Callable[[Any, Any], Any]
"""The model's own forward, of arguments and keyword arguments."""
MAX_FORMS = 32
"""Number of forms of inputs, such as sizes and text lengths, that are remembered."""
_logger = logging.getLogger(__name__)


class About(NamedTuple):
    """What a cache knows about its model."""

    signal: str
    """What decides whether a step is skipped."""
    problem: str | None = None
    """Why steps of the form seen last cannot be skipped, if they cannot."""
    coverage: Coverage | None = None
    """How much of the model a skipped step leaves out, where that is known."""


class CachedModel:
    """A denoiser whose steps can be skipped."""

    def __init__(self, model: torch.nn.Module, watched: Callable[[], Iterable[torch.nn.Module]] = tuple) -> None:
        """`watched`: the modules by which changes of the model are seen."""
        self._model = model
        self._generation = Generation(model, watched)
        self._refused: dict[Hashable, str] = {}
        """By form of inputs: why its steps cannot be skipped."""

    def about(self) -> About:
        """Facts about the model, in words and figures."""
        return About("the errors of its own forecasts", next(reversed(self._refused.values()), None))

    def problem(self, inputs: Inputs) -> str | None:
        """Why no step with such inputs can be skipped, if none can."""
        return self._refused.get(inputs.signature) if self._refused else None

    def generation(self) -> int:
        """A number that grows when the model is seen to have other weights or adapters."""
        return self._generation.check()

    def forget(self) -> None:
        """Drop what is only useful for one run."""

    def detach(self) -> None:
        """Take everything off the model."""

    def _refuse(self, signature: Hashable, problem: str) -> None:
        if problem not in self._refused.values():
            _logger.warning("%s is not cached: %s", type(self._model).__name__, problem)
        keep_latest(self._refused, signature, problem)


def keep_latest(table: dict[Hashable, Any], key: Hashable, value: Any) -> list[Any]:
    """Put a value into a table of forms; return those that it had no room for."""
    table[key] = value
    return [table.pop(next(iter(table)))] if len(table) > MAX_FORMS else []


def side_effect(inputs: Inputs, before: Iterable[torch.Tensor], output: Any) -> str | None:
    """What a forward did that a skipped one would not do, if anything. `before`: copies of its tensors."""
    known = set(map(id, inputs.tensors))
    is_filled = not known.issuperset(map(id, nested.tensors((inputs.args, inputs.kwargs))))
    if is_filled or not all(map(_has_same_numbers, inputs.tensors, before)):
        return "it writes into its inputs"
    return None if nested.is_transparent(output) else "its output holds objects that cannot be inspected"


def _has_same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN included, where that can be seen."""
    if not nested.is_comparable(one):
        return True
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
