"""How the steps of one denoiser are taken, and what is known of the denoiser."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch

from ..arch import Coverage
from ..hooks.roles import moved
from ..trace.model_state import Generation
from .run import CHANGED_INPUT, CHANGED_WEIGHTS, NOTHING_STORED, Call
from .signal import Agree, measure
from .stats import StepRecord

AGAIN = "this branch was called twice at the same step"
"""The reason of a call that may not be a step; nothing of it is stored."""
NEVER = ("settings", "min_steps")
"""Reasons for which no step of a run is ever skipped."""
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


class Steps:
    """Takes the steps of one denoiser."""

    signal = "the errors of its own forecasts"

    def __init__(
        self,
        model: torch.nn.Module,
        agree: Agree | None,
        max_change: float,
        watched: Callable[[], Iterable[torch.nn.Module]] = tuple,
    ) -> None:
        """`max_change`: of inputs other than sample, time and conditioning, relative; above it a step is computed.
        `watched`: the modules by which changes of the model are seen."""
        self.agree = agree
        self.generation = Generation(model, watched)
        """Numbers the weights and adapters that the model is seen to have."""
        self._model, self._max_change = model, max_change
        self._refused: dict[Hashable, str] = {}
        """By form of inputs: why its steps cannot be skipped."""

    def take(self, call: Call) -> tuple[StepRecord, Any]:
        """Compute a step, or skip it with what is known from earlier steps."""
        raise NotImplementedError

    def about(self) -> About:
        """Facts about the model, in words and figures."""
        return About(self.signal, next(reversed(self._refused.values()), None))

    def forget(self) -> None:
        """Drop what is only useful for one run."""

    def detach(self) -> None:
        """Take everything off the model."""

    def _obstacle(self, call: Call, is_asked: bool = False) -> str | None:
        """Why this step of this branch cannot be skipped, if it cannot. What is no longer of use is forgotten. Other
        inputs of a step that is left to its signal are measured with that. This waits for the device where conditioning
        is in other tensors."""
        state, why = call.state, None
        if call.is_again:
            return AGAIN
        if state.made_of is None or (state.residuals is None and not state.outputs):
            why = NOTHING_STORED
        elif call.generation != state.made_of[0]:
            why = CHANGED_WEIGHTS
        elif call.signature != state.made_of[1]:
            why = "the shapes, dtypes or set of arguments changed"
        elif moved(state.conditioning, call.conditioning, state.conditioning):
            why = "conditioning changed"
        elif call.residuals and not is_asked:
            others = state.changes(call)
            if others and max(measure(others[0], others[1:], self.agree, within_branch=True)) >= self._max_change:
                why = CHANGED_INPUT
        if why is not None:
            state.reset()
        return why or self._refused.get(call.signature)

    def _refuse(self, call: Call, problem: str) -> None:
        if problem not in self._refused.values():
            _logger.warning("%s is not cached: %s", type(self._model).__name__, problem)
        keep_latest(self._refused, call.signature, problem)


def keep_latest(table: dict[Hashable, Any], key: Hashable, value: Any) -> list[Any]:
    """Put a value into a table of forms; return those that it had no room for."""
    table[key] = value
    return [table.pop(next(iter(table)))] if len(table) > MAX_FORMS else []
