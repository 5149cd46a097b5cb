"""What does a branch remember from step to step?"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from ..hooks import BaseState
from ..trace.forward import Tensors
from ..trace.passes import Outlook
from . import inputs as change
from .config import TeaCacheConfig
from .decision import Signal
from .forecast import History, OutputForm, take_apart
from .inputs import Inputs


class TeaCacheState(BaseState):
    """One branch of one run."""

    def __init__(self, config: TeaCacheConfig | None = None) -> None:
        config = config or TeaCacheConfig()
        self.history = History(config.order, config.forecast_damping)
        """The results of the last computed steps."""
        self.reset()

    def reset(self) -> None:
        """Forget the steps so far: they do not predict those that follow."""
        self.history.clear()
        self.generation = 0
        """Generation of the model when the last step was computed."""
        self.signature: Hashable = None
        """Signature of the calls in the history."""
        self.signal: Signal | None = None
        self.accumulated_rel_l1_distance = 0.0
        self.skipped_in_a_row = 0
        self.early: Tensors | None = None
        """Residuals of blocks before the leader, where the output is forecast."""
        self.form: OutputForm | None = None
        """Form of the model's output, where that is forecast."""
        self.watched: change.Watch = {}
        self.numbers: tuple[float, ...] = ()
        self.objects: list[Any] = []
        """Tensors, numbers and other inputs that should not change."""

    def obstacle(self, inputs: Inputs, asks: bool) -> str | None:
        """Why a step with these inputs cannot be skipped, if it cannot."""
        if not len(self.history) or (asks and self.signal is None):
            return "nothing stored"
        if inputs.signature != self.signature:
            return "inputs have another form"
        same = inputs.numbers == self.numbers and len(inputs.objects) == len(self.objects)
        return None if same and all(map(_is_same, inputs.objects, self.objects)) else "conditioning changed"

    def computed(self, inputs: Inputs, signal: Signal | None, generation: int = 0) -> None:
        """Note a computed step; `store` keeps its result."""
        if self.signature != inputs.signature or self.numbers != inputs.numbers:
            self.reset()
        self.signature, self.numbers, self.watched = inputs.signature, inputs.numbers, change.watch(inputs)
        self.generation, self.objects = generation, inputs.objects
        self.signal = signal or self.signal
        self.skipped_in_a_row, self.accumulated_rel_l1_distance = 0, 0.0

    def store(self, place: float, index: int, parts: Tensors | None) -> None:
        """Add the result of a computed step to the history; without one, the history ends."""
        if parts is None:
            self.history.clear()
        else:
            self.history.push(place, parts, index)

    def store_output(self, place: float, index: int, output: Any) -> None:
        """The same for the model's output."""
        self.form, parts = take_apart(output)
        self.store(place, index, parts)

    def skipped(self, inputs: Inputs, signal: Signal | None, accumulated: float, others_changed: bool) -> None:
        """Note a skipped step."""
        self.signal = signal or self.signal
        self.skipped_in_a_row += 1
        self.accumulated_rel_l1_distance = accumulated
        if others_changed:  # Changes add up from step to step, like the signal's.
            self.watched = change.watch(inputs)

    def forecast_output(self, outlook: Outlook) -> Any:
        """The output of a skipped step, where outputs are forecast."""
        assert self.form is not None
        return self.form.rebuild(outlook)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one is other or (isinstance(one, (list, tuple, dict, set)) and type(one) is type(other))
