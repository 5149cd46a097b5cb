"""Which steps are skipped, if all that is said is how much may be lost? Those that the run itself shows to be easy.

A skipped step is left out whole: what the model would have returned is forecast from what it returned before. After
each computed step the error of the forecast in its place is known (`drift`), and sets how many steps are skipped next
(`pace`). So nothing needs to be known about the model, its sampler or its guidance, and nothing is measured at a
skipped step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from ..arch import find_anatomy
from ..core import nested
from ..core.errors import ModelError
from ..core.settings import read_tolerance
from ..trace.passes import Outlook
from .config import AutoConfig
from .decision import Agree, Verdict, measure
from .forecast import take_apart
from .inputs import Inputs, changes
from .misses import Skipped
from .model import About, CacheableModel, Forward, Instruction, Outcome, side_effect
from .pace import LEAST_KNOWN, Judged, numbers_in
from .rows import Tensors, chosen
from .some_rows import SomeRows
from .stats import WITHIN, StepRecord
from .step import AGAIN, Call, Plan, computed_alone, stray, times_on_device

_asked: ContextVar[float | None] = ContextVar("samovar_tolerance", default=None)
_YOUNG = Verdict("compute", "first_steps")
_DUE = Verdict("compute", "the tolerance is reached")
_MOST_CHANGE = 0.5
"""Relative change of inputs other than sample, time and conditioning above which a step is computed."""


@contextlib.contextmanager
def tolerating(tolerance: float | str | None) -> Iterator[None]:
    """Inside, this tolerance counts and not that of the settings; None changes nothing."""
    token = _asked.set(None if tolerance is None else read_tolerance(tolerance))
    try:
        yield
    finally:
        _asked.reset(token)


def asked_tolerance() -> float | None:
    """That of the running request, if it asked for one."""
    return _asked.get()


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
        buffers = [(buffer, nested.version(buffer)) for buffer in self._model.buffers()]
        output = forward(inputs.args, inputs.kwargs)
        problem = side_effect(inputs, before, output)
        if any(nested.version(buffer) != version for buffer, version in buffers):
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
    some_rows: SomeRows

    @property
    def tolerance(self) -> float:
        """That of the running request."""
        asked = asked_tolerance()
        return self.config.number if asked is None else asked

    def judge(self, call: Call) -> Plan:
        """Whether the step is computed, and what is returned for images that are not due."""
        clock, pace = call.clock, call.clock.pace
        if self.tolerance == 0:
            return Plan(Verdict("compute", "settings"))
        if clock.is_again:
            return Plan(Verdict("compute", AGAIN))
        obstacle = self._obstacle(call)
        verdict = clock.verdict or self._lead(call)
        if obstacle is not None and call.context.branch == clock.leader:
            pace.due = [True] * len(pace.images)
        if verdict.action == "compute" and all(pace.due):
            return Plan(verdict)
        history, outlook = call.state.rows, None
        if obstacle is None:
            outlook = history.combined(pace.forecast(history, Skipped(clock.index, clock.place, clock.length)))
            obstacle = None if outlook is not None else "a step that its forecast needs is not stored"
        return Plan(verdict, outlook) if obstacle is None else Plan(Verdict("compute", obstacle))

    def _obstacle(self, call: Call) -> str | None:
        """Why this step of this branch cannot be skipped, if it cannot."""
        clock, state, inputs = call.clock, call.state, call.inputs
        is_new, why = state.generation != self.model.generation(), None
        if len(state.rows):
            why = "weights or adapters changed" if is_new else self._changed(call)
        if why is not None:
            state.reset()
            clock.pace.forget(call.context.branch)
            return why
        if clock.is_unclear:
            return "the sample is the same as in the previous call"
        obstacle = state.obstacle(inputs, asks=False) or self.model.problem(inputs)
        return obstacle or (_YOUNG.reason if len(state.rows) < LEAST_KNOWN else None)

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
        clock, pace, history = call.clock, call.clock.pace, call.state.rows
        pace.due, pace.drift = [True] * len(pace.images), None
        times = times_on_device(call)
        largest = torch.stack([time.max().float() for time in times]) if times else None
        is_known, judged = len(history) >= LEAST_KNOWN and not clock.is_last, None
        if is_known and pace.is_open:
            summed = None if self.agree is None else self.agree.within_branch
            judged = pace.judge(history, self._samples(call), clock.step.total, summed)
        # Read behind that, so that the device is waited for once.
        reason = stray(call, () if largest is None else largest.tolist())
        if reason is not None:
            return Verdict("compute", reason)
        if not is_known:
            return Verdict("compute", "last_steps") if clock.is_last else _YOUNG
        if judged is not None:
            pace.set_gaps(history, self._agreed(judged, call), self.tolerance, clock.step.total)
        pace.due = [clock.index >= image.due for image in pace.images]
        return _DUE if any(pace.due) else Verdict("skip", WITHIN)

    def _samples(self, call: Call) -> list[torch.Tensor]:
        """The samples of a call. Ranks split them before this, but some gather their outputs inside."""
        given = call.inputs.samples
        if self.agree is None or not len(call.state.rows):
            return given
        numbers = numbers_in(call.state.rows.newest)
        return given if [one.shape for one in given] == [one.shape for one in numbers] else self.whole_samples()

    def _agreed(self, judged: list[Judged | None], call: Call) -> list[Judged | None]:
        """On several ranks, each of which may know one branch only, all images go the way of the first rank's worst."""
        if self.agree is None:
            return judged
        worst = max(found for found in judged if found is not None)
        drift, order = (torch.tensor([part, 1.0], device=call.inputs.device).unbind() for part in worst)
        measured = measure(drift, [order], (), self.agree)
        return [Judged(measured.signal, measured.others)] * len(judged)

    def take(self, call: Call, plan: Plan) -> tuple[StepRecord, Outcome]:
        """Compute the step, or leave it out."""
        is_computed, images = plan.verdict.action == "compute", call.clock.pace.images
        errors = tuple(image.error for image in images)
        record = StepRecord(
            call.clock.index, is_computed, plan.verdict.reason, call.clock.pace.drift, max(errors, default=0.0),
            errors=errors if len(errors) > 1 else (),
        )  # fmt: skip
        if not is_computed:
            return record, Outcome(None, computed=False)
        some = self._some(call, plan)
        if some is not None and call.state.form is not None:
            return record, Outcome(call.state.form.rebuild(Outlook([1.0], [some])), computed=True)
        return record, self.model.run(call.inputs, Instruction("compute"), call.forward)

    def _some(self, call: Call, plan: Plan) -> Tensors | None:
        """What a step gives of which some images are not due, if it can be computed for the others alone."""
        if plan.outlook is None or self.agree is not None:  # Ranks compute the same images.
            return None
        pace, history = call.clock.pace, call.state.rows
        return self.some_rows.compute(call.inputs, call.forward, history, plan.outlook, pace.due)

    def record(self, call: Call, plan: Plan, record: StepRecord, outcome: Outcome) -> tuple[StepRecord, Any]:
        """Store what later steps are made from; return the record and the output."""
        inputs, clock, state, pace = call.inputs, call.clock, call.state, call.clock.pace
        leads = call.context.branch == clock.leader
        if leads:
            clock.verdict = plan.verdict
        if not outcome.computed:
            assert plan.outlook is not None
            state.skipped(inputs, None, 0.0, others_changed=True)
            return record, state.forecast_output(plan.outlook)
        state.computed(inputs, None, self.model.generation())
        if record.reason == AGAIN or outcome.problem is not None:
            state.rows.clear()
            return record, outcome.output
        state.form, found = take_apart(outcome.output)
        history, numbers = state.rows, numbers_in(found or ())
        if leads and numbers and pace.begins(len(history)):
            pace.begin(self._samples(call), found or ())
        count = len(pace.images)
        if found is None or not numbers or not count or any(count > 1 and len(rows) % count for rows in numbers):
            history.clear()
            return record, outcome.output
        due = pace.due if plan.outlook is not None else [True] * count
        history.push(clock.place, clock.index, found, due)
        samples = self._samples(call) if leads else None
        weights = pace.computed(call.context.branch, history, samples, due, clock.length)
        own = None if all(due) and max(map(len, weights)) == 1 else history.combined(weights)
        if clock.is_last:
            history.clear()
        if own is None:
            return record, outcome.output
        if plan.outlook is None or all(due):
            return record, state.form.rebuild(own)
        each = range(len(found))
        mixed = chosen(due, [own.value(index) for index in each], [plan.outlook.value(index) for index in each])
        return record._replace(images=tuple(due)), state.form.rebuild(Outlook([1.0], [mixed]))
