"""How is a step of a model computed, or passed through with its blocks skipped?

By the model's own forward, which always runs to its end: gates at its blocks let them compute, or answer for them. The
first time a form of inputs is seen, the step is computed, watched, and tried again on the model's shadow.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from ..arch import Coverage, coverage, find_anatomy
from ..arch.modules import unwrapped
from ..core import nested
from ..core.errors import ModelError
from ..core.interop import is_compiled
from ..trace.forward import Given, Tensors, Trace, Tracer
from ..trace.model_state import Generation, ModelState, own
from ..trace.passes import Mode, Outlook, Rehearsal, Replay, StepPass
from ..trace.shadow import TrialFailed
from ..trace.signal import ModulatedInput
from ..trace.watch import Gates
from .decision import Signal
from .inputs import Inputs

Forward = Callable[[Any, Any], Any]
"""The model's own forward, of arguments and keyword arguments."""
_Value = TypeVar("_Value")

_MOST_FORMS = 32
"""Number of forms of inputs, such as sizes and text lengths, that are remembered."""
_MOST_TRACES = 3
"""How often a form is traced before its blocks count as called at random."""
_logger = logging.getLogger(__name__)


class Instruction(NamedTuple):
    """How to take a step."""

    mode: Mode
    """`ask` leaves it to `decide`."""
    outlook: Outlook | None = None
    """What the blocks of a skipped step are expected to add; None where the model's output is forecast."""
    decide: Callable[[Signal], bool] | None = None
    """Records the signal; returns True to skip. Without it, no signal is read."""
    keeps: bool = True
    """Whether to keep what all blocks add, or only what those before the leader add."""
    early: Tensors | None = None
    """What those before the leader added at the last computed step, where not all is kept."""
    before: Signal | None = None
    """The signal of the step before, if this one is left to its signal."""
    is_doubtful: bool = False
    """Whether it may well be computed although it need not be."""


class Outcome(NamedTuple):
    """The result of a step."""

    output: Any
    computed: bool
    parts: Tensors | None = None
    """What the blocks added, if the step was computed and that is known."""
    signal: Signal | None = None
    problem: str | None = None
    """Why a step that should have been skipped was computed."""


class About(NamedTuple):
    """What a cache knows about its model."""

    signal: str
    """What decides whether a step is skipped."""
    problem: str | None = None
    """Why steps of the form seen last cannot be skipped, if they cannot."""
    coverage: Coverage | None = None
    """How much of the model a skipped step leaves out, where that is known."""


class CacheableModel:
    """A denoiser whose steps can be skipped."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._generation = Generation(model, self._watched_modules)
        self._refused: dict[Hashable, str] = {}
        """By form of inputs: why its steps cannot be skipped."""
        self._warned: set[str] = set()

    def run(self, inputs: Inputs, wanted: Instruction, forward: Forward) -> Outcome:
        """Take a step."""
        raise NotImplementedError

    def about(self) -> About:
        """Facts about the model, in words and figures."""
        raise NotImplementedError

    def problem(self, inputs: Inputs) -> str | None:
        """Why no step with such inputs can be skipped, if none can."""
        return self._refused.get(inputs.signature) if self._refused else None

    def generation(self) -> int:
        """A number that grows when the model is seen to have other weights or adapters."""
        return self._generation.check()

    def _watched_modules(self) -> Iterator[torch.nn.Module]:
        """Modules whose changes begin a new generation."""
        return iter(())

    def forget(self) -> None:
        """Drop what is only useful for one run."""

    def detach(self) -> None:
        """Take everything off the model."""

    def _refuse(self, signature: Hashable, problem: str, output: Any) -> Outcome:
        _remember(self._refused, signature, problem)
        if problem not in self._warned:
            self._warned.add(problem)
            _logger.warning("%s is not cached: %s", type(self._model).__name__, problem)
        return Outcome(output, computed=True)


def _remember(known: dict[Hashable, _Value], key: Hashable, value: _Value) -> _Value | None:
    """Add a value; return the oldest, removed, when there are too many."""
    known[key] = value
    return known.pop(next(iter(known))) if len(known) > _MOST_FORMS else None


@dataclass(eq=False)
class TracedForm:
    """A form of inputs that was traced."""

    trace: Trace
    reader: ModulatedInput | None = None
    found: ModulatedInput.Known | None = None
    """What a new reader can use."""
    generation: int = 0
    """How often the reader had to be replaced."""
    is_blind: bool = False
    """Whether the modulated input cannot be read without running the block."""
    replay: tuple[Replay, ModelState] | None = None

    def read(self, given: Given, other: Given | None = None) -> Signal:
        """The signal, from the arguments of the leading block; `other` are those of another step."""
        stream = self._stream(given)
        if self.is_blind:
            return Signal(stream)
        if self.reader is None or not self.reader.is_current():
            self.generation += self.reader is not None
            pair = None if other is None else (other, self._stream(other))
            self.reader = ModulatedInput(given, stream, other=pair, known=self.found)
            self.found = self.reader.known
        return Signal(self.reader(given, stream), (self.reader.path, self.generation))

    def _stream(self, given: Given) -> torch.Tensor:
        """The sample among the arguments of the leading block."""
        found: torch.Tensor = self.trace.leader.read(given.args, given.kwargs)[self.trace.stream]
        return found

    def close(self) -> None:
        """Free the shadows."""
        if self.reader is not None:
            self.reader.close()
        if self.replay is not None:
            self.replay[0].close()
        self.reader = self.replay = None


class BlockModel(CacheableModel):
    """A model that is built of blocks."""

    def __init__(self, model: torch.nn.Module, hook_name: str) -> None:
        self._structure = find_anatomy(unwrapped(model))
        if not self._structure.stacks:
            raise ModelError(
                f"{self._structure.model_class} has no stack of blocks, so its steps cannot be cached. Declare one "
                "(samovar.register_declaration), or register an extractor (samovar.cache.register_extractor)."
            )
        self._forms: dict[Hashable, TracedForm] = {}
        self._attempts: dict[Hashable, int] = {}
        super().__init__(unwrapped(model))
        blocks = (block for stack in self._structure.stacks for block in stack.modules(self._model))
        self._inside = {part for block in blocks for part in block.modules()}
        self._gates = Gates(self._model, self._structure, hook_name)

    def detach(self) -> None:
        self._gates.detach()

    def _watched_modules(self) -> Iterator[torch.nn.Module]:
        """The first block of each stack: whoever changes blocks usually changes all of them."""
        return (part for stack in self._structure.stacks for part in stack.modules(self._model)[0].modules())

    def forget(self) -> None:
        for form in self._forms.values():
            form.close()

    def about(self) -> About:
        problem = next(reversed(self._refused.values()), None)
        forms = list(self._forms.values())
        if not forms:
            return About("the modulated input of the first block", problem)
        judged = next((form for form in reversed(forms) if form.found is not None), forms[-1])
        gate, found = judged.trace.leader.gate, judged.found
        inner = f".{found.path}" if found is not None and found.path and not judged.is_blind else ""
        covered = replace(self._structure, stacks=tuple(segment.stack for segment in forms[-1].trace.segments))
        return About(f"the input of {gate.path}.{gate.index}{inner}", problem, coverage(self._model, covered))

    def run(self, inputs: Inputs, wanted: Instruction, forward: Forward) -> Outcome:
        signature = inputs.signature
        if self._refused and signature in self._refused:
            return Outcome(forward(inputs.args, inputs.kwargs), computed=True)
        form = self._forms.get(signature)
        return self._next(form, inputs, wanted, forward) if form is not None else self._first(inputs, wanted, forward)

    # -------------------------------------------------------------------------------------- the first time

    def _first(self, inputs: Inputs, wanted: Instruction, forward: Forward) -> Outcome:
        """Compute a step of a form that was not seen before, and learn from it."""
        signature = inputs.signature
        try:
            before = inputs.copied()
        except ModelError as error:
            return self._refuse(signature, str(error), forward(inputs.args, inputs.kwargs))
        tracer = Tracer(self._model, self._structure)
        with self._gates.asking(tracer):
            output = forward(inputs.args, inputs.kwargs)
        problem = side_effect(inputs, before, output)
        if problem is not None:
            return self._refuse(signature, problem, output)
        try:
            watched = tracer.finish()
            rehearsal = Rehearsal(self._model, self._gates.by_module, watched, before.args, before.kwargs)
            rehearsed = rehearsal.rehearse(output, lambda with_time: before.at_another_step(output, with_time))
        except (ModelError, TrialFailed) as error:
            return self._refuse(signature, str(error), output)
        form = TracedForm(watched.trace)
        evicted = _remember(self._forms, signature, form)
        if evicted is not None:
            evicted.close()
        signal = form.read(*rehearsed) if wanted.decide is not None else None
        return Outcome(output, True, _kept(form.trace, watched.residuals, wanted.keeps), signal)

    # -------------------------------------------------------------------------------------- all other times

    def _next(self, form: TracedForm, inputs: Inputs, wanted: Instruction, forward: Forward) -> Outcome:
        trace, decide = form.trace, wanted.decide
        if wanted.mode == "ask" and trace.early_segments:
            return self._ask_ahead(form, inputs, wanted, forward)
        signal: Signal | None = None
        with contextlib.ExitStack() as checks:

            def choose(given: Given) -> Mode:
                nonlocal signal
                signal = form.read(given)
                assert decide is not None
                if wanted.mode == "ask" and decide(signal):
                    return "skip"
                checks.enter_context(self._checked(form, given, signal))
                return "compute"

            kept = None if wanted.keeps else trace.early_segments
            step = StepPass(trace, wanted.mode, wanted.outlook, None if decide is None else choose, keeps=kept)
            spare = (inputs.args, inputs.kwargs) if wanted.mode == "compute" else inputs.spare()
            output = self._forward(step, (inputs.args, inputs.kwargs), forward)
        if step.lost is None:
            is_computed = step.mode != "skip"
            return Outcome(output, is_computed, step.residuals if is_computed else None, signal)
        self._lose(inputs.signature, step.lost)
        if step.mode == "skip":
            output = forward(*spare)
        return Outcome(output, True, None, signal, "the blocks were called in another way than in the traced forward")

    def _ask_ahead(self, form: TracedForm, inputs: Inputs, wanted: Instruction, forward: Forward) -> Outcome:
        """Read the signal of a model with blocks before the leader from its shadow, so that they need not run where
        the step is skipped, and the model itself is called once either way."""
        signal: Signal | None = None
        skips = False

        def choose(given: Given) -> Mode:
            nonlocal signal, skips
            signal = form.read(given)
            assert wanted.decide is not None
            skips = wanted.decide(signal)
            return "skip"

        outlook = wanted.outlook if wanted.early is None else Outlook([1], [wanted.early])
        step = StepPass(form.trace, "skip", outlook, choose)
        try:
            self._replay(form).skip(step, inputs.args, inputs.kwargs)
        except TrialFailed as error:
            step.lost = str(error)
        mode: Mode = "skip" if skips and step.lost is None else "compute"
        taken = self._next(form, inputs, wanted._replace(mode=mode, decide=None), forward)
        return taken._replace(signal=signal, problem=step.lost or taken.problem)

    def _replay(self, form: TracedForm) -> Replay:
        if form.replay is None or not form.replay[1].holds():
            around = [module for module in self._model.modules() if module not in self._inside]
            form.replay = Replay(self._model, self._gates.by_module, form.trace), ModelState(around)
        return form.replay[0]

    def _forward(self, step: StepPass, given: tuple[Any, Any], forward: Forward) -> Any:
        try:
            with self._gates.asking(step):
                output = forward(*given)
        except BaseException as error:
            if step.lost is None or step.mode != "skip" or not isinstance(error, Exception):
                raise
            return None  # Blocks ran with inputs that were not meant for them; the step is computed again.
        step.finish()
        return output

    def _lose(self, signature: Hashable, why: str) -> None:
        """Trace the next step of this form again, unless that was done often enough."""
        form = self._forms.pop(signature, None)
        if form is not None:
            form.close()
        self._attempts[signature] = self._attempts.get(signature, 0) + 1
        if self._attempts[signature] >= _MOST_TRACES:
            self._refuse(signature, f"its blocks are not called in the same order each time: {why}", None)

    @contextlib.contextmanager
    def _checked(self, form: TracedForm, given: Given, signal: Signal) -> Iterator[None]:
        """Check once whether the block's real attention gets what its shadow's got."""
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


def _kept(trace: Trace, residuals: Tensors, keeps: bool) -> Tensors:
    """The residuals that have an effect: all, or those of segments before the leader."""
    early = {slot for s in trace.early_segments for slot in range(s.slot, s.slot + len(s.stack.streams))}
    return [
        residual if slot not in trace.idle_slots and (keeps or slot in early) else None
        for slot, residual in enumerate(residuals)
    ]


def side_effect(inputs: Inputs, before: Inputs, output: Any) -> str | None:
    """What a forward did that a skipped one would not do, if anything. `before`: a copy of its inputs."""
    given = inputs.tensors
    known = {id(tensor) for tensor in given}
    is_filled = any(id(tensor) not in known for tensor in nested.tensors((inputs.args, inputs.kwargs)))
    if is_filled or any(not _same(one, other) for one, other in zip(given, before.tensors, strict=True)):
        return "it writes into its inputs"
    return None if nested.is_transparent(output) else "its output holds objects that cannot be inspected"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN included, where that can be seen."""
    if not nested.is_comparable(one):
        return True
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
