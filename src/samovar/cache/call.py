"""One call of the denoiser, the run that it belongs to, and how its step is taken."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..trace.skip_pass import Mode
from .clock import Clock, Step
from .error_control import ErrorControl
from .forecast_error import Path
from .history import CHANGED_INPUT, TeaCacheState
from .inputs import Inputs
from .model import CachedModel, Forward
from .signal import Agree, measure
from .stats import StepRecord

AGAIN = "this branch was called twice at the same step"
"""The reason of a call that may not be a step; nothing of it is stored."""
NEVER = ("settings", "min_steps")
"""Reasons for which no step of a run is ever skipped."""


class Verdict(NamedTuple):
    """What to do with a step, and why. `ask` leaves it to the signal."""

    action: Mode
    reason: str


@dataclass
class CachedRun:
    """What belongs to all branches of one run."""

    clock: Clock
    branches: dict[Hashable, TeaCacheState] = field(default_factory=dict)
    records: dict[str, list[StepRecord]] = field(default_factory=dict)
    control: ErrorControl = field(default_factory=ErrorControl)
    path: Path = field(default_factory=Path)
    verdict: Verdict | None = None
    """What the first branch of the running step has decided for those called after it."""
    is_over: bool = False

    def note(self, branch: str, record: StepRecord) -> None:
        """Keep the record of a call."""
        self.records.setdefault(branch, []).append(record)

    def end(self) -> None:
        """Keep the records alone."""
        vars(self).update(vars(CachedRun(Clock(), records=self.records, is_over=True)))


class Call(NamedTuple):
    """One call of the denoiser."""

    forward: Forward
    inputs: Inputs
    branch: str
    run: CachedRun
    state: TeaCacheState
    step: Step
    is_again: bool
    """Its branch was already called in this step."""
    generation: int
    """That of the model."""

    def compute(self) -> Any:
        """What the model itself returns."""
        return self.forward(self.inputs.args, self.inputs.kwargs)


class Steps:
    """Takes the steps of one denoiser."""

    def __init__(self, model: CachedModel, agree: Agree | None, max_change: float) -> None:
        """`max_change`: of inputs other than sample, time and conditioning, relative; above it a step is computed."""
        self.model, self.agree, self._max_change = model, agree, max_change

    def take(self, call: Call) -> tuple[StepRecord, Any]:
        """Compute a step, or skip it with what is known from earlier steps."""
        raise NotImplementedError

    def _obstacle(self, call: Call, is_asked: bool = False) -> str | None:
        """Why this step of this branch cannot be skipped, if it cannot. What is no longer of use is forgotten. Other
        inputs of a step that is left to its signal are measured with that."""
        if call.is_again:
            return AGAIN
        why = call.state.obstacle(call.inputs, call.generation)
        others = [] if why is not None or is_asked else call.state.changes(call.inputs)
        if others and max(measure(others[0], others[1:], self.agree, within_branch=True)) >= self._max_change:
            call.state.reset()
            why = CHANGED_INPUT
        return why or self.model.problem(call.inputs)
