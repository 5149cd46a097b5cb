"""TeaCache: the blocks of a step are skipped while the summed changes of its signal stay below a threshold.

Guards and masks come first; what they leave open, the signal decides. A skipped step reuses what the blocks added at
the last computed one. The first branch of a step decides for those called after it.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import SettingError
from .blocks import Instruction, Outcome, SkippableModel
from .call import AGAIN, Call, Verdict
from .clock import Step
from .config import Mask, TeaCacheConfig
from .inputs import Pair, changes
from .signal import Agree, Rescale, Signal, measure
from .state import NOTHING_STORED
from .stats import StepRecord

NEVER = ("settings", "min_steps")
"""Reasons for which no step of a run is ever skipped."""
_CHANGED_WEIGHTS = "weights or adapters changed"
_ALWAYS_SAID = (AGAIN, _CHANGED_WEIGHTS)


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


class BlockSteps:
    """Takes the steps of one denoiser whose blocks are skipped, by a signal or by a schedule."""

    def __init__(self, config: TeaCacheConfig, model: SkippableModel, rescale: Rescale, agree: Agree | None) -> None:
        self.config, self.model, self.agree, self._rescale = config, model, agree, rescale

    def take(self, call: Call) -> tuple[StepRecord, Any]:
        """Compute a step, or skip its blocks."""
        step, state, decided = call.step, call.state, call.run.verdict
        if self.config.schedule is not None or decided is None:
            verdict = judge(self.config, step, state.skipped_in_a_row, call.branch)
        else:
            verdict = decided
        if verdict.reason in NEVER:
            return StepRecord(step.index, True, verdict.reason), call.compute()
        others, obstacle = self._obstacle(call, verdict)
        if obstacle is not None and verdict.action == "ask" and self.agree is not None:
            measure(None, (), self.agree, call.inputs.device)  # Other ranks ask, and wait for this one.
        if obstacle is not None and (verdict.action != "compute" or obstacle in _ALWAYS_SAID):
            verdict = Verdict("compute", obstacle)
        record, outcome = self._run(call, verdict, others)
        if decided is None:
            call.run.decide(Verdict("compute" if record.computed else "skip", record.reason))
        self._store(call, record, outcome, watches=bool(others) and outcome.signal is not None)
        return record, outcome.output

    def _obstacle(self, call: Call, verdict: Verdict) -> tuple[list[Pair], str | None]:
        """How much other inputs than sample and time have changed, and why this step of this branch cannot be skipped,
        if it cannot. What is no longer of use is forgotten."""
        state, inputs, others = call.state, call.inputs, list[Pair]()
        if call.tick.is_again:
            return others, AGAIN
        if not state.is_empty:
            if state.generation != self.model.generation():
                state.reset()
                return others, _CHANGED_WEIGHTS
            others = changes(inputs, state.watched)
            # No signal is asked: this concerns the branch's own inputs, on any number of ranks.
            if others and verdict.action != "ask" and self._is_much(others):
                state.reset()
                return others, "conditioning changed"
        obstacle = state.obstacle(inputs)
        if obstacle is None and verdict.action == "ask" and state.signal is None:
            obstacle = NOTHING_STORED
        if obstacle is None and call.tick.is_unclear:
            obstacle = "the sample is the same as in the previous call"
        return others, obstacle or self.model.problem(inputs)

    def _is_much(self, others: list[Pair]) -> bool:
        return max(measure(others[0], others[1:], self.agree, within_branch=True)) >= self.config.rel_l1_thresh

    def _run(self, call: Call, verdict: Verdict, others: list[Pair]) -> tuple[StepRecord, Outcome]:
        record = StepRecord(call.step.index, verdict.action != "skip", verdict.reason)

        def decide(signal: Signal) -> bool:
            nonlocal record
            if verdict.action == "ask":
                record = self._decide(record, signal, call, others)
            return not record.computed

        # On another rank a branch that follows here may lead: it needs its signal of the step before.
        may_lead = call.run.verdict is None or (self.agree is not None and verdict.action == "compute")
        reads = decide if self.config.schedule is None and may_lead else None
        outcome = self.model.run(call.inputs, Instruction(verdict.action, call.state.residuals, reads), call.forward)
        if outcome.computed and not record.computed:
            record = record._replace(computed=True, reason=outcome.problem or "the blocks cannot be skipped")
        return record, outcome

    def _decide(self, record: StepRecord, signal: Signal, call: Call, others: list[Pair]) -> StepRecord:
        """The record of a step that was left to its signal."""
        state, threshold = call.state, self.config.rel_l1_thresh
        assert state.signal is not None
        pair = state.signal.change(signal)
        measured = measure(pair, others, self.agree, signal.value.device)
        if pair is None:
            state.reset()
            return record._replace(reason=_CHANGED_WEIGHTS)
        increase = max(self._rescale(measured.signal), measured.others)
        accumulated = state.accumulated_rel_l1_distance + increase
        record = record._replace(distance=measured.signal, accumulated=accumulated)
        if measured.others >= threshold:
            state.reset()
            return record._replace(reason="conditioning changed")
        if accumulated < threshold:
            return record._replace(computed=False, reason="below the threshold")
        return record._replace(reason="the threshold is reached")

    def _store(self, call: Call, record: StepRecord, outcome: Outcome, watches: bool) -> None:
        """Store what later steps are made from."""
        state = call.state
        if not outcome.computed:
            state.note_skipped(call.inputs, watches, outcome.signal, record.accumulated or 0.0)
            return
        state.note_computed(call.inputs, self.model.generation(), outcome.signal)
        is_of_use = not (call.step.is_last or call.tick.is_again or outcome.problem is not None)
        state.residuals = outcome.residuals if is_of_use else None
