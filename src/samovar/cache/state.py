"""What a cache remembers of one guidance branch of one run."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from ..hooks import BaseState
from ..trace.forward import Tensors
from .inputs import Inputs, Watch, watch
from .outputs import Output, OutputForm
from .signal import Signal

NOTHING_STORED = "nothing stored"


class TeaCacheState(BaseState):
    """One branch of one run."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the steps so far: they do not predict those that follow."""
        self.residuals: Tensors | None = None
        """What the blocks added at the last computed step."""
        self.outputs: dict[int, Output] = {}
        """By step, what the model returned, where whole outputs are forecast."""
        self.form: OutputForm | None = None
        self.generation = 0
        """Generation of the model when the last step was computed."""
        self.signal: Signal | None = None
        self.accumulated_rel_l1_distance = 0.0
        self.skipped_in_a_row = 0
        self._signature: Hashable = None
        self._numbers: tuple[float, ...] = ()
        self._objects: list[Any] = []
        self.watched: Watch = {}
        """What inputs should not change: their form, numbers, objects and tensors."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to make a skipped step of."""
        return self.residuals is None and not self.outputs

    def obstacle(self, inputs: Inputs) -> str | None:
        """Why a step with these inputs cannot be skipped, if it cannot."""
        if self.is_empty:
            return NOTHING_STORED
        if inputs.signature != self._signature:
            return "the shapes, dtypes or set of arguments changed"
        same = inputs.numbers == self._numbers and len(inputs.objects) == len(self._objects)
        return None if same and all(map(_is_same, inputs.objects, self._objects)) else "conditioning changed"

    def note_computed(self, inputs: Inputs, generation: int, signal: Signal | None = None) -> None:
        """A step was computed; its result is stored by others."""
        if self._signature != inputs.signature or self._numbers != inputs.numbers:
            self.reset()
        self._signature, self._numbers, self._objects = inputs.signature, inputs.numbers, inputs.objects
        self.generation, self.watched, self.signal = generation, watch(inputs), signal or self.signal
        self.skipped_in_a_row, self.accumulated_rel_l1_distance = 0, 0.0

    def note_skipped(self, inputs: Inputs, watches: bool, signal: Signal | None = None, total: float = 0.0) -> None:
        """A step was skipped. `watches`: whether other inputs are compared with those of this step from now on: their
        changes add up in `total` like the signal's."""
        self.signal, self.accumulated_rel_l1_distance = signal or self.signal, total
        self.skipped_in_a_row += 1
        if watches:
            self.watched = watch(inputs)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one is other or (isinstance(one, (list, tuple, dict, set)) and type(one) is type(other))
