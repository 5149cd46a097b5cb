"""How is a step of a model taken whose forwards are replayed? In two parts, with the decision between them.

A decision needs the host, and a replay does not wait for it. So a step that is left to its signal is first skipped,
which gives the signal as well, and computed only if the signal says so. What is replayed has the gates' answers in it.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from ..hooks import Recorder, Steady
from ..trace.forward import Given, Tensors
from ..trace.passes import Mode, Outlook, StepPass
from .decision import Signal
from .inputs import Inputs, size
from .model import BlockModel, Forward, Instruction, Outcome, TracedForm


class _Taken(NamedTuple):
    """What a forward gave, in a form that can be replayed."""

    output: Any
    parts: Tensors | None
    signal: torch.Tensor | None
    change: torch.Tensor | None
    """How much it differs from the signal that was given, and how large that was."""
    lost: str | None


class _Step(NamedTuple):
    """A step that is taken."""

    recorder: Recorder
    reads: bool
    """Whether its signal is read."""
    form: TracedForm
    inputs: Inputs
    wanted: Instruction
    forward: Forward

    def name(self, mode: Mode) -> tuple[Any, ...]:
        """Of what is replayed."""
        return mode, self.form.token, self.reads, self.wanted.keeps

    @property
    def given(self) -> tuple[Any, ...]:
        """What a computed step is given."""
        return self.inputs.args, self.inputs.kwargs, (), None


class ReplayedBlocks(BlockModel):
    """A model that is built of blocks, whose forwards are replayed while there is a recorder."""

    def forget(self) -> None:
        if self.recorder is None:  # What was recorded reads the shadows.
            super().forget()

    def _next(self, form: TracedForm, inputs: Inputs, wanted: Instruction, forward: Forward) -> Outcome:
        recorder = self.recorder
        run = super()._next
        reads = form.reader is not None and _is_settled(form)  # Also where nobody asks: one recording serves both.
        if recorder is None or (wanted.decide is not None and not (reads or form.is_blind)):
            return run(form, inputs, wanted, forward)
        step = _Step(recorder, reads or wanted.decide is not None, form, inputs, wanted, forward)
        if wanted.mode == "compute":
            return self._computed(step, None)
        stored, name = _stored(form, wanted), step.name("skip")
        if stored is None or recorder.refuses(name):
            return run(form, inputs, wanted, forward)
        before = None if wanted.before is None else wanted.before.value
        skipped = self._taken(step, name, (inputs.args, inputs.kwargs, Steady(stored), before))
        if skipped.lost is not None:
            return run(form, inputs, wanted, forward)
        if wanted.decide is None:
            return Outcome(skipped.output, False)
        signal = _signal(form, skipped, wanted)
        # What can be done before the device has answered is, where the step may well be computed.
        with recorder.ahead(step.name("compute"), step.given) if wanted.is_doubtful else contextlib.nullcontext():
            if signal is None or not wanted.decide(signal):
                return self._computed(step, signal)
        return Outcome(skipped.output, False, None, signal)

    def _computed(self, step: _Step, signal: Signal | None) -> Outcome:
        """A step that is computed; `signal`: by which that was decided."""
        recorder, _, form, inputs, wanted, forward = step
        name = step.name("compute")
        if recorder.refuses(name):
            decided = wanted if signal is None else wanted._replace(mode="compute", decide=None)
            taken = super()._next(form, inputs, decided, forward)
            return taken if signal is None else taken._replace(signal=signal)
        computed = self._taken(step, name, step.given)
        if computed.lost is not None:
            self._lose(inputs.signature, computed.lost)
        signal = signal or _signal(form, computed, wanted)
        return Outcome(computed.output, True, computed.parts, signal, computed.lost)

    def _taken(self, step: _Step, name: Any, given: Any) -> _Taken:
        """A forward in which the blocks compute, or are answered for with what is stored."""
        recorder, reads, form, _, wanted, forward = step
        mode = name[0]
        kept = None if wanted.keeps else form.trace.early_segments

        def run(given: Any) -> _Taken:
            args, kwargs, stored, before = given
            signal: torch.Tensor | None = None
            change: torch.Tensor | None = None

            def choose(leading: Given) -> Mode:
                nonlocal signal, change
                signal = form.read(leading).value
                if before is not None and before.shape == signal.shape and before.device == signal.device:
                    change = torch.stack([size(signal - before), size(before)])
                chosen: Mode = mode
                return chosen

            outlook = Outlook([1], [stored]) if stored else None
            taken = StepPass(form.trace, mode, outlook, choose if reads else None, keeps=kept)
            output = self._forward(taken, (args, kwargs), forward)
            return _Taken(output, taken.residuals if mode == "compute" else None, signal, change, taken.lost)

        found: _Taken = recorder(name, run, given, self._idle(form, reads) if mode == "skip" else ())
        return found

    def _idle(self, form: TracedForm, reads: bool) -> frozenset[torch.nn.Module]:
        """Modules that do not run at a skipped step. The signal is read from parts of the leading block."""
        if reads not in form.idle:
            leader = form.trace.leader.gate
            is_used = reads and leader.stack is not None and not form.is_blind
            leading = leader.stack.modules(self._model)[leader.index].modules() if is_used and leader.stack else ()
            form.idle[reads] = frozenset(self._inside.difference(leading))
        return form.idle[reads]


def _is_settled(form: TracedForm) -> bool:
    """Whether the signal is read in the same way each time. Whoever replays it sees whether its block has changed."""
    reader = form.reader
    if form.is_blind or reader is None:
        return form.is_blind
    return reader.is_checked or reader.path is None


def _signal(form: TracedForm, taken: _Taken, wanted: Instruction) -> Signal | None:
    if taken.signal is None or wanted.decide is None:
        return None
    source = None if form.is_blind or form.reader is None else (form.reader.path, form.generation)
    known = None if taken.change is None or wanted.before is None else (wanted.before, taken.change)
    return Signal(taken.signal, source, known)


def _stored(form: TracedForm, wanted: Instruction) -> list[Any] | None:
    """The residuals with which a step is skipped or its signal read; None if they are not known."""
    if wanted.outlook is not None:
        return wanted.outlook.values()
    if wanted.mode == "skip":
        return None
    if not form.trace.early_segments:  # Nothing that the signal depends on is skipped.
        return []
    return None if wanted.early is None else list(wanted.early)
