"""TeaCache: the blocks of a step are skipped while the summed changes of its signal stay below a threshold.

Guards and masks come first; what they leave open, the signal decides. A skipped step reuses what the blocks added at
the last computed one. The first branch of a step decides for those called after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..core.errors import SettingError
from ..trace.forward import Tensors
from ..trace.skip_pass import Mode
from .config import Mask, TeaCacheConfig
from .error_control import Step
from .run import CHANGED_INPUT, CHANGED_WEIGHTS, NOTHING_STORED, Call, Verdict
from .signal import Agree, Signal, measure
from .stats import StepRecord
from .steps import AGAIN, NEVER, Steps

_ALWAYS_SAID = (AGAIN, CHANGED_WEIGHTS)


def judge(config: TeaCacheConfig, step: Step, skipped_in_a_row: int, branch: str) -> Verdict:
    """What schedule and guards say about a step of a branch."""
    mask = config.mask_for(branch)
    is_planned = mask is None or _is_planned(mask, step)  # Refused before anything else is said.
    if config.never_skips:
        return Verdict("compute", "settings")
    if config.schedule is not None:
        if mask is None:
            return Verdict("compute", "no schedule for this branch")
        return Verdict("compute" if is_planned else "skip", "schedule")
    guard = _guard(config, step, skipped_in_a_row)
    return Verdict("ask", "") if guard is None else Verdict("compute", guard)


def _guard(config: TeaCacheConfig, step: Step, skipped_in_a_row: int) -> str | None:
    """The setting for which a step is computed, if there is one."""
    if step.run_length is not None and step.run_length < config.min_steps:
        return "min_steps"
    if step.index < step.first + config.first_steps:
        return "first_steps"
    if config.max_skips is not None and skipped_in_a_row >= config.max_skips:
        return "max_skips"
    if step.total is None:
        return None
    if step.index >= step.total - config.last_steps:
        return "last_steps"
    return None if config.start * step.total <= step.index < config.end * step.total else "window"


def _is_planned(mask: Mask, step: Step) -> bool:
    """Whether a schedule computes this step; a schedule of another length than the run's is refused."""
    if step.index >= len(mask) or step.total not in (None, len(mask)):
        steps = f"a step number {step.index + 1}" if step.total is None else f"{step.total} steps"
        raise SettingError(
            f"The schedule is for {len(mask)} steps, and this run has {steps}. Give a schedule of the run's length, or "
            "run as many steps as it has. In your own loop, call refresh(model, steps) where a run begins.",
            param="schedule",
        )
    return mask[step.index]


Decide = Callable[[Signal], bool]
"""Records the signal; returns True to skip."""


class Outcome(NamedTuple):
    """The result of a step."""

    output: Any
    computed: bool = True
    residuals: Tensors | None = None
    """What the blocks added, if the step was computed and that is known."""
    signal: Signal | None = None
    problem: str | None = None
    """Why a step that should have been skipped was computed."""


class ThresholdSteps(Steps):
    """Takes the steps of one denoiser whose expensive part is skipped, by a signal or by a schedule."""

    def __init__(
        self,
        model: torch.nn.Module,
        watched: Callable[[], Iterable[torch.nn.Module]],
        config: TeaCacheConfig,
        rescale: Callable[[float], float],
        agree: Agree | None,
    ) -> None:
        super().__init__(model, agree, config.rel_l1_thresh, watched)
        self._config, self._rescale = config, rescale

    def _run(self, call: Call, mode: Mode, decide: Decide | None) -> Outcome:
        """Take a step; `ask` leaves it to `decide`, without which no signal is read."""
        raise NotImplementedError

    def take(self, call: Call) -> tuple[StepRecord, Any]:
        step, state, decided = call.step, call.state, call.run.verdict
        verdict = judge(self._config, step, state.skipped_in_a_row, call.branch)
        if self._config.schedule is None and decided is not None:
            verdict = decided
        if verdict.reason in NEVER:
            return StepRecord(step.index, True, verdict.reason), call.compute()
        is_asked = verdict.action == "ask"
        obstacle = self._obstacle(call, is_asked) or (NOTHING_STORED if is_asked and state.signal is None else None)
        if obstacle is not None and is_asked and self.agree is not None:
            measure(None, (), self.agree, call.device)  # Other ranks ask, and wait for this one.
        if obstacle is not None and (verdict.action != "compute" or obstacle in _ALWAYS_SAID):
            verdict = Verdict("compute", obstacle)
        record, outcome = self._taken(call, verdict)
        if decided is None:
            call.run.verdict = Verdict("compute" if record.computed else "skip", record.reason)
        self._store(call, record, outcome)
        return record, outcome.output

    def _taken(self, call: Call, verdict: Verdict) -> tuple[StepRecord, Outcome]:
        record = StepRecord(call.step.index, verdict.action != "skip", verdict.reason)

        def decide(signal: Signal) -> bool:
            nonlocal record
            if verdict.action == "ask":
                record = self._decide(record, signal, call)
            return not record.computed

        # On another rank a branch that follows here may lead: it needs its signal of the step before.
        may_lead = call.run.verdict is None or (self.agree is not None and verdict.action == "compute")
        reads = decide if self._config.schedule is None and may_lead else None
        is_refused = call.signature in self._refused
        outcome = Outcome(call.compute()) if is_refused else self._run(call, verdict.action, reads)
        if outcome.computed and not record.computed:
            record = record._replace(computed=True, reason=outcome.problem or "the blocks cannot be skipped")
        return record, outcome

    def _decide(self, record: StepRecord, signal: Signal, call: Call) -> StepRecord:
        """The record of a step that was left to its signal."""
        state, threshold = call.state, self._config.rel_l1_thresh
        assert state.signal is not None
        pair = state.signal.change(signal)
        measured = measure(pair, state.changes(call), self.agree, signal.value.device)
        if pair is None:
            state.reset()
            return record._replace(reason=CHANGED_WEIGHTS)
        accumulated = state.accumulated_rel_l1_distance + max(self._rescale(measured.signal), measured.others)
        record = record._replace(distance=measured.signal, accumulated=accumulated)
        if measured.others >= threshold:
            state.reset()
            return record._replace(reason=CHANGED_INPUT)
        if accumulated < threshold:
            return record._replace(computed=False, reason="below the threshold")
        return record._replace(reason="the threshold is reached")

    def _store(self, call: Call, record: StepRecord, outcome: Outcome) -> None:
        """Store what later steps are made from."""
        state = call.state
        if not outcome.computed:
            state.note_skipped(outcome.signal, record.accumulated or 0.0)
            if outcome.signal is not None:  # Changes of other inputs add up like the signal's.
                state.watch(call)
            return
        state.note_computed(call, outcome.signal)
        is_of_use = not (call.step.is_last or call.is_again or outcome.problem is not None)
        state.residuals = outcome.residuals if is_of_use else None
