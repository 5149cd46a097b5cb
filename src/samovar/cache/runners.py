"""How is a step computed or skipped: by the model's blocks, or by an extractor?"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from ..arch import find_anatomy
from ..arch.modules import is_container, unwrapped
from ..arch.probe import other_modules
from ..errors import ModelError, SettingError
from ..hooks import HookRegistry
from .decision import Attempt, Signal
from .extractors import Extractor
from .inputs import Inputs
from .learning import learn
from .passage import Given, Passage, Recompute
from .schedule import Mode
from .signal import ModulatedInput
from .trace import Active, Call, Desynchronised, Gate, Trace, Tracer, added

Forward = Callable[[Inputs], Any]
"""The model's own forward."""

_MOST_FORMS = 32
"""Of so many forms of inputs, such as sizes and text lengths, it is remembered what the model does."""
_logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Makes attempts at steps of one model."""

    def key(self, inputs: Inputs) -> Hashable:
        """What must be as it was for a stored step to stand for this one; None if that is not known yet."""

    def problem(self, key: Any) -> str | None:
        """Why steps of this key cannot be skipped, if they cannot."""

    def run(self, inputs: Inputs, attempt: Attempt, forward: Forward) -> None:
        """Carry an attempt out."""

    def signal(self) -> str:
        """What steps are judged by, in words."""

    def trouble(self) -> str | None:
        """Why steps of the form seen last cannot be skipped, if they cannot."""

    def forget(self) -> None:
        """Drop what is only good for one run."""

    def remove(self) -> None:
        """Take everything off the model."""


class _Enough(Exception):
    """The step is skipped, and nothing more of the forward is needed."""


class BlockRunner:
    """Runs the model's own forward, through gates at its blocks."""

    def __init__(self, model: torch.nn.Module, hook_name: str) -> None:
        self._model = unwrapped(model)
        self._structure = find_anatomy(self._model)
        self._hook_name = hook_name
        self._active = Active()
        self._traces: dict[Hashable, Trace] = {}
        self._refused: dict[Hashable, str] = {}
        """Forms of inputs with which no trace can be made, and why."""
        self._warned: set[str] = set()
        self._gated: list[torch.nn.Module] = []
        self._attention: str | None = None
        """Where the signal was last taken, within the leading block."""
        if not self._structure.stacks:
            raise ModelError(
                f"No stack of blocks was found in {type(self._model).__name__}, so its steps cannot be cached. Declare "
                "it (samovar.register_declaration), or register an extractor (samovar.cache.register_extractor)."
            )
        self._install()

    def _install(self) -> None:
        """A gate at every block, and at whatever may run between blocks."""
        holders = tuple(stack.path for stack in self._structure.stacks)
        try:
            for stack in self._structure.stacks:
                for index, block in enumerate(stack.modules(self._model)):
                    self._gate(block, Gate(self._active, stack.path, stack, index))
            for path, module in other_modules(self._model, self._structure):
                if not any(holder.startswith(f"{path}.") for holder in holders):
                    self._gate_if_possible(module, Gate(self._active, path))
            for path, module in self._model.named_modules():
                is_around = any(f"{holder}.".startswith(f"{path}.") for holder in holders) or not path
                if not (is_around or is_container(module) or path.startswith(tuple(f"{h}." for h in holders))):
                    self._gate_if_possible(module, Gate(self._active, path, is_outer=True))
        except BaseException:
            self.remove()
            raise

    def _gate(self, module: torch.nn.Module, gate: Gate) -> None:
        registry = HookRegistry.get_or_create(module)
        if self._hook_name not in registry:  # A block that is held twice has one gate.
            registry.register_hook(self._hook_name, gate)
            self._gated.append(module)

    def _gate_if_possible(self, module: torch.nn.Module, gate: Gate) -> None:
        with contextlib.suppress(SettingError):  # Without a gate it runs at every step: no harm is done.
            self._gate(module, gate)

    def remove(self) -> None:
        for module in self._gated:
            HookRegistry.get_or_create(module).remove_hook(self._hook_name)
        self._gated.clear()

    def forget(self) -> None:
        for trace in list(self._traces.values()):
            trace.probe = None

    def key(self, inputs: Inputs) -> Trace | None:
        return self._traces.get(inputs.signature)

    def problem(self, key: Trace) -> str | None:
        return key.problem

    def signal(self) -> str:
        traces = list(self._traces.values())
        if not traces:
            return "the modulated input of the first block"
        leader, path = traces[-1].leader, self._attention
        return f"what reaches {leader.gate.path}.{leader.gate.index}" + (f".{path}" if path else "")

    def trouble(self) -> str | None:
        refused = next(reversed(self._refused.values()), None)
        return refused or next((trace.problem for trace in reversed(self._traces.values())), None)

    def run(self, inputs: Inputs, attempt: Attempt, forward: Forward) -> None:
        signature, spare = inputs.signature, inputs.spare()  # Before the model can change what it is given.
        trace = self._traces.get(signature)
        if trace is None and signature in self._refused:
            attempt.output = forward(inputs)
            return
        if trace is None:
            self._run_first(inputs, spare, signature, attempt, forward)
            return
        handles: list[RemovableHandle] = []

        def lead(call: Call, given: Given, guessed: bool) -> Mode:
            if attempt.mode == "compute":
                self._drop_old_probe(trace)
            begun_anew = attempt.signal is not None  # To be computed: it was asked before.
            if not begun_anew and attempt.sees(self._read(trace, call, given)):
                if attempt.of_output:
                    raise _Enough
                return "skip"
            if not (trace.probe_checked or guessed):
                handles.extend(self._check_probe(trace, call, given))
            return "compute"

        asks = lead if attempt.judges else None
        passage = Passage(trace, attempt.mode, attempt.outlook, asks, attempt.memo)
        try:
            try:
                attempt.output = self._pass(passage, inputs, forward)
            except Recompute:
                passage = Passage(trace, "compute", None, asks, attempt.memo)
                attempt.output = self._pass(passage, spare.spare(), forward)
        except _Enough:
            attempt.computed = False
        except Desynchronised as error:
            _logger.debug("%s: %s; the step is computed.", type(self._model).__name__, error)
            self._run_first(spare, spare.spare(), signature, attempt, forward)
            return
        finally:
            for handle in handles:
                handle.remove()
        if passage.mode == "skip":
            attempt.computed = False
        elif attempt.computed:
            if passage.synchronised:
                attempt.key, attempt.parts = trace, None if attempt.of_output else passage.residuals
            else:  # The blocks were called otherwise than before: what they added cannot be told apart.
                self._traces.pop(signature, None)

    def _pass(self, passage: Any, inputs: Inputs, forward: Forward) -> Any:
        outer, self._active.passage = self._active.passage, passage
        try:
            output = forward(inputs)
        finally:
            self._active.passage = outer
        if isinstance(passage, Passage):
            passage.finish()
        return output

    # -------------------------------------------------------------------------------------- the first time

    def _run_first(
        self, inputs: Inputs, spare: Inputs, signature: Hashable, attempt: Attempt, forward: Forward
    ) -> None:
        """Compute a step of a form that was not seen before, and learn from it."""
        known = self._traces.get(signature)
        tracer = Tracer(self._model, self._structure)
        attempt.output = self._pass(tracer, inputs, forward)
        attempt.computed = True
        try:
            trace, residuals = tracer.finish()
        except ValueError as error:
            if signature not in self._traces:  # One odd step does not spoil what is known of the others.
                self._refused[signature] = str(error)
                while len(self._refused) > _MOST_FORMS:
                    self._refused.pop(next(iter(self._refused)))
                self._warn(str(error))
            return
        del tracer
        given = learn(trace, residuals, spare, attempt.output, lambda p, i: self._pass(p, i, forward))
        if trace.problem is not None:
            self._warn(trace.problem)
        residuals = [None if slot in trace.idle_slots else residual for slot, residual in enumerate(residuals)]
        self._keep_gates(trace)
        quicker = self._traces.get(signature)
        trace = trace if quicker is None or quicker is known else quicker  # Another thread may have been quicker.
        self._traces[signature] = trace
        while len(self._traces) > _MOST_FORMS:
            self._traces.pop(next(iter(self._traces)))
        attempt.key, attempt.parts = trace, None if attempt.of_output else residuals
        if attempt.judges and attempt.signal is None and given is not None:
            attempt.signal = self._read(trace, trace.leader, given)

    def _warn(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            _logger.warning("%s is not cached: %s", type(self._model).__name__, problem)

    def _keep_gates(self, trace: Trace) -> None:
        """Once it is known what is constant, gates at anything else before the stacks are of no use."""
        if not self._traces:
            useful = {gate for gate, _ in trace.constants}
            for module in list(self._gated):
                registry = HookRegistry.get_or_create(module)
                gate = registry.get_hook(self._hook_name)
                if isinstance(gate, Gate) and gate.is_outer and gate not in useful:
                    registry.remove_hook(self._hook_name)
                    self._gated.remove(module)

    # -------------------------------------------------------------------------------------- the signal

    def _read(self, trace: Trace, call: Call, given: Given) -> Signal:
        stream = call.read(given.args, given.kwargs)[trace.stream]
        if trace.probe_is_wrong:
            return Signal(stream)
        if trace.probe is None:
            idle = trace.idle_in_twin
            trace.probe = ModulatedInput(given.block, given.args, given.kwargs, stream, idle)
            self._attention = trace.probe.path
            trace.idle_in_twin = trace.probe.idle
        return Signal(trace.probe(given.args, given.kwargs, stream), trace.probe.path)

    def _drop_old_probe(self, trace: Trace) -> None:
        """Make a new twin if the block has other modules or weights than the last was made of."""
        if trace.probe is not None and not trace.probe.is_current():
            trace.probe = trace.idle_in_twin = None
            trace.probe_checked = False

    def _check_probe(self, trace: Trace, call: Call, given: Given) -> list[RemovableHandle]:
        """See once whether the block's real attention is given what its twin's was; what is to be removed then."""
        value, probe, block = self._read(trace, call, given).value, trace.probe, given.block
        is_compiled = unwrapped(block) is not block or "_compiled_call_impl" in vars(block)
        if probe is None or probe.attention is None or is_compiled:
            trace.probe_checked = True
            return []
        passage = self._active.passage

        def compare(attention: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if self._active.passage is not passage or trace.probe_checked:  # Another thread's forward.
                return
            trace.probe_checked = True
            if not probe.agrees_with(value, args, kwargs):
                trace.probe_is_wrong, trace.probe, self._attention = True, None, None
                _logger.warning(
                    "What reaches the attention of %s cannot be told without running it; its steps are judged by the "
                    "block's own input.", type(block).__name__,
                )  # fmt: skip

        return [probe.attention.register_forward_pre_hook(compare, with_kwargs=True)]


class ExtractorRunner:
    """Runs a forward that its author took apart."""

    def __init__(self, model: torch.nn.Module, extractor: Extractor) -> None:
        self._model = model
        self._extractor = extractor

    def key(self, inputs: Inputs) -> Hashable:
        return inputs.signature

    def problem(self, key: Any) -> str | None:
        return None

    def signal(self) -> str:
        return f"the modulated input that {getattr(self._extractor, '__name__', 'its extractor')} gives"

    def trouble(self) -> str | None:
        return None

    def forget(self) -> None:
        pass

    def remove(self) -> None:
        pass

    def run(self, inputs: Inputs, attempt: Attempt, forward: Forward) -> None:
        context = self._extractor(self._model, *inputs.args, **inputs.kwargs)
        skip = attempt.mode == "skip" or (attempt.judges and attempt.sees(Signal(context.modulated_input)))
        attempt.computed, attempt.key = not skip, inputs.signature
        if skip and attempt.of_output:
            return
        if skip:
            assert attempt.outlook is not None
            hidden_states = attempt.outlook.added_to(context.hidden_states, 0)
        else:
            before = None if attempt.of_output else context.hidden_states.clone()  # The blocks may work in place.
            returned = context.run_transformer_blocks()
            hidden_states = returned[0] if isinstance(returned, (tuple, list)) else returned
            attempt.parts = None if before is None else added([before], [hidden_states])
        attempt.output = context.postprocess(hidden_states)
