"""How is one step of one branch taken: computed or skipped, and with what?

judge      may it be skipped, before looking at it?
take       compute it, skip it, or ask its signal
record     store the result, from which later steps are made
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..hooks import CallContext
from ..trace.passes import Outlook
from .config import OutlierSchedule, TeaCacheConfig
from .decision import Agree, Rescale, Signal, Verdict, judge, measure
from .forecast import find_outliers
from .inputs import Inputs, Pair, changes, is_on_host
from .model import CacheableModel, Forward, Instruction, Outcome
from .state import Clock, TeaCacheState
from .stats import StepRecord

NEW_RUN = "a new run"
"""Why a step is computed whose timestep, once read from the device, has gone backwards: a new run has begun."""
AGAIN = "this branch was called twice at the same step"
"""The reason of a call that may not be a step; nothing of it is stored."""
NEVER = ("settings", "min_steps")
"""Reasons for which no step of a run is ever skipped."""


class Call(NamedTuple):
    """One call of the denoiser, with everything that belongs to it."""

    forward: Forward
    inputs: Inputs
    context: CallContext
    clock: Clock
    state: TeaCacheState


class Plan(NamedTuple):
    """How a step is to be taken."""

    verdict: Verdict
    outlook: Outlook | None = None
    others: tuple[Pair, ...] = ()
    """How much inputs other than sample and time have changed."""


class Steps(NamedTuple):
    """Takes the steps of one denoiser."""

    config: TeaCacheConfig
    model: CacheableModel
    rescale: Rescale
    agree: Agree | None

    def judge(self, call: Call) -> Plan:
        """What can be said before looking at the step: computed, skipped, or left to its signal."""
        clock, state, inputs = call.clock, call.state, call.inputs
        decided = None if self.config.is_by_branch else clock.verdict
        config = clock.plan or self.config
        verdict = decided or judge(config, clock.step, state.skipped_in_a_row, call.context.branch)
        if verdict.reason in NEVER:
            return Plan(verdict)
        if clock.is_again:
            return self._computes(AGAIN, call, verdict)
        if len(state.history) and state.generation != self.model.generation():
            state.reset()
            return self._computes("weights or adapters changed", call, verdict)
        others = tuple(changes(inputs, state.watched)) if len(state.history) else ()
        has_changed = verdict.action != "ask" and self._have_changed(others)
        if has_changed:
            state.reset()
        if verdict.action == "compute":
            return Plan(verdict, others=others)
        outlook = None
        obstacle = "conditioning changed" if has_changed else state.obstacle(inputs, asks=verdict.action == "ask")
        if obstacle is None and clock.is_unclear:
            obstacle = "the sample is the same as in the previous call"
        obstacle = obstacle or self._problem(inputs)
        if obstacle is None:
            outlook = self._outlook(call)
            obstacle = None if outlook is not None else "a step that its forecast needs is not stored"
        return Plan(verdict, outlook, others) if obstacle is None else self._computes(obstacle, call, verdict)

    def _computes(self, why: str, call: Call, verdict: Verdict) -> Plan:
        """Compute a step that might have been skipped. Other ranks may ask, and wait for this one."""
        if verdict.action == "ask" and self.agree is not None:
            measure(None, (), (), self.agree, call.inputs.device)
        return Plan(Verdict("compute", why))

    def _have_changed(self, others: tuple[Pair, ...]) -> bool:
        """Whether a branch's inputs changed too much for its history to go on, where no signal will be asked."""
        if not others:
            return False
        # The leader has decided: this concerns the branch's own inputs, on any number of ranks.
        measured = measure(others[0], others[1:], (), self.agree, within_branch=True)
        return max(measured.signal, measured.others) >= self.config.rel_l1_thresh

    def _problem(self, inputs: Inputs) -> str | None:
        """Why the model's blocks cannot be skipped, where they matter."""
        is_ahead = self.config.schedule is not None and self.config.forecast_of == "output"
        return None if is_ahead else self.model.problem(inputs)

    def _outlook(self, call: Call) -> Outlook | None:
        """What the step would give if it were skipped, if that is known."""
        if self.config.forecast != "fitted":
            return call.state.history.forecast(call.clock.place)
        weights = (call.clock.plan or self.config).weights_for(call.context.branch, call.clock.index)
        return None if weights is None else call.state.history.weighted(weights)

    def take(self, call: Call, plan: Plan) -> tuple[StepRecord, Outcome]:
        """Compute the step, or skip it."""
        inputs, clock, verdict = call.inputs, call.clock, plan.verdict
        of_output, judges = self.config.forecast_of == "output", self.config.schedule is None
        record = StepRecord(clock.index, verdict.action != "skip", verdict.reason)

        def decide(signal: Signal) -> bool:
            nonlocal record
            if verdict.action == "ask":
                record = self._decide(record, signal, call, plan)
            return not record.computed

        if of_output and verdict.action == "skip":
            return record, Outcome(None, computed=False)
        # On another rank a branch that follows here may lead: it needs its signal of the step before.
        may_lead = clock.verdict is None or (self.agree is not None and verdict.action == "compute")
        if of_output and not (judges and may_lead):  # The blocks do not matter.
            return record, computed_alone(inputs, call.forward)
        outlook = None if of_output else plan.outlook
        reads = decide if judges and may_lead else None
        before = call.state.signal if verdict.action == "ask" else None
        is_doubtful = before is not None and call.state.is_near(self.config.rel_l1_thresh)
        wanted = Instruction(verdict.action, outlook, reads, not of_output, call.state.early, before, is_doubtful)
        outcome = self.model.run(inputs, wanted, call.forward)
        if outcome.computed and not record.computed:
            record = record._replace(computed=True, reason=outcome.problem or "the blocks cannot be skipped")
        return record, outcome

    def _decide(self, record: StepRecord, signal: Signal, call: Call, plan: Plan) -> StepRecord:
        """The record of a step that was left to its signal."""
        state, threshold = call.state, self.config.rel_l1_thresh
        assert state.signal is not None
        pair = state.signal.change(signal)
        measured = measure(pair, plan.others, times_on_device(call), self.agree, signal.value.device)
        if pair is None:
            state.reset()
            return record._replace(computed=True, reason="weights or adapters changed")
        increase = max(self.rescale(measured.signal), measured.others)
        accumulated = state.accumulated_rel_l1_distance + increase
        record = record._replace(distance=measured.signal, accumulated=accumulated)
        if measured.others >= threshold:
            state.reset()
            return record._replace(computed=True, reason="conditioning changed")
        reason = stray(call, measured.times)
        if reason is not None:
            return record._replace(computed=True, reason=reason)
        if accumulated < threshold:
            return record._replace(computed=False, reason="below the threshold")
        return record._replace(computed=True, reason="the threshold is reached")

    def record(self, call: Call, plan: Plan, record: StepRecord, outcome: Outcome) -> tuple[StepRecord, Any]:
        """Store what later steps are made from; return the record and the output."""
        inputs, clock, state = call.inputs, call.clock, call.state
        if call.context.branch == clock.leader:
            clock.verdict = Verdict("compute" if record.computed else "skip", record.reason)
        if not outcome.computed:
            judged = outcome.signal is not None
            state.skipped(inputs, outcome.signal, record.accumulated or 0.0, bool(plan.others) and judged)
            if self.config.forecast_of == "residual":
                return record, outcome.output
            assert plan.outlook is not None
            return record, state.forecast_output(plan.outlook)
        record = self._look_for_outliers(call, outcome.output, record)
        state.computed(inputs, outcome.signal, self.model.generation())
        # Fitted weights are for the scheduled steps: another one would push one of them out.
        if self.config.forecast != "fitted" or plan.verdict.reason == "schedule":
            if clock.is_last or clock.is_again or record.reason == AGAIN or outcome.problem is not None:
                state.history.clear()
            elif self.config.forecast_of == "output":
                state.store_output(clock.place, clock.index, outcome.output)
                state.early = outcome.parts
            else:
                state.store(clock.place, clock.index, outcome.parts)
        return record, outcome.output

    def _look_for_outliers(self, call: Call, output: Any, record: StepRecord) -> StepRecord:
        """At the step that shows outliers: whether the run goes on with their schedule."""
        known = self.config.outliers
        if not isinstance(known, OutlierSchedule) or (known.branch, known.step) != (call.context.branch, record.step):
            return record
        found = find_outliers(call.state.history.weighted(known.weights), output, known.error)
        if any(found):
            call.clock.plan = self.config.outlier_plan
        return record._replace(outliers=found)


def times_on_device(call: Call) -> list[torch.Tensor]:
    """The times of this call of a branch and of its last one, where nothing else tells the step."""
    now, before = call.inputs.time, call.clock.last_time
    if call.clock.is_scheduled or not isinstance(now, torch.Tensor) or is_on_host(now):
        return []
    return [now, before] if isinstance(before, torch.Tensor) and before.numel() else [now]


def stray(call: Call, times: Sequence[float]) -> str | None:
    """Why a step is not one of this run, by times read from the device: this one's, and the last."""
    if not times:
        return None
    now, *before = times
    if call.clock.turns_back(now):
        return NEW_RUN
    if now in before:
        call.state.reset()
        return AGAIN
    return None


def computed_alone(inputs: Inputs, forward: Forward) -> Outcome:
    """Compute a step whose blocks are not watched. If it writes into its inputs, it cannot be skipped."""
    before = [tensor._version for tensor in inputs.tensors if not tensor.is_inference()]
    output = forward(inputs.args, inputs.kwargs)
    writes = before != [tensor._version for tensor in inputs.tensors if not tensor.is_inference()]
    return Outcome(output, computed=True, problem="the model writes into its inputs" if writes else None)
