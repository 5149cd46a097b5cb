"""The cache `auto`: error-controlled skipping of whole forwards, on a real model.

`ErrorControl` decides; here it gets the errors of its forecasts, and its weights become outputs. The worst image of a
batch decides for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar

import torch

from ..core.settings import read_tolerance
from .call import AGAIN, Call, Verdict
from .clock import Step
from .config import AutoConfig
from .error_control import USUAL_STEPS, ErrorControl
from .forecast_error import Rows, as_rows, in_common, worst_drifts
from .history import NOTHING_STORED, TeaCacheState
from .signal import Agree, measure
from .stats import WITHIN, StepRecord
from .whole import Plan, WholeModel, WholeSteps

_asked: ContextVar[float | None] = ContextVar("samovar_tolerance", default=None)
_DUE = "the tolerance is reached"
_TIGHT = "skipping one step would exceed the tolerance"
_JUMPED = "the sample was changed between steps"
_MIN_STEPS = 8
"""Shorter runs are computed whole."""
_MAX_CHANGE = 0.5
"""Relative change of inputs other than sample, time and conditioning above which a step is computed."""
_JUMP = 3.0
"""A sample that moves this many times as far as in the last steps was changed by somebody."""


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
        self._usual, self._whole_samples = config.number, whole_samples

    @property
    def _tolerance(self) -> float:
        """That of the running request."""
        asked = asked_tolerance()
        return self._usual if asked is None else asked

    def _never(self, call: Call) -> str | None:
        if self._tolerance == 0:
            return "settings"
        length = call.step.run_length
        return "min_steps" if length is not None and length < _MIN_STEPS else None

    def _plan(self, call: Call, obstacle: str | None) -> Plan:
        run = call.run
        if call.is_again:
            return Plan(AGAIN)
        run.verdict = run.verdict or self._lead(call, obstacle)
        given, is_skipped = run.control.given, run.verdict.action == "skip"
        return Plan(run.verdict.reason, is_skipped, given if is_skipped or len(given) > 1 else {})

    def _needed(self, call: Call) -> Collection[int]:
        return {known.index for known in call.run.control.computed}

    def _record(self, call: Call, is_computed: bool, reason: str) -> StepRecord:
        control = call.run.control
        return StepRecord(call.step.index, is_computed, reason, control.drift, control.error)

    # ------------------------------------------------------------------------------------------ decide

    def _lead(self, call: Call, obstacle: str | None) -> Verdict:
        """The decision for all branches of a step."""
        control, outputs = call.run.control, call.state.outputs
        if any(known.index not in outputs for known in control.computed):
            control.restart()
        jumped = self._look(call)
        reason = obstacle if obstacle not in (None, NOTHING_STORED) else jumped or _due(control, call.step)
        if reason is not None:
            control.begin_computed(call.step)
            return Verdict("compute", reason)
        control.begin_skipped(call.step)
        return Verdict("skip", WITHIN)

    def _look(self, call: Call) -> str | None:
        """Judge the last computed step, now that its effect is seen; why nothing that is known counts any more, if so.
        This waits for the device at most once."""
        run, control, step = call.run, call.run.control, call.step
        newest = max(call.state.outputs, default=None)
        known = [] if newest is None else call.state.outputs[newest].numbers
        samples = self._samples(call, known)
        run.path.move(as_rows(in_common(samples, known or samples), call.inputs.lists_samples))
        control.drift, jump, ratio = None, None, run.path.ratio
        if control.is_young or step.is_last:
            return None
        if control.has_computed:
            jump = self._judge(call, samples)
        if jump is None and ratio is not None and step.index < control.next_computed:
            jump = measure([ratio, torch.ones_like(ratio)], (), self.agree).signal
        if jump is None or jump <= _JUMP:
            return None
        control.restart()
        return _JUMPED

    def _judge(self, call: Call, samples: list[torch.Tensor]) -> float | None:
        """Set the next gap by the errors of forecasts in place of the last computed step. The ratio of ways, if it was
        read."""
        control, path, num_steps = call.run.control, call.run.path, call.step.total or USUAL_STEPS
        indices, lists = [step.index for step in control.computed], call.inputs.lists_samples

        def rows_of(state: TeaCacheState, index: int) -> Rows:
            tensors = state.outputs[index].numbers
            return as_rows(in_common(tensors, samples) or tensors, lists)

        known = [of for of in call.run.branches.values() if all(index in of.outputs for index in indices)]
        branches = [[rows_of(state, index) for index in indices] for state in known]
        control.copies = control.copies or path.num_copies()
        gram = path.products(branches, control.copies)
        reads = [gram.flatten()] if self.agree is None else [self.agree.within_branch(gram.flatten())]
        if self.agree is None and path.ratio is not None:
            reads.append(path.ratio.reshape(1).to(gram.device))
        numbers = torch.cat(reads).cpu().numpy()
        response = None if path.is_seen else 1 / num_steps
        products = numbers[: gram.numel()].reshape(gram.shape)
        drift, order = control.choose(worst_drifts(products, control, control.rivals(), response))
        if self.agree is not None:  # Each rank may know one branch only: all go the way of the first rank.
            pairs = [torch.tensor([value, 1.0], device=call.inputs.device).unbind() for value in (drift, order)]
            drift, order = measure(pairs[0], pairs[1:], self.agree)
        control.set_gap(drift, order, self._tolerance, num_steps)
        return float(numbers[-1]) if len(reads) > 1 else None

    def _samples(self, call: Call, known: list[torch.Tensor]) -> list[torch.Tensor]:
        """The samples of a call. Ranks split them before this, but some gather their outputs inside."""
        given = call.inputs.samples
        is_split = self.agree is not None and known and [one.shape for one in given] != [one.shape for one in known]
        return self._whole_samples() if is_split else given


def _due(control: ErrorControl, step: Step) -> str | None:
    """Why a step is computed by the counts, if it is."""
    if step.is_last or control.is_young:
        return "last_steps" if step.is_last else "first_steps"
    if step.index < control.next_computed:
        return None
    return _DUE if control.gap > 1 else _TIGHT
