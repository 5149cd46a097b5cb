"""What is remembered of a branch from step to step?"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..hooks import BaseState
from . import inputs as change
from .config import TeaCacheConfig
from .decision import Attempt, Signal
from .forecast import History, OutputForm, take_apart
from .inputs import Inputs
from .line import Line
from .memo import Memo


class TeaCacheState(BaseState):
    """One branch of one run."""

    def __init__(self, config: TeaCacheConfig | None = None) -> None:
        config = config or TeaCacheConfig()
        self.history = History(config.order, config.forecast_damping)
        """What the last computed steps gave."""
        self.memo = Memo()
        self.reset()

    def reset(self) -> None:
        self.history.clear()
        self.key: Hashable = None
        """What calls must have in common for the history to stand for them."""
        self.signal: Signal | None = None
        self.accumulated_rel_l1_distance = 0.0
        self.skipped_in_a_row = 0
        self.last_step = -1
        self.form: OutputForm | None = None
        """Of the model's output, where that is what is stored."""
        self.watched: change.Watch = {}
        self.numbers: tuple[float, ...] = ()
        """Tensors and numbers among the inputs that should stay as they are."""
        self.memo.clear()
        self._memo_form: Hashable = None
        self._memo_inputs: change.Watch = {}
        """What the memo belongs to."""
        self.is_ambiguous = False
        """Whether several lines of calls go by one name, so that nothing may be reused."""

    def begin_call(self, line: Line, inputs: Inputs) -> None:
        """See whether this is still the same line of calls."""
        if line.is_told and self.last_step == line.index:  # Called twice in a step: there are two of them.
            self.is_ambiguous = True
        form = inputs.signature, inputs.numbers
        if self._memo_form != form or change.changed(inputs, self._memo_inputs):
            self.memo.clear()
            self._memo_form, self._memo_inputs = form, change.watch(inputs)

    def obstacle(self, key: Any, inputs: Inputs, asks: bool) -> str | None:
        """Why nothing that is stored can stand for a step of this key with these inputs."""
        if self.is_ambiguous:
            return "one branch name for several inputs"
        if not len(self.history) or (asks and self.signal is None):
            return "nothing stored"
        if key is None or key != self.key:
            return "inputs of another form"
        return None if inputs.numbers == self.numbers else "other inputs changed"

    def computed(self, line: Line, inputs: Inputs, attempt: Attempt, *, counts: bool = True) -> Any:
        """Store a computed step, if forecasts may rest on it; its output."""
        self.last_step = line.index
        self.signal = attempt.signal or self.signal
        self.skipped_in_a_row, self.accumulated_rel_l1_distance = 0, 0.0
        self.watched, self.numbers = change.watch(inputs), inputs.numbers
        parts = attempt.parts
        if attempt.of_output:
            self.form, parts = take_apart(attempt.output)
        if parts is None or self.key != attempt.key:
            self.history.clear()
        self.key = attempt.key
        if parts is not None and counts:
            self.history.push(line.place, parts, line.index)
        return attempt.output

    def skipped(self, line: Line, inputs: Inputs, attempt: Attempt, accumulated: float, others_changed: bool) -> Any:
        """Note a skipped step; its output."""
        self.last_step = line.index
        self.signal = attempt.signal or self.signal
        self.skipped_in_a_row += 1
        self.accumulated_rel_l1_distance = accumulated
        if others_changed and attempt.judges:  # Changes add up from step to step, as the signal's do.
            self.watched = change.watch(inputs)
        if self.form is None:
            return attempt.output
        assert attempt.outlook is not None
        return self.form.rebuild(attempt.outlook)
