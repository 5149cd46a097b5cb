"""The cache `auto`: error-controlled skipping of whole forwards, on a real model.

`ErrorControl` decides; here it gets the errors of its forecasts, and its weights become outputs. The worst image of a
batch decides for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from ..core.settings import read_tolerance
from .call import AGAIN, Call, Verdict
from .config import AutoConfig
from .error_control import USUAL_STEPS, ErrorControl
from .forecast_error import Rows, num_copies, paired_rows, products, worst_drifts
from .outputs import combined, numbers_in
from .signal import Agree, measure
from .state import NOTHING_STORED, TeaCacheState
from .stats import WITHIN, StepRecord
from .whole import NOT_STORED, WholeModel, WholeSteps

_asked: ContextVar[float | None] = ContextVar("samovar_tolerance", default=None)
_DUE = "the tolerance is reached"
_TIGHT = "skipping one step would exceed the tolerance"
_JUMPED = "the sample was changed between steps"
_MIN_STEPS = 8
"""Shorter runs are computed whole."""
_MAX_CHANGE = 0.5
"""Relative change of inputs other than sample, time and conditioning above which a step is computed."""
_JUMP = 3.0
"""So many times as far as in the last steps a sample only goes if somebody has changed it."""


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


class AutoSteps(WholeSteps):
    """Takes the steps of one denoiser within a tolerance."""

    def __init__(
        self,
        config: AutoConfig,
        model: WholeModel,
        agree: Agree | None,
        whole_samples: Callable[[], list[torch.Tensor]],
    ) -> None:
        """`whole_samples`: those of the running call, before ranks split them."""
        super().__init__(model, agree, _MAX_CHANGE)
        self._tolerance, self._whole_samples = config.number, whole_samples

    @property
    def tolerance(self) -> float:
        """That of the running request."""
        asked = asked_tolerance()
        return self._tolerance if asked is None else asked

    def take(self, call: Call) -> tuple[StepRecord, object]:
        run, step = call.run, call.step
        if self.tolerance == 0 or (step.run_length is not None and step.run_length < _MIN_STEPS):
            return StepRecord(step.index, True, "settings" if self.tolerance == 0 else "min_steps"), call.compute()
        if call.tick.is_again:
            return self._record(call, True, AGAIN), self.compute(call, None)
        obstacle = self.obstacle(call)
        leads = run.verdict is None
        verdict = run.verdict or run.decide(self._lead(call, obstacle))
        if verdict.action == "skip" and obstacle is None:
            output = self.forecast(call, run.control.given)
            if output is not None:
                return self._record(call, False, verdict.reason), output[0]
            obstacle = NOT_STORED
        reason = verdict.reason if verdict.action == "compute" else obstacle or ""
        return self._record(call, True, reason), self._computed(call, leads, verdict.action == "compute")

    def _record(self, call: Call, is_computed: bool, reason: str) -> StepRecord:
        control = call.run.control
        return StepRecord(call.step.index, is_computed, reason, control.drift, control.error)

    # ------------------------------------------------------------------------------------------ decide

    def _lead(self, call: Call, obstacle: str | None) -> Verdict:
        """The decision for all branches of a step."""
        run, step = call.run, call.step
        control, outputs = run.control, call.state.outputs
        if any(known.index not in outputs for known in control.computed):
            run.restart()
        control.drift = None
        reason = self._look(call)
        if obstacle not in (None, NOTHING_STORED):
            reason = obstacle
        if reason is None:
            reason = self._due(control, call)
        if reason is None:
            control.begin_skipped(step)
            return Verdict("skip", WITHIN)
        control.begin_computed(step)
        return Verdict("compute", reason)

    @staticmethod
    def _due(control: ErrorControl, call: Call) -> str | None:
        """Why the running step is computed by the counts, if it is."""
        if call.step.is_last or control.is_young:
            return "last_steps" if call.step.is_last else "first_steps"
        if call.step.index < control.next_computed:
            return None
        return _DUE if control.gap > 1 else _TIGHT

    def _look(self, call: Call) -> str | None:
        """Judge the last computed step, now that its effect is seen; why nothing that is known counts any more, if so.
        This waits for the device at most once."""
        run, control, step = call.run, call.run.control, call.step
        samples = self._samples(call)
        before, run.before = run.before, None
        ratio, jump = run.path.move(samples), None
        if control.is_young or step.is_last:
            return None
        if before is not None:
            jump = self._judge(call, samples, before, ratio)
        if jump is None and ratio is not None and step.index < control.next_computed:
            jump = measure([ratio, torch.ones_like(ratio)], (), self.agree).signal
        if jump is None or jump <= _JUMP:
            return None
        run.restart()
        return _JUMPED

    def _judge(self, call: Call, samples: list[torch.Tensor], before: Rows, ratio: torch.Tensor | None) -> float | None:
        """Set the next gap by the errors of forecasts in place of the last computed step; the ratio, if it was read."""
        control, num_steps = call.run.control, call.step.total or USUAL_STEPS
        gram, sees_way = self._products(call, samples, before)
        reads = [gram.flatten()] if self.agree is None else [self.agree.within_branch(gram.flatten())]
        if self.agree is None and ratio is not None:
            reads.append(ratio.reshape(1).to(gram.device))
        numbers = torch.cat(reads).cpu().numpy()
        curves, forecasts = zip(*control.rivals(), strict=True)
        drifts = worst_drifts(
            numbers[: gram.numel()].reshape(gram.shape),
            [step.index for step in control.computed],
            control.given,
            control.given_before,
            forecasts,
            None if sees_way else 1 / num_steps,
        )
        drift, order = self._agreed(*control.choose(curves, drifts), call)
        control.set_gap(drift, order, self.tolerance, num_steps)
        return float(numbers[-1]) if len(reads) > 1 else None

    @staticmethod
    def _products(call: Call, samples: list[torch.Tensor], before: Rows) -> tuple[torch.Tensor, bool]:
        """Scalar products of the sample, its way and the outputs; and whether its way was seen."""
        run, lists = call.run, call.inputs.lists_samples
        indices = [step.index for step in run.control.computed]
        now, newest = paired_rows(samples, _numbers(call.state, indices[0]), lists)
        sees_way = [one.shape for one in now] == [other.shape for other in before] != []
        if not sees_way:
            before, now = newest, tuple(2 * rows for rows in newest)
        if run.copies is None:
            run.copies = num_copies(before) if sees_way else 1
        known = [state for state in run.branches.values() if all(index in state.outputs for index in indices)]
        branches = [[paired_rows(samples, _numbers(of, index), lists)[1] for index in indices] for of in known]
        alike = [of for of in branches if [rows.shape for rows in of[0]] == [rows.shape for rows in newest]]
        return products(before, now, alike, run.copies), sees_way

    def _agreed(self, drift: float, order: float, call: Call) -> tuple[float, float]:
        """On several ranks, each of which may know one branch only, all go the way of the first rank."""
        if self.agree is None:
            return drift, order
        pairs = [torch.tensor([value, 1.0], device=call.inputs.device).unbind() for value in (drift, order)]
        return measure(pairs[0], pairs[1:], self.agree)

    def _samples(self, call: Call) -> list[torch.Tensor]:
        """The samples of a call. Ranks split them before this, but some gather their outputs inside."""
        given, newest = call.inputs.samples, max(call.state.outputs, default=None)
        if self.agree is None or newest is None:
            return given
        shapes = [one.shape for one in _numbers(call.state, newest)]
        return given if [one.shape for one in given] == shapes else self._whole_samples()

    # ------------------------------------------------------------------------------------------ compute

    def _computed(self, call: Call, leads: bool, is_planned: bool) -> object:
        """The output of a computed step, less what the forecasts before it have missed."""
        run, state, control = call.run, call.state, call.run.control
        output = self.compute(call, {known.index for known in control.computed})
        if leads and call.step.index in state.outputs:
            numbers = _numbers(state, call.step.index)
            run.before, _ = paired_rows(self._samples(call), numbers, call.inputs.lists_samples)
        tensors = combined(state.outputs, control.given) if is_planned and len(control.given) > 1 else None
        if call.step.is_last:
            state.outputs.clear()
        return output if tensors is None or state.form is None else state.form.rebuild(tensors)


def _numbers(state: TeaCacheState, index: int) -> list[torch.Tensor]:
    return numbers_in(state.outputs[index].tensors)
