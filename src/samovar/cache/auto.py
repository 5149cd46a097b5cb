"""The cache `auto`: error-controlled skipping of whole forwards, on a real model.

`ErrorControl` decides; here it gets the samples and outputs of a step, and its weights become outputs. The worst image
of a batch decides for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar

import torch

from ..core.settings import read_tolerance
from .config import AutoConfig
from .error_control import MIN_COMPUTED, USUAL_STEPS, ErrorControl, rows_of
from .run import NOTHING_STORED, Call, Verdict
from .signal import Agree, measure
from .stats import WITHIN
from .steps import AGAIN
from .whole import Plan, WholeSteps

_asked: ContextVar[float | None] = ContextVar("samovar_tolerance", default=None)
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
        model: torch.nn.Module,
        agree: Agree | None,
        whole_samples: Callable[[], list[torch.Tensor]],
    ) -> None:
        """`whole_samples`: those of the running call, before ranks split them."""
        super().__init__(model, agree, _MAX_CHANGE)
        self._usual, self._whole_samples = config.number, whole_samples

    def _plan(self, call: Call) -> Plan:
        run, step = call.run, call.step
        control = run.control
        if control is None:
            asked = _asked.get()
            tolerance = self._usual if asked is None else asked
            control = run.control = ErrorControl(tolerance, step.total or USUAL_STEPS)
        if control.tolerance == 0:
            return Plan("settings")
        if step.run_length is not None and step.run_length < _MIN_STEPS:
            return Plan("min_steps")
        obstacle = self._obstacle(call)
        if obstacle == AGAIN:
            return Plan(AGAIN)
        if run.verdict is None:  # The first branch decides for those called after it in this step.
            reason = self._decide(call, control, obstacle)
            run.verdict = Verdict("skip", WITHIN) if reason is None else Verdict("compute", reason)
        is_skipped, given, reason = run.verdict.action == "skip", control.given, run.verdict.reason
        if is_skipped and obstacle is not None:
            return Plan(obstacle)
        return Plan(reason, is_skipped, given if is_skipped or len(given) > 1 else {})

    def _needed(self, call: Call) -> Collection[int]:
        control = call.run.control
        return () if control is None else {known.index for known in control.computed}

    # ------------------------------------------------------------------------------------------ decide

    def _decide(self, call: Call, control: ErrorControl, obstacle: str | None) -> str | None:
        """Why a step is computed for all branches, if it is."""
        jumped, why = self._look(call, control), obstacle
        if obstacle in (None, NOTHING_STORED):
            why = "the sample was changed between steps" if jumped else control.due(call.step)
        if why is None:
            control.begin_skipped(call.step)
        else:
            control.begin_computed(call.step)
        return why

    def _look(self, call: Call, control: ErrorControl) -> bool:
        """Judge the last computed step, now that its effect is seen; whether nothing known counts any more. This
        waits for the device at most once."""
        step, outputs, path, samples = call.step, call.state.outputs, control.path, call.samples
        if not outputs.keys() >= {known.index for known in control.computed}:
            control.restart()
        stored = outputs[max(outputs)].numbers if outputs else []
        if self.agree is not None and stored and [one.shape for one in samples] != [one.shape for one in stored]:
            samples = self._whole_samples()  # Ranks split them before this, but some gather their outputs inside.
        path.move(rows_of(samples, stored or samples, call.lists_samples))
        control.drift, ratio, jump = None, path.ratio, None
        if step.is_last or len(control.computed) < MIN_COMPUTED:
            return False
        if not control.skipped:
            jump = self._judge(call, control, samples)
        if jump is None and ratio is not None and step.index < control.next_computed:
            agree = self.agree
            jump = float(ratio) if agree is None else measure([ratio, torch.ones_like(ratio)], (), agree).signal
        if jump is None or jump <= _JUMP:
            return False
        control.restart()
        return True

    def _judge(self, call: Call, control: ErrorControl, samples: list[torch.Tensor]) -> float | None:
        """Set the next gap by the errors of forecasts in place of the last computed step. The ratio of ways, if it was
        read."""
        path, are_images, branches = control.path, call.lists_samples, []
        for state in call.run.branches.values():
            found = [state.outputs.get(known.index) for known in control.computed]
            tensors = [output.numbers for output in found if output is not None]
            if len(tensors) == len(found):
                branches.append([rows_of(t, samples, are_images) or rows_of(t, t, are_images) for t in tensors])
        control.copies = control.copies or path.num_copies()
        gram = path.products(branches, control.copies)
        reads = [gram.flatten()] if self.agree is None else [self.agree.within_branch(gram.flatten())]
        if self.agree is None and path.ratio is not None:
            reads.append(path.ratio.reshape(1).to(gram.device))
        numbers = torch.cat(reads).cpu().numpy()
        drift, order = control.judge(numbers[: gram.numel()].reshape(gram.shape))
        if self.agree is not None:  # Each rank may know one branch only: all go the way of the first rank.
            pairs = [torch.tensor([value, 1.0], device=call.device).unbind() for value in (drift, order)]
            drift, order = measure(pairs[0], pairs[1:], self.agree)
        control.set_gap(drift, order)
        return float(numbers[-1]) if len(reads) > 1 else None
