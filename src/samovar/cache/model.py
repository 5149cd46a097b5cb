"""A denoiser whose steps can be skipped, and what is known about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
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


class CacheableModel:
    """A denoiser whose steps can be skipped."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._generation = Generation(model, self._watched_modules)
        self._refused: dict[Hashable, str] = {}
        """By form of inputs: why its steps cannot be skipped."""
        self._warned: set[str] = set()

    def about(self) -> About:
        """Facts about the model, in words and figures."""
        raise NotImplementedError

    def problem(self, inputs: Inputs) -> str | None:
        """Why no step with such inputs can be skipped, if none can."""
        return self._refused.get(inputs.signature) if self._refused else None

    def generation(self) -> int:
        """A number that grows when the model is seen to have other weights or adapters."""
        return self._generation.check()

    def _watched_modules(self) -> Iterator[torch.nn.Module]:
        """Modules whose changes begin a new generation."""
        return iter(())

    def forget(self) -> None:
        """Drop what is only useful for one run."""

    def detach(self) -> None:
        """Take everything off the model."""

    def _refuse(self, signature: Hashable, problem: str) -> None:
        self._refused[signature] = problem
        if len(self._refused) > MAX_FORMS:
            del self._refused[next(iter(self._refused))]
        if problem not in self._warned:
            self._warned.add(problem)
            _logger.warning("%s is not cached: %s", type(self._model).__name__, problem)


def side_effect(inputs: Inputs, before: Inputs, output: Any) -> str | None:
    """What a forward did that a skipped one would not do, if anything. `before`: a copy of its inputs."""
    given = inputs.tensors
    known = {id(tensor) for tensor in given}
    is_filled = any(id(tensor) not in known for tensor in nested.tensors((inputs.args, inputs.kwargs)))
    if is_filled or any(not _same(one, other) for one, other in zip(given, before.tensors, strict=True)):
        return "it writes into its inputs"
    return None if nested.is_transparent(output) else "its output holds objects that cannot be inspected"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN included, where that can be seen."""
    if not nested.is_comparable(one):
        return True
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
