"""Which steps are skipped, if all that is said is how much may be lost? Those that the run itself shows to be easy.

A skipped step is left out whole: what the model would have returned is forecast from what it returned before. After
each computed step the error of the forecast in its place is known (`drift`), and sets how many steps are skipped next
(`pace`). So nothing needs to be known about the model, its sampler or its guidance, and nothing is measured at a
skipped step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .. import tree
from ..arch import find_anatomy
from ..errors import ModelError
from .config import AutoConfig
from .decision import Agree, Verdict, measure
from .drift import Rows, Seen, rows_of
from .inputs import Inputs, changes
from .model import About, CacheableModel, Forward, Instruction, Outcome, side_effect
from .pace import LEAST_KNOWN, Judgement
from .state import TeaCacheState
from .stats import StepRecord
from .step import AGAIN, Call, Plan, computed_alone, stray, times_on_device

_YOUNG = Verdict("compute", "first_steps")
_DUE = Verdict("compute", "the tolerance is reached")
_MOST_CHANGE = 0.5
"""Relative change of inputs other than sample, time and conditioning above which a step is computed."""


class WholeModel(CacheableModel):
    """A model whose forward is left out as a whole."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._stacks = find_anatomy(model).stacks
        self._checked: set[Any] = set()
        super().__init__(model)

    def _watched_modules(self) -> Iterator[torch.nn.Module]:
        if not self._stacks:
            return self._model.modules()
        return (part for stack in self._stacks for part in stack.modules(self._model)[0].modules())

    def about(self) -> About:
        return About("the errors of its own forecasts", next(reversed(self._refused.values()), None))

    def run(self, inputs: Inputs, wanted: Instruction, forward: Forward) -> Outcome:
        """Compute a step. The first of each form shows whether the model does anything else than return its output."""
        signature = inputs.signature
        if signature in self._refused or signature in self._checked:
            return computed_alone(inputs, forward)
        try:
            before = inputs.copied()
        except ModelError as error:
            return self._refuse(signature, str(error), forward(inputs.args, inputs.kwargs))
        buffers = [(buffer, tree.version(buffer)) for buffer in self._model.buffers()]
        output = forward(inputs.args, inputs.kwargs)
        problem = side_effect(inputs, before, output)
        if any(tree.version(buffer) != version for buffer, version in buffers):
            problem = "it keeps something from step to step in its buffers"
        if problem is not None:
            return self._refuse(signature, problem, output)
        self._checked.add(signature)
        return Outcome(output, computed=True)


class AutoSteps(NamedTuple):
    """Takes the steps of one denoiser within a tolerance."""

    config: AutoConfig
    model: CacheableModel
    agree: Agree | None
    whole_samples: Callable[[], list[torch.Tensor]]
    """Those of the running call, before ranks split them."""

    def judge(self, call: Call) -> Plan:
        """Whether the step is computed, and if not, what is returned in its place."""
        clock, state = call.clock, call.state
        if self.config.never_skips:
            return Plan(Verdict("compute", "settings"))
        if clock.is_again:
            return Plan(Verdict("compute", AGAIN))
        obstacle = self._obstacle(call)
        verdict = clock.verdict or self._lead(call)
        if verdict.action == "compute":
            return Plan(verdict)
        if obstacle is not None:
            return Plan(Verdict("compute", obstacle))
        outlook = state.history.combined(self._weights(call))
        if outlook is None:
            return Plan(Verdict("compute", "a step that its forecast needs is not stored"))
        return Plan(verdict, outlook)

    def _obstacle(self, call: Call) -> str | None:
        """Why this step of this branch cannot be skipped, if it cannot."""
        clock, state, inputs = call.clock, call.state, call.inputs
        is_new = state.generation != self.model.generation()
        why = None
        if len(state.history):
            why = "weights or adapters changed" if is_new else self._changed(call)
        if why is not None:
            state.reset()
            clock.pace.forget(call.context.branch)
            return why
        if clock.is_unclear:
            return "the sample is the same as in the previous call"
        obstacle = state.obstacle(inputs, asks=False) or self.model.problem(inputs)
        is_young = len(clock.pace.known(call.context.branch)) < LEAST_KNOWN
        return obstacle or (_YOUNG.reason if is_young else None)

    def _changed(self, call: Call) -> str | None:
        """What other inputs than sample and time have changed too much, if any have."""
        others = changes(call.inputs, call.state.watched)
        if not others:
            return None
        measured = measure(others[0], others[1:], (), self.agree, within_branch=True)
        largest = max(measured.signal, measured.others)
        if largest == math.inf:
            return "conditioning changed"
        return "another input changed" if largest >= _MOST_CHANGE else None

    def _lead(self, call: Call) -> Verdict:
        """The decision for all branches of a step."""
        clock, pace, branch = call.clock, call.clock.pace, call.context.branch
        pace.drift, times = None, times_on_device(call)
        reason = stray(call, torch.stack([time.max().float() for time in times]).tolist() if times else ())
        if reason is not None:
            return Verdict("compute", reason)
        if clock.is_last:
            return Verdict("compute", "last_steps")
        if pace.due is None:
            if len(pace.known(branch)) < LEAST_KNOWN:
                return _YOUNG
            samples, _ = self._rows(call)
            summed = None if self.agree is None else self.agree.within_branch
            judged = pace.judge(branch, samples, clock.step.total, summed)
            pace.set_gap(branch, self._agreed(judged, call), self.config.number)
        return Verdict("skip", "within the tolerance") if clock.index < (pace.due or 0) else _DUE

    def _rows(self, call: Call) -> tuple[Rows, Rows]:
        """The samples of a call and the last outputs. Ranks split samples before this, but some gather their outputs
        inside."""
        given, numbers = call.inputs.samples, _numbers(call.state)
        if self.agree is not None and [part.shape for part in given] != [part.shape for part in numbers]:
            given = self.whole_samples()
        return rows_of(given, numbers)

    def _agreed(self, judged: Judgement, call: Call) -> Judgement:
        """The same on all ranks, each of which may know one branch only: the first one's counts."""
        if self.agree is None:
            return judged
        drift, order = (torch.tensor([part, 1.0], device=call.inputs.device).unbind() for part in judged)
        measured = measure(drift, [order], (), self.agree)
        return Judgement(measured.signal, measured.others)

    def _weights(self, call: Call) -> list[float | torch.Tensor]:
        """The weights of computed steps in the one that is skipped, the newest first."""
        found = call.clock.pace.forecast(call.context.branch, call.clock.place, call.clock.index)
        if len(found) == 1:
            return list(found[0])
        length, device = max(map(len, found)), call.inputs.device
        padded = torch.tensor([weights + [0.0] * (length - len(weights)) for weights in found], device=device)
        rows = next(len(tensor) for tensor in _numbers(call.state))
        return list(padded.repeat(rows // len(found), 1).unbind(1))

    def take(self, call: Call, plan: Plan) -> tuple[StepRecord, Outcome]:
        """Compute the step, or leave it out."""
        is_computed, pace = plan.verdict.action == "compute", call.clock.pace
        record = StepRecord(call.clock.index, is_computed, plan.verdict.reason, pace.drift, pace.error)
        if not is_computed:
            return record, Outcome(None, computed=False)
        return record, self.model.run(call.inputs, Instruction("compute"), call.forward)

    def record(self, call: Call, plan: Plan, record: StepRecord, outcome: Outcome) -> tuple[StepRecord, Any]:
        """Store what later steps are made from; return the record and the output."""
        inputs, clock, state, branch = call.inputs, call.clock, call.state, call.context.branch
        if branch == clock.leader:
            clock.verdict = plan.verdict
        if not outcome.computed:
            assert plan.outlook is not None
            state.skipped(inputs, None, 0.0, others_changed=True)
            return record, state.forecast_output(plan.outlook)
        state.computed(inputs, None, self.model.generation())
        if clock.is_last or record.reason == AGAIN or outcome.problem is not None:
            state.history.clear()
            return record, outcome.output
        state.store_output(clock.place, clock.index, outcome.output)
        numbers = _numbers(state)
        if numbers:
            samples, rows = self._rows(call)
            by_image = len(rows) == 1 and all(tensor.shape[:1] == rows[0].shape[:1] for tensor in numbers)
            seen = Seen(clock.place, clock.index, rows)
            clock.pace.computed(branch, seen, samples, leads=branch == clock.leader, by_image=by_image)
        return record, outcome.output


def _numbers(state: TeaCacheState) -> list[torch.Tensor]:
    """What the last computed step returned that can be forecast."""
    known = state.history.newest if len(state.history) else ()
    return [tensor for tensor in known if tensor is not None and tensor.is_floating_point() and tensor.dim()]
