"""How do layers that depend on time alone do without the device?

Their weights stay on the host. At the first step of a run they visit the device once, layer by layer, to be computed
for all steps to come, each step with the shapes of its own call, so the bits are those of the model. The outputs, a few
MiB a step, wait on the host. A later call of the model with the same time, guidance and pooled text finds its outputs
by the bits of these, and the layers return them.

What the layers are given is checked. In the first forward of a run, and at the first of the layers that are given the
same, that is before an output is used: a layer that is given something else is computed as ever, with its weights
brought in for the call. Everything else is compared behind the forward, and a difference is an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..arch.modules import named_parts, tensor_bytes, unwrapped
from ..core import nested
from ..core.adapters import AdapterStates
from ..core.errors import ModelError, SettingError
from ..hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook, Run, install_hook, pipeline_hooks
from ..hooks.runs import run_around
from ..trace.tape import Tape, tensors_in
from ..trace.time_only import find_tape, is_autocast, is_plain
from .ahead import HOOK, is_free, is_watched
from .host import HostMemory
from .known_steps import KnownSteps, SeenWeights, bits_of, key_of
from .moving import HOOK as OFFLOAD_HOOK
from .sizes import Component
from .staging import Stage
from .stats import TimeStats
from .tiers import Tier
from .timesteps import coming_inputs
from .weight_groups import WeightGroup
from .weights import held_by

_MOST_FORMS = 8
"""Forms of calls that are kept."""
_MOST_SURPRISES, _FORGIVEN = 3, 0.25
"""Forwards whose layers may be given something unexpected, and how much of one is forgiven by a forward without."""
_MOST_UNPINNED = 4
"""Visits to the device from memory that is not pinned: few for models that need one for each number of steps alone."""


@dataclass
class _Forward:
    """One call of the model."""

    args: Any
    kwargs: Any
    thread: int
    known: KnownSteps | None = None
    form: Hashable = None
    row: torch.Tensor | None = None
    """Outputs and inputs of its step, on the device."""
    is_looked_up: bool = False
    settles_at_once: bool = True
    """Whether nobody will tell of the end of the run."""
    counts: dict[int, int] = field(default_factory=dict)
    """How often each layer was called."""
    checked: set[int] = field(default_factory=set)
    """The kinds of inputs that were as expected."""
    outputs: Sequence[torch.Tensor] = ()
    """By call of a layer."""
    given: list[torch.Tensor] = field(default_factory=list)
    """What layers were given, to be compared after the forward."""
    numbers: list[int] = field(default_factory=list)
    """The numbers of their calls."""


class TimeLayers:
    """The time-only layers of one component."""

    def __init__(
        self, component: Component, stage: Stage, host: HostMemory, lock: threading.RLock, tier: Tier, may_pin: bool
    ) -> None:
        self.layers = dict(component.time_layers)
        self.lock = lock
        """Held while the model is called."""
        self.stats = stage.stats.ahead.setdefault(component.name, TimeStats())
        self.stats.layers, self.stats.num_bytes = len(self.layers), tensor_bytes(list(self.layers.values()))
        self.problem = ""
        """Why nothing is computed ahead any more, if so."""
        self._tier, self._host = tier, host
        self._num_visits, self._may_pin = 0, may_pin
        self._name, self._model, self._stage = component.name, unwrapped(component.module), stage
        self._groups = {
            id(layer): WeightGroup(f"{component.name}.{path}", partial(held_by, layer), stage, host)
            for path, layer in self.layers.items()
        }
        self._tapes: OrderedDict[Hashable, Tape | None] = OrderedDict()
        self._known: dict[Hashable, KnownSteps] = {}
        self._seen: list[SeenWeights] = []
        self._parts: list[torch.nn.Module] = []
        self._adapters = AdapterStates(self._model)
        self._run: Run | None = None
        self._forward: _Forward | None = None
        self._doubts: list[torch.Tensor] = []
        """Whether a layer was given something unexpected, on the device, by forward."""
        self._surprises = 0.0
        self._is_gone = False

    def install(self, undo: contextlib.ExitStack) -> None:
        """Put hooks on the model and on the layers, and keep their weights on the host."""
        self._adopt(self._tier)
        install_hook(undo, self._model, HOOK, _CallHook(self))
        for layer in self.layers.values():
            install_hook(undo, layer, HOOK, _LayerHook(self))

    def _adopt(self, tier: Tier) -> None:
        with self._host.adopting():
            for group in self._groups.values():
                group.is_pinned, group.tier = tier == "pinned", tier
                group.adopt()
        if tier == "pinned":
            self._host.pin(wire for group in self._groups.values() for wire in group.wires)

    def restore(self) -> None:
        """Let the weights go for good."""
        self._is_gone = True
        self._forget()
        for group in self._groups.values():
            group.unload()  # If its call is not over.
            group.restore()

    def _forget(self) -> None:
        """Drop what was computed ahead."""
        self._known.clear()
        self._tapes.clear()
        self._doubts.clear()
        self._forward = self._run = None

    # ------------------------------------------------------------------------------------------------ a forward

    def begin(self, args: Any, kwargs: Any) -> None:
        """The model is called."""
        self._forward = _Forward(args, kwargs, threading.get_ident())

    def end(self) -> None:
        """Compare what the layers were given with what was expected, without waiting if the end of the run will."""
        forward, self._forward = self._forward, None
        if forward is None or forward.known is None:
            return
        if forward.given and forward.row is not None:
            expected = forward.known.expected_in(forward.row, forward.numbers)
            is_other = (bits_of(forward.given) != expected).any()
        if forward.known.is_proved and forward.given:
            self._doubts.append(is_other)
        elif sum(forward.counts.values()) == forward.known.num_calls:
            self._surprises = max(self._surprises - _FORGIVEN, 0.0)
            # If the model has written into what it gave a layer, this must be compared before each output is used.
            forward.known.is_proved = bool(forward.given) and not bool(is_other)
        if forward.settles_at_once:
            self.settle()

    def drop_forward(self) -> None:
        """The call of the model has failed."""
        self._forward = None

    def settle(self) -> None:
        """Wait for the comparisons, and raise if one has found a difference."""
        doubts, self._doubts = self._doubts, []
        if doubts and bool(torch.stack(doubts).any()):
            self._forget()
            raise ModelError(
                f"Layers of {self._name} that see time alone were given other values than were computed ahead, so the "
                "last forward is wrong. Something in the model depends on more than its arguments. Turn this off: "
                "OffloadConfig(precompute=False)."
            )

    def answer(self, layer: torch.nn.Module, args: Any, kwargs: Any, is_free: bool) -> Any:
        """What a layer returns in the running forward; NOT_BYPASSED if it must be computed, as it must be where others
        look on."""
        forward = self._forward
        if forward is None or self.problem or forward.thread != threading.get_ident() or torch.is_grad_enabled():
            return NOT_BYPASSED
        if is_autocast() or not is_free:
            return NOT_BYPASSED
        if not forward.is_looked_up:
            forward.is_looked_up = True
            self._look_up(forward)
        known, row = forward.known, forward.row
        if known is None or row is None:
            return NOT_BYPASSED
        calls, nth = known.calls.get(id(layer), ()), forward.counts.get(id(layer), 0)
        if nth >= len(calls):
            return NOT_BYPASSED
        forward.counts[id(layer)] = nth + 1
        number = calls[nth]
        is_one = not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor)
        tensors = list(args) if is_one else tensors_in((args, kwargs))
        is_alike = [(t.shape, t.dtype) for t in tensors] == known.forms[number]
        if not is_alike or any(t.device != row.device for t in tensors):
            self._surprise(forward)
            return NOT_BYPASSED
        is_checked = known.is_proved and known.kinds[number] in forward.checked
        if not is_checked and not torch.equal(bits_of(tensors), known.expected_in(row, [number])):
            self._surprise(forward)
            return NOT_BYPASSED
        forward.checked.add(known.kinds[number])
        forward.given += tensors
        forward.numbers.append(number)
        return forward.outputs[number]

    def _surprise(self, forward: _Forward) -> None:
        """A layer is given something unexpected. The rest of the forward is computed, and the next one looks again."""
        self._known.pop(forward.form, None)
        self._tapes.pop(forward.form, None)
        forward.known = None
        self.stats.surprises += 1
        self._surprises += 1
        if self._surprises >= _MOST_SURPRISES:
            self.problem = "what layers are given was foreseen wrongly time and again"

    def _look_up(self, forward: _Forward) -> None:
        """Find what was computed for a call of the model, or compute it now for this step and those to come."""
        run = run_around(self._model)
        is_new_run, self._run = run is not self._run, run
        forward.settles_at_once = run is None or OFFLOAD_HOOK not in pipeline_hooks(run.pipeline)
        self._check_model(is_new_run)
        form = forward.form = self._adapters.number(), _numerics(), nested.signature((forward.args, forward.kwargs))
        tape = self._tape(form, forward)
        if tape is None:
            return
        tensors = list(nested.tensors((forward.args, forward.kwargs)))
        inputs = [tensors[place].to(self._stage.device) for place in tape.inputs]
        known = self._known.get(form)
        if known is None:
            parts = named_parts(self._model)
            known = self._known[form] = KnownSteps(tape, [id(parts[path]) for path in tape.layers])
        if is_new_run:
            known.is_proved = False
        row = known.find(key_of(inputs))
        self.settle()  # The device was waited for just now.
        if row is None:
            self._num_visits += 1
            if self._may_pin and self._num_visits > _MOST_UNPINNED:
                self._may_pin = False
                self._adopt("pinned")
                self._seen = [SeenWeights(layer) for layer in self.layers.values()]  # They may have moved.
            steps = [inputs, *(coming_inputs(run, inputs) if known.is_guessing else ())]
            with self._visits(tape) as fetch:
                row = known.compute(self._model, steps, fetch, self._stage)
            self.stats.computed_steps += len(steps)
        else:
            self.stats.found_forwards += 1
        forward.known, forward.row = known, row.to(self._stage.device, non_blocking=True, copy=True)
        forward.outputs = known.outputs_in(forward.row)

    def _tape(self, form: Hashable, forward: _Forward) -> Tape | None:
        if form not in self._tapes:
            paths = [path for path, part in named_parts(self._model).items() if id(part) in self._groups]
            self._tapes[form] = find_tape(self._model, forward.args, forward.kwargs, 0, among=paths).tape
            while len(self._tapes) > _MOST_FORMS:
                self._known.pop(self._tapes.popitem(last=False)[0], None)
        self._tapes.move_to_end(form)
        return self._tapes[form]

    def _check_model(self, is_new_run: bool) -> None:
        """Drop what depends on weights or parts of the model that have changed. What depends on how its adapters are
        switched has a form of its own, and is there again when they are switched back."""
        parts = list(self._model.modules()) if is_new_run else self._parts
        if len(parts) != len(self._parts) or any(one is not two for one, two in zip(parts, self._parts)):  # noqa: B905
            self._parts = parts
            self._tapes.clear()
            self._known.clear()
        if not self._seen or not all(weight.is_same(is_new_run) for weight in self._seen):
            self._seen = [SeenWeights(layer) for layer in self.layers.values()]
            self._known.clear()

    # ------------------------------------------------------------------------------------------------ on the device

    @contextlib.contextmanager
    def _visits(self, tape: Tape) -> Iterator[Callable[[str], contextlib.AbstractContextManager[torch.nn.Module]]]:
        """Inside, the layers of a tape visit the device in order. Each is sent while the one before it computes."""
        parts = named_parts(self._model)
        order = [parts[path] for path in tape.layers]
        numbers = iter(range(len(order)))
        marks: dict[int, Any] = {}

        def send(layer: torch.nn.Module) -> None:
            if id(layer) not in marks:
                group = self._groups[id(layer)]
                group.prepare()
                group.load()
                marks[id(layer)] = self._stage.mark_copied()

        @contextlib.contextmanager
        def fetch(path: str) -> Iterator[torch.nn.Module]:
            number = next(numbers)
            layer, following = order[number], order[number + 1 : number + 2]
            for one in (layer, *following):
                send(one)
            self._stage.compute_waits(marks[id(layer)])
            yield layer
            if layer not in following:
                del marks[id(layer)]
                self._groups[id(layer)].unload()

        try:
            yield fetch
        finally:
            for identity in marks:
                self._groups[identity].unload()

    @contextlib.contextmanager
    def on_device(self, layer: torch.nn.Module) -> Iterator[None]:
        """Inside, a layer's weights are on the device for a call."""
        with self.lock:
            if self._is_gone:
                raise SettingError(
                    f"The offload of {self._name} was changed or taken off while another thread was about to call it. "
                    "Wait for running calls to end before you do so."
                )
            self._stage.check_call()
            self.stats.live_calls += 1
            group = self._groups[id(layer)]
            group.prepare()
            group.load()
            try:
                self._stage.compute_waits(self._stage.mark_copied())
                yield
            finally:
                group.unload()


class _CallHook(ModelHook):
    """Tells of the model's calls, with the arguments that the caller gave."""

    order = HookOrder.OUTERMOST

    def __init__(self, layers: TimeLayers) -> None:
        self._layers = layers

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._layers.lock.acquire()
        self._layers.begin(args, kwargs)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._layers.end()
        self._layers.lock.release()
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        self._layers.drop_forward()  # Also if `end` raised.
        self._layers.lock.release()


class _LayerHook(ModelHook):
    """Answers for a layer, or brings its weights in."""

    order = HookOrder.OFFLOAD

    def __init__(self, layers: TimeLayers) -> None:
        self._layers = layers
        self._open: list[contextlib.AbstractContextManager[None]] = []
        self._registry: HookRegistry | None = None
        self._chain: Any = None
        self._is_free = False

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._layers.answer(module, args, kwargs, self._is_alone(module))

    def _is_alone(self, module: torch.nn.Module) -> bool:
        """Whether nobody but us looks on. Most of that is known as long as the hooks are the same."""
        registry = self._registry = self._registry or HookRegistry.get_or_create(module)
        if registry.run is not self._chain:
            self._chain, self._is_free = registry.run, is_free(module)
        return self._is_free and is_plain(module) and not is_watched(module)

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        brought = self._layers.on_device(module)
        brought.__enter__()
        self._open.append(brought)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._open.pop().__exit__(None, None, None)
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        self._open.pop().__exit__(None, None, None)


def _numerics() -> Hashable:
    """What else the bits of an output depend on."""
    return torch.get_float32_matmul_precision(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
