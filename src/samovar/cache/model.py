"""How is a step of a model computed, or passed through with its blocks skipped?

By the model's own forward, which always runs to its end: gates at its blocks let them compute, or answer for them.
The first time a form of inputs is seen, the step is computed, watched, and tried once more on the model's shadow.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from .. import tree
from ..arch import Coverage, coverage, find_anatomy
from ..arch.modules import unwrapped
from ..errors import ModelError
from ..trace.fingerprint import Fingerprint, Generation, own
from ..trace.forward import Given, Tensors, Trace, Tracer
from ..trace.gates import Gates
from ..trace.passes import Mode, Outlook, StepPass
from ..trace.rehearsal import Rehearsal, Rehearsed, Replay
from ..trace.shadow import TrialFailed
from ..trace.signal import ModulatedInput
from .decision import Signal
from .inputs import Inputs

Forward = Callable[[Inputs], Any]
"""The model's own forward."""

_MOST_FORMS = 32
"""Forms of inputs, such as sizes and text lengths, that are remembered."""
_MOST_TRACES = 3
"""How often a form is traced anew before its blocks count as called at random."""
_logger = logging.getLogger(__name__)


class Wish(NamedTuple):
    """What is wanted of a step."""

    mode: Mode
    """`ask` leaves it to `decide`."""
    outlook: Outlook | None = None
    """What the blocks of a skipped step are expected to add; None where the model's output is forecast."""
    decide: Callable[[Signal], bool] | None = None
    """Whether a step with this signal is skipped; without it, no signal is read."""
    keeps: bool = True
    """Whether all is wanted that the blocks add, or only what those before the leader do."""
    early: Tensors | None = None
    """What those before the leader added at the last computed step, where not all is kept."""


class Outcome(NamedTuple):
    """What came of a step."""

    output: Any
    computed: bool
    parts: Tensors | None = None
    """What the blocks added, if the step was computed and that is known."""
    signal: Signal | None = None
    problem: str | None = None
    """Why a step that should have been skipped was computed."""


class CacheableModel(Protocol):
    """A denoiser whose steps can be skipped."""

    def run(self, inputs: Inputs, wish: Wish, forward: Forward) -> Outcome:
        """Take a step."""

    def problem(self, inputs: Inputs) -> str | None:
        """Why no step with such inputs can be skipped, if none can."""

    def generation(self) -> int:
        """A number that grows whenever the model is seen to have other adapters."""

    def about(self) -> About:
        """What is known of the model, in words and figures."""

    def forget(self) -> None:
        """Drop what is only good for one run."""

    def remove(self) -> None:
        """Take everything off the model."""


class About(NamedTuple):
    """What a cache has to say about its model."""

    signal: str
    """What steps are judged by."""
    problem: str | None = None
    """Why steps of the form seen last cannot be skipped, if they cannot."""
    coverage: Coverage | None = None
    """How much of the model a skipped step leaves out; None where that is not known."""


class BlockModel:
    """A model that is built of blocks."""

    def __init__(self, model: torch.nn.Module, hook_name: str) -> None:
        self._model = unwrapped(model)
        self._structure = find_anatomy(self._model)
        if not self._structure.stacks:
            raise ModelError(
                f"No stack of blocks was found in {type(self._model).__name__}, so its steps cannot be cached. Declare "
                "it (samovar.register_declaration), or register an extractor (samovar.cache.register_extractor)."
            )
        self._traces: dict[Hashable, Trace] = {}
        self._refused: dict[Hashable, str] = {}
        """Forms of inputs with which nothing can be skipped, and why."""
        self._attempts: dict[Hashable, int] = {}
        self._readers: dict[Trace, ModulatedInput] = {}
        self._known_readers: dict[Trace, ModulatedInput.Known] = {}
        self._generations: dict[Trace, int] = {}
        """How often the leading block was seen to have other weights or adapters than before."""
        self._blind: set[Trace] = set()
        """Traces whose modulated input cannot be read without running the block."""
        self._warned: set[str] = set()
        self._replays: dict[Trace, tuple[Replay, Fingerprint]] = {}
        blocks = (block for stack in self._structure.stacks for block in stack.modules(self._model))
        self._inside = {part for block in blocks for part in block.modules()}
        self._generation = Generation(self._model, self._first_blocks)
        self._gates = Gates(self._model, self._structure, hook_name)

    def remove(self) -> None:
        self._gates.detach()

    def generation(self) -> int:
        return self._generation.check()

    def _first_blocks(self) -> Iterator[torch.nn.Module]:
        """The modules of the first block of each stack: whoever changes blocks mostly changes all of them."""
        return (part for stack in self._structure.stacks for part in stack.modules(self._model)[0].modules())

    def forget(self) -> None:
        for reader in self._readers.values():
            reader.close()
        for replay, _ in self._replays.values():
            replay.close()
        self._readers.clear()
        self._replays.clear()

    def problem(self, inputs: Inputs) -> str | None:
        return self._refused.get(inputs.signature)

    def about(self) -> About:
        trace = next(reversed(self._traces.values()), None)
        problem = next(reversed(self._refused.values()), None)
        if trace is None:
            return About("the modulated input of the first block", problem)
        judged = next((found for found in reversed(self._traces.values()) if found in self._known_readers), trace)
        leader, known = judged.leader, self._known_readers.get(judged)
        path = known.path if known is not None and judged not in self._blind else None
        signal = f"{leader.gate.path}.{leader.gate.index}" + (f".{path}" if path else "")
        covered = replace(self._structure, stacks=tuple(segment.stack for segment in trace.segments))
        return About(f"the input of {signal}", problem, coverage(self._model, covered))

    def run(self, inputs: Inputs, wish: Wish, forward: Forward) -> Outcome:
        signature = inputs.signature
        if signature in self._refused:
            return Outcome(forward(inputs), computed=True)
        trace = self._traces.get(signature)
        if trace is None:
            return self._first(inputs, wish, forward)
        return self._next(trace, inputs, wish, forward)

    # -------------------------------------------------------------------------------------- the first time

    def _first(self, inputs: Inputs, wish: Wish, forward: Forward) -> Outcome:
        """Compute a step of a form that was not seen before, and learn from it."""
        signature, given = inputs.signature, inputs.tensors
        try:
            before = inputs.copied()
        except ModelError as error:
            return self._refuse(signature, str(error), forward(inputs))
        tracer = Tracer(self._model, self._structure)
        with self._gates.asking(tracer):
            output = forward(inputs)
        known = {id(tensor) for tensor in given}
        is_filled = any(id(tensor) not in known for tensor in tree.tensors((inputs.args, inputs.kwargs)))
        if is_filled or any(not _same(one, other) for one, other in zip(given, before.tensors, strict=True)):
            return self._refuse(signature, "it writes into its inputs", output)
        if not tree.is_transparent(output):
            return self._refuse(signature, "its output holds objects that cannot be looked into", output)
        try:
            watched = tracer.finish()
            rehearsal = Rehearsal(self._model, self._gates.by_module, watched, before.args, before.kwargs)
            rehearsed = rehearsal.run(output, lambda with_time: before.at_another_step(output, with_time))
        except (ModelError, TrialFailed) as error:
            return self._refuse(signature, str(error), output)
        trace = watched.trace
        self._traces[signature] = trace
        while len(self._traces) > _MOST_FORMS:
            oldest = self._traces.pop(next(iter(self._traces)))
            for held in (self._readers, self._known_readers, self._generations):
                held.pop(oldest, None)
        residuals = [None if slot in trace.idle_slots else part for slot, part in enumerate(watched.residuals)]
        signal = self._first_signal(trace, rehearsed) if wish.decide is not None else None
        if not wish.keeps:
            early = {slot for s in trace.early_segments for slot in range(s.slot, s.slot + len(s.stack.streams))}
            residuals = [part if slot in early else None for slot, part in enumerate(residuals)]
        return Outcome(output, True, residuals, signal)

    def _refuse(self, signature: Hashable, problem: str, output: Any) -> Outcome:
        self._refused[signature] = problem
        while len(self._refused) > _MOST_FORMS:
            self._refused.pop(next(iter(self._refused)))
        if problem not in self._warned:
            self._warned.add(problem)
            _logger.warning("%s is not cached: %s", type(self._model).__name__, problem)
        return Outcome(output, computed=True)

    # -------------------------------------------------------------------------------------- all other times

    def _next(self, trace: Trace, inputs: Inputs, wish: Wish, forward: Forward) -> Outcome:
        if wish.mode == "ask" and trace.early_segments:
            return self._ask_ahead(trace, inputs, wish, forward)
        signal: Signal | None = None
        with contextlib.ExitStack() as checks:

            def choose(given: Given) -> Mode:
                nonlocal signal
                signal = self._read(trace, given)
                assert wish.decide is not None
                if wish.mode == "ask" and wish.decide(signal):
                    return "skip"
                checks.enter_context(self._checked(trace, given, signal))
                return "compute"

            reads = choose if wish.decide is not None else None
            kept = None if wish.keeps else trace.early_segments
            step = StepPass(trace, wish.mode, wish.outlook, reads, keeps=kept)
            spare = inputs if wish.mode == "compute" else inputs.spare()
            output = self._forward(step, inputs, forward)
        if step.lost is None:
            is_computed = step.mode != "skip"
            return Outcome(output, is_computed, step.residuals if is_computed else None, signal)
        self._lose(inputs.signature, step.lost)
        if step.mode == "skip":
            output = forward(spare)
        return Outcome(output, True, None, signal, "the blocks are called in another way than before")

    def _ask_ahead(self, trace: Trace, inputs: Inputs, wish: Wish, forward: Forward) -> Outcome:
        """Ask the signal of a model some of whose blocks run before the leader: on its shadow, so that they need not
        run where the step is skipped, and the model itself is called once either way."""
        signal: Signal | None = None
        skips = False

        def choose(given: Given) -> Mode:
            nonlocal signal, skips
            signal = self._read(trace, given)
            assert wish.decide is not None
            skips = wish.decide(signal)
            return "skip"

        outlook = wish.outlook if wish.early is None else Outlook([1], [wish.early])
        step = StepPass(trace, "skip", outlook, choose)
        try:
            self._replay(trace).run(step, inputs.args, inputs.kwargs)
        except TrialFailed as error:
            step.lost = str(error)
        mode: Mode = "skip" if skips and step.lost is None else "compute"
        taken = self._next(trace, inputs, wish._replace(mode=mode, decide=None), forward)
        return taken._replace(signal=signal, problem=step.lost or taken.problem)

    def _replay(self, trace: Trace) -> Replay:
        known = self._replays.get(trace)
        if known is None or not known[1].holds():
            around = [module for module in self._model.modules() if module not in self._inside]
            known = self._replays[trace] = Replay(self._model, self._gates.by_module, trace), Fingerprint(around)
        return known[0]

    def _forward(self, step: StepPass, inputs: Inputs, forward: Forward) -> Any:
        try:
            with self._gates.asking(step):
                output = forward(inputs)
        except BaseException as error:
            if step.lost is None or step.mode != "skip" or not isinstance(error, Exception):
                raise
            return None  # Blocks were run with what was not meant for them; the step is computed again.
        step.finish()
        return output

    def _lose(self, signature: Hashable, why: str) -> None:
        """The next step of this form is traced anew, unless that was done often enough."""
        self._traces.pop(signature, None)
        self._attempts[signature] = self._attempts.get(signature, 0) + 1
        if self._attempts[signature] >= _MOST_TRACES:
            self._refuse(signature, f"its blocks are not called in the same order each time: {why}", None)

    # -------------------------------------------------------------------------------------- the signal

    def _first_signal(self, trace: Trace, rehearsed: Rehearsed) -> Signal:
        given, stream = rehearsed.given, trace.leader.read(rehearsed.given.args, rehearsed.given.kwargs)[trace.stream]
        other = None
        if rehearsed.other is not None:
            other = rehearsed.other, trace.leader.read(rehearsed.other.args, rehearsed.other.kwargs)[trace.stream]
        reader = ModulatedInput(given, stream, other=other)
        self._readers[trace], self._known_readers[trace] = reader, reader.known
        return Signal(reader(given, stream), (reader.path, self._generations.get(trace, 0)))

    def _read(self, trace: Trace, given: Given) -> Signal:
        stream = trace.leader.read(given.args, given.kwargs)[trace.stream]
        if trace in self._blind:
            return Signal(stream)
        reader = self._readers.get(trace)
        if reader is None or not reader.is_current():
            self._generations[trace] = self._generations.get(trace, 0) + (reader is not None)
            reader = ModulatedInput(given, stream, known=self._known_readers.get(trace))
            self._readers[trace], self._known_readers[trace] = reader, reader.known
        return Signal(reader(given, stream), (reader.path, self._generations.get(trace, 0)))

    @contextlib.contextmanager
    def _checked(self, trace: Trace, given: Given, signal: Signal) -> Iterator[None]:
        """See once whether the block's real attention is given what its shadow's was."""
        reader, block = self._readers.get(trace), given.module
        is_compiled = unwrapped(block) is not block or "_compiled_call_impl" in vars(block)
        if reader is None or reader.is_checked or reader.attention is None or is_compiled:
            yield
            return

        running = self._gates.running

        def compare(attention: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if self._gates.running is not running or reader.is_checked:  # Another thread's forward.
                return
            reader.is_checked = True
            if not reader.agrees_with(signal.value, args, kwargs):
                self._blind.add(trace)
                _logger.warning(
                    "The modulated input of %s cannot be read without running it; its steps are judged by the block's "
                    "own input.", type(block).__name__,
                )  # fmt: skip

        own(compare)
        handle = reader.attention.register_forward_pre_hook(compare, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN among them, as far as that can be seen."""
    if not tree.is_comparable(one):
        return True
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
