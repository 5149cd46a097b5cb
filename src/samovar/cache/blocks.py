"""A step of a model that is built of blocks, computed or with its blocks skipped.

The model's own forward always runs to its end: gates at its blocks let them compute, or answer for them. The first time
a form of inputs is seen, the step is computed, watched, and tried again on the model's twin.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..arch import coverage, find_anatomy
from ..arch.modules import unwrapped
from ..core import nested
from ..core.errors import ModelError
from ..core.interop import is_compiled
from ..trace.forward import Given, Trace, Watcher
from ..trace.gates import Gates
from ..trace.model_state import ModelState, own
from ..trace.modulated_input import ModulatedInput
from ..trace.skip_pass import Mode, Replay, StepPass, rehearse
from ..trace.twin import TrialFailed
from .run import Call
from .signal import Signal
from .steps import About, keep_latest
from .threshold import Decide, Outcome, ThresholdSteps

_MAX_TRACES = 3
"""How often a form is traced before its blocks count as called at random."""
_logger = logging.getLogger(__name__)

SimpleExtractor = Callable[[torch.nn.Module, torch.Tensor, Any], torch.Tensor]
"""Makes the modulated input of the model, its embedded sample and its embedded time."""


@dataclass(eq=False)
class _TracedForm:
    """A form of inputs that was traced."""

    trace: Trace
    extractor: SimpleExtractor | None = None
    reader: ModulatedInput | None = None
    path: str | None = None
    """Where in the leading block the signal was read last."""
    is_blind: bool = False
    """Whether the modulated input cannot be read without running the block."""
    time: int | str | None = None
    """Which argument of the leading block is the embedded time, for an extractor."""
    replay: tuple[Replay, ModelState] | None = None

    def read(self, model: torch.nn.Module, given: Given, other: Given | None = None) -> Signal:
        """The signal, from the arguments of the leading block; `other` are those at another time."""
        stream = self._stream(given)
        if self.extractor is not None:
            self.time = _embedded_time(given, other, stream) if self.time is None else self.time
            return Signal(self.extractor(model, stream, _places(given).get(self.time)))
        if self.is_blind:
            return Signal(stream)
        if self.reader is None or not self.reader.is_current():
            self.reader = ModulatedInput(given, stream)
            self.path = self.reader.path
        return Signal(self.reader(given, stream), self.reader.path)

    def _stream(self, given: Given) -> torch.Tensor:
        """The sample among the arguments of the leading block."""
        found: torch.Tensor = self.trace.leader.read(given)[self.trace.stream]
        return found

    def close(self) -> None:
        """Free the twins."""
        if self.reader is not None:
            self.reader.close()
        if self.replay is not None:
            self.replay[0].close()
        self.reader = self.replay = None


def _places(given: Given) -> dict[int | str | None, Any]:
    """Arguments by position or name."""
    return {**dict(enumerate(given.args)), **given.kwargs}


def _embedded_time(given: Given, other: Given | None, stream: torch.Tensor) -> int | str | None:
    """The place of the embedded time among a block's arguments: the one called so, else the one that time changes."""
    places = _places(given)
    if "temb" in places or other is None:
        return "temb" if "temb" in places else None
    later = _places(other)
    rest = ((at, value) for at, value in places.items() if isinstance(value, torch.Tensor))
    return next((at for at, value in rest if value.shape != stream.shape and not torch.equal(value, later[at])), None)


class BlockSteps(ThresholdSteps):
    """Takes the steps of a model that is built of blocks."""

    def __init__(self, model: torch.nn.Module, hook_name: str, extractor: SimpleExtractor | None, *rest: Any) -> None:
        bare = unwrapped(model)
        self._structure = find_anatomy(bare)
        stacks = [stack.modules(bare) for stack in self._structure.stacks]
        if not stacks:
            raise ModelError(no_stack(self._structure.model_class))
        self._extractor = extractor
        self._forms: dict[Hashable, _TracedForm] = {}
        self._attempts: dict[Hashable, int] = {}
        # Whoever changes blocks usually changes all of them.
        firsts = [stack[0] for stack in stacks]
        super().__init__(bare, lambda: (part for first in firsts for part in first.modules()), *rest)
        self._inside = {part for stack in stacks for block in stack for part in block.modules()}
        self._gates = Gates(bare, self._structure, hook_name)

    def detach(self) -> None:
        self._gates.detach()

    def forget(self) -> None:
        for form in self._forms.values():
            form.close()

    def about(self) -> About:
        problem, forms = super().about().problem, list(self._forms.values())
        if not forms:
            return About("the modulated input of the first block", problem)
        judged = next((form for form in reversed(forms) if form.path is not None), forms[-1])
        gate = judged.trace.leader.gate
        inner = f".{judged.path}" if judged.path and not judged.is_blind else ""
        covered = replace(self._structure, stacks=tuple(segment.stack for segment in forms[-1].trace.segments))
        signal = f"the input of {gate.path}.{gate.index}{inner}"
        if self._extractor is not None:
            signal = f"the modulated input from {getattr(self._extractor, '__name__', 'its extractor')}"
        return About(signal, problem, coverage(self._model, covered))

    def _run(self, call: Call, mode: Mode, decide: Decide | None) -> Outcome:
        form = self._forms.get(call.signature)
        if form is None:
            return self._first(call, decide)
        # Blocks before the leader need not run to read the signal, where the step is then skipped.
        if mode == "ask" and decide is not None and form.trace.has_early_blocks:
            return self._ask_ahead(form, call, decide)
        return self._next(form, call, mode, decide)

    # -------------------------------------------------------------------------------------- the first time

    def _first(self, call: Call, decide: Decide | None) -> Outcome:
        """Compute a step of a form that was not seen before, and learn from it."""
        try:
            before = call.copied()
        except ModelError as error:
            self._refuse(call, str(error))
            return Outcome(call.compute())
        watcher = Watcher(self._model, self._structure)
        with self._gates.asking(watcher):
            output = call.compute()
        try:
            problem = call.side_effect(before.tensors, output)
            if problem is not None:
                raise ModelError(problem)
            watched = watcher.watched()
            given, another = (before.args, before.kwargs), partial(before.at_another_step, output)
            rehearsed = rehearse(self._model, self._gates.by_module, watched, given, output, another)
        except (ModelError, TrialFailed) as error:
            self._refuse(call, str(error))
            return Outcome(output)
        form = _TracedForm(watched.trace, self._extractor)
        for dropped in keep_latest(self._forms, call.signature, form):
            dropped.close()
        signal = form.read(self._model, *rehearsed) if decide is not None else None
        return Outcome(output, True, watched.residuals, signal)

    # -------------------------------------------------------------------------------------- all other times

    def _next(self, form: _TracedForm, call: Call, mode: Mode, decide: Decide | None) -> Outcome:
        signal = None
        with contextlib.ExitStack() as checks:

            def choose(given: Given) -> Mode:
                nonlocal signal
                signal = form.read(self._model, given)
                assert decide is not None
                if mode == "ask" and decide(signal):
                    return "skip"
                checks.enter_context(self._checked(form, given, signal))
                return "compute"

            step = StepPass(form.trace, mode, call.state.residuals, None if decide is None else choose)
            spare: Any = (call.args, call.kwargs)
            if mode != "compute":  # In other containers: some models empty the lists that they are given.
                spare = nested.map_tensors(lambda tensor: tensor, spare)
            output = self._forward(step, call)
        if step.lost is None:
            is_computed = step.mode != "skip"
            return Outcome(output, is_computed, step.residuals if is_computed else None, signal)
        self._lose(call, step.lost)
        if step.mode == "skip":
            output = call.forward(*spare)
        return Outcome(output, True, None, signal, "the blocks were called in another way than in the traced forward")

    def _ask_ahead(self, form: _TracedForm, call: Call, decide: Decide) -> Outcome:
        """Read the signal from the model's twin, so that the model itself is called once either way."""
        signal, skips = None, False

        def choose(given: Given) -> Mode:
            nonlocal signal, skips
            signal = form.read(self._model, given)
            skips = decide(signal)
            return "skip"

        step = StepPass(form.trace, "skip", call.state.residuals, choose)
        try:
            self._replay(form).skip(step, call.args, call.kwargs)
        except TrialFailed as error:
            step.lost = str(error)
        mode: Mode = "skip" if skips and step.lost is None else "compute"
        taken = self._next(form, call, mode, None)
        return taken._replace(signal=signal, problem=step.lost or taken.problem)

    def _replay(self, form: _TracedForm) -> Replay:
        if form.replay is None or not form.replay[1].holds():
            around = [module for module in self._model.modules() if module not in self._inside]
            form.replay = Replay(self._model, self._gates.by_module, form.trace), ModelState(around)
        return form.replay[0]

    def _forward(self, step: StepPass, call: Call) -> Any:
        try:
            with self._gates.asking(step):
                output = call.compute()
        except BaseException as error:
            if step.lost is None or step.mode != "skip" or not isinstance(error, Exception):
                raise
            return None  # Blocks ran with inputs that were not meant for them; the step is computed again.
        step.finish()
        return output

    def _lose(self, call: Call, why: str) -> None:
        """Trace the next step of this form again, unless that was done often enough."""
        signature = call.signature
        form = self._forms.pop(signature, None)
        if form is not None:
            form.close()
        self._attempts[signature] = self._attempts.get(signature, 0) + 1
        if self._attempts[signature] >= _MAX_TRACES:
            self._refuse(call, f"its blocks are not called in the same order each time: {why}")

    @contextlib.contextmanager
    def _checked(self, form: _TracedForm, given: Given, signal: Signal) -> Iterator[None]:
        """Check once whether the block's real attention gets what its twin's got."""
        reader, block = form.reader, given.module
        if reader is None or reader.is_checked or reader.attention is None or is_compiled(block):
            yield
            return
        running = self._gates.running

        def compare(attention: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if self._gates.running is not running or reader.is_checked:  # Another thread's forward.
                return
            reader.is_checked = True
            if not reader.agrees_with(signal.value, args, kwargs):
                form.is_blind = True
                _logger.warning(
                    "The modulated input of %s cannot be read without running it; its steps are judged by the block's "
                    "own input.", type(block).__name__,
                )  # fmt: skip

        own(compare)
        with reader.attention.register_forward_pre_hook(compare, with_kwargs=True):
            yield


def no_stack(name: str) -> str:
    """Why the blocks of a model cannot be skipped, and what helps."""
    return (
        f"{name} has no stack of blocks, so its steps cannot be cached. Declare one (samovar.register_declaration), or "
        "register an extractor (samovar.cache.register_extractor)."
    )
