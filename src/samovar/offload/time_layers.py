"""Layers that depend on time alone, computed ahead of the steps while their weights stay on the host.

At the first step of a run they visit the device once, layer by layer, to be computed for all steps to come, each step
with the shapes of its own call, so the bits are those of the model. Each step has a row of bytes on the host, a few
MiB: what its layers return, and what they are given, to be compared. A later call of the model finds its row by the
bits of the time, guidance and pooled text that it is given, and the layers return what is there. All of it is true as
long as the weights are what they were.

What the layers are given is compared with what was expected, on the device, and nobody waits for it: a difference is an
error at the next step, or at the end of the run. A layer that is given something of another form, or more often than
expected, is computed as ever, with its weights brought in for the call.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..arch.modules import named_parts, tensor_bytes, unwrapped
from ..core import nested
from ..core.errors import ModelError
from ..core.interop import is_compiled
from ..core.tensor_parts import bits
from ..hooks import NOT_BYPASSED, Run, current_run, install_hook, pipeline_hooks
from ..hooks.intercept import attached_registry
from ..trace.dry_run import CallForm
from ..trace.model_state import ModelState
from ..trace.time_only import Form, LayerCall, Tape, find_tape, is_autocast, is_plain
from .component import OffloadedComponent
from .device import Stage
from .host_tiers import Tier
from .layout import ALIGNMENT, held_by
from .load_hooks import HOOK as OFFLOAD_HOOK
from .load_hooks import LoadHook
from .sizes import Component
from .stats import TimeStats
from .timesteps import coming_inputs
from .weight_group import WeightGroup

HOOK = "samovar_time_layers"
"""The name of the hooks on layers that are computed ahead."""
MIN_IN_BLOCKS, MIN_OUTSIDE = 2**20, 2**26
"""Bytes of the smallest layers that are worth it. Outside of blocks a layer also runs in steps that a cache skips."""
_MAX_FORMS = 8
"""Forms of calls that are kept."""
_MAX_KEPT = 2**29
"""Bytes of rows that are kept of each form of call."""
_MAX_MISSES = 2
"""Guesses of what comes next that may fail in a row."""
_global_hooks = torch.nn.modules.module._global_forward_hooks
_global_pre_hooks = torch.nn.modules.module._global_forward_pre_hooks
Fetch = Callable[[str], AbstractContextManager[torch.nn.Module]]


# ------------------------------------------------------------------------------------------------ the choice


def may_have_time_layers(component: Component) -> bool:
    """Whether a component has any layer that is large enough."""
    if component.role != "denoiser":
        return False
    leaves = (module for module in unwrapped(component.module).modules() if not module._modules)
    return any(tensor_bytes([leaf]) >= MIN_IN_BLOCKS for leaf in leaves)


def with_time_layers(
    components: Iterable[Component], calls: Mapping[str, CallForm]
) -> tuple[list[Component], dict[str, str]]:
    """The components, each with the layers that its call shows to depend on time alone, and why others are not."""
    found, reasons = [], {}
    for component in components:
        if component.name in calls and may_have_time_layers(component):
            call = calls[component.name]
            component, reasons[component.name] = with_layers_of(component, call.args, dict(call.kwargs))
        found.append(component)
    return found, reasons


def with_layers_of(component: Component, args: Any, kwargs: Any) -> tuple[Component, str]:
    """A component with the layers that a call with these arguments shows to depend on time alone, and which such layers
    stay what they are."""
    tape = find_tape(unwrapped(component.module), args, kwargs, MIN_IN_BLOCKS)
    if tape.problem:
        return replace(component, time_layers={}), f"whether layers see time alone is unknown: {tape.problem}"
    layers, left = choose_layers(component, tape.layers)
    tensors = list(nested.tensors((args, kwargs)))
    reads_text = any(tensors[place].ndim > 1 for place in tape.inputs)
    return replace(component, time_layers=layers, reads_text=reads_text), left


def choose_layers(component: Component, paths: Iterable[str]) -> tuple[dict[str, torch.nn.Module], str]:
    """Those of some time-only layers that can be computed ahead and are worth it, and which are not."""
    model = unwrapped(component.module)
    parts, blocks = named_parts(model), tuple(f"{block}." for block in component.blocks)
    compiled = {id(unwrapped(part)) for part in component.module.modules() if is_compiled(part)}

    def reason(path: str) -> str:
        """Why a layer is not computed ahead; nothing if it is."""
        layer = parts[path]
        above = [parts[path[:end]] for end in range(len(path)) if path[end] == "."]
        if any(id(part) in compiled for part in (layer, *above, model)):
            return "compiled"
        if not is_free(layer):
            return "hooked by others"
        if any(id(tensor) in component.skip for tensor in held_by(layer)):
            return "shared"
        return "small" if tensor_bytes([layer]) < (MIN_IN_BLOCKS if path.startswith(blocks) else MIN_OUTSIDE) else ""

    reasons = {path: reason(path) for path in paths}
    left = Counter(filter(None, reasons.values()))
    found = {path: parts[path] for path, why in reasons.items() if not why}
    return found, ", ".join(f"{count} {why}" for why, count in left.items())


def is_free(layer: torch.nn.Module) -> bool:
    """Whether nobody but us looks on when a layer is called."""
    registry = attached_registry(layer)
    return (
        is_plain(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks or _global_hooks or _global_pre_hooks)
        and (registry is None or all(name in (HOOK, OFFLOAD_HOOK) for name, _ in registry.chain))
    )


# ------------------------------------------------------------------------------------------------ what is computed


class _Call(NamedTuple):
    """A call of a layer, and where its tensors are in a row."""

    form: LayerCall
    returns: slice
    given: slice

    def output(self, row: torch.Tensor) -> torch.Tensor:
        """What it returns at the step of this row."""
        form = self.form.returns
        return row[self.returns].view(form.dtype).view(form.shape)

    def differs(self, given: Sequence[torch.Tensor], row: torch.Tensor) -> torch.Tensor | None:
        """Whether it is given something else than was expected, as a tensor; None if that has another form."""
        forms = tuple(Form(tensor.shape, tensor.dtype) for tensor in given)
        if forms != self.form.given or any(tensor.device != row.device for tensor in given):
            return None
        return (bits_of(given) != row[self.given]).any()


class KnownSteps:
    """The steps of one form of call whose outputs are known."""

    def __init__(self, tape: Tape, layers: Sequence[int]) -> None:
        """`layers`: the identity of the layer of each call."""
        self.tape = tape
        self.calls: list[_Call] = []
        self.by_layer: dict[int, list[_Call]] = {}
        self._size = 0
        """Bytes of a row."""
        for form, layer in zip(tape.layer_calls, layers, strict=True):
            start = -(-self._size // ALIGNMENT) * ALIGNMENT
            middle = start + form.returns.num_bytes
            self._size = middle + sum(given.num_bytes for given in form.given)
            self.calls.append(_Call(form, slice(start, middle), slice(middle, self._size)))
            self.by_layer.setdefault(layer, []).append(self.calls[-1])
        self._misses = 0
        self.forget()

    def forget(self) -> None:
        """Drop what was computed."""
        self._rows: dict[bytes, torch.Tensor] = {}

    @property
    def is_guessing(self) -> bool:
        """Whether it is worth to compute what may come."""
        return self._misses < _MAX_MISSES

    def find(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The row of the step at which the model is given these. This waits for the device."""
        row = self._rows.get(_key_of(inputs))
        if self._rows:
            self._misses = self._misses + 1 if row is None else 0
        return row

    def compute(
        self, model: torch.nn.Module, steps: Sequence[Sequence[torch.Tensor]], fetch: Fetch, stage: Stage
    ) -> torch.Tensor:
        """Compute the layers for some steps. The row of the first is returned."""
        count = len(steps)
        with torch.inference_mode(False):
            memory = torch.empty((2, count * self._size), dtype=torch.uint8, pin_memory=stage.device.type == "cuda")
        made, rows = memory[0], memory[1].view(count, self._size)
        gathered: list[tuple[slice, torch.Tensor]] = []
        """Where in a row, and that of all steps together: it comes as one copy that nobody waits for."""
        for call, (given, outputs) in zip(self.calls, self.tape.play(model, steps, fetch), strict=True):
            for at, tensors in ((call.returns, outputs), (call.given, [one for each in given for one in each])):
                gathered.append((at, made[count * at.start : count * at.stop]))
                gathered[-1][1].copy_(bits_of(tensors), non_blocking=True)
        stage.host_waits(stage.mark_computed())
        for at, part in gathered:
            rows[:, at] = part.view(count, -1)
        self._rows |= zip(map(_key_of, steps), rows, strict=True)
        for key in list(self._rows)[: -max(_MAX_KEPT // max(self._size, 1), count)]:
            del self._rows[key]
        return rows[0]


def _key_of(inputs: Sequence[torch.Tensor]) -> bytes:
    """The bits of what the model is given at a step."""
    return b"".join(bits(tensor).cpu().numpy().tobytes() for tensor in inputs)


def bits_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Some tensors as bytes, one after the other."""
    first = tensors[0]
    if len(tensors) > 1 and all(tensor.dtype is first.dtype and tensor.shape == first.shape for tensor in tensors):
        return bits(torch.stack(tuple(tensors)))  # One copy of all.
    return torch.cat([bits(tensor) for tensor in tensors]) if len(tensors) > 1 else bits(first)


@dataclass
class _Forward:
    """One call of the model."""

    arguments: Any
    thread: int
    row: torch.Tensor | None = None
    """Outputs and inputs of its step, on the device."""
    calls: dict[int, Iterator[_Call]] | None = None
    """The calls of each layer that are still to come; None before the first of all."""


class TimeLayers:
    """The time-only layers of one component."""

    def __init__(self, component: OffloadedComponent, tier: Tier) -> None:
        whole, self._stage, self.lock = component.whole, component.stage, component.lock
        self.layers = dict(whole.time_layers)
        self.stats = self._stage.stats.ahead.setdefault(whole.name, TimeStats())
        self.stats.layers, self.stats.num_bytes = len(self.layers), tensor_bytes(list(self.layers.values()))
        self._component, self._name, self._model = component, whole.name, unwrapped(whole.module)
        self.groups = {id(layer): WeightGroup(layer, self._stage, component.host) for layer in self.layers.values()}
        for group in self.groups.values():
            group.tier = tier
        self._known: dict[Hashable, KnownSteps | None] = {}
        """By form of call; None if none of the layers is on its tape."""
        self._states: list[ModelState] = []
        """The model as it was when that was learned, and how its adapters were switched."""
        self._changes: list[int] = []
        """Of the weights of each layer, as seen so far."""
        self._run: Run | None = None
        self._forward: _Forward | None = None
        self._doubts: list[torch.Tensor] = []
        """Whether a layer was given something unexpected, on the device, by call."""

    def install(self, undo: contextlib.ExitStack) -> None:
        """Put hooks on the layers, and keep their weights on the host."""
        with self._component.host.adopting():
            self._changes = [group.prepare() for group in self.groups.values()]
        for layer in self.layers.values():
            install_hook(undo, layer, HOOK, _LayerHook(self._component, self, layer))

    def restore(self) -> None:
        """Let the weights go for good."""
        self._forget()
        for group in self.groups.values():
            group.restore()

    def _forget(self) -> None:
        """Drop what was computed ahead."""
        self._known.clear()
        self._doubts.clear()
        self._forward = self._run = None

    # ------------------------------------------------------------------------------------------------ a forward

    @contextlib.contextmanager
    def calling(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Around a call of the model with the arguments that the caller gave."""
        with self.lock:
            self._forward = _Forward((args, kwargs), threading.get_ident())
            try:
                yield
                run = current_run()
                if run is None or OFFLOAD_HOOK not in pipeline_hooks(run.pipeline):
                    self.settle()  # Nobody will tell of the end of the run.
            finally:
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

    def answer(self, layer: torch.nn.Module, given: Any) -> Any:
        """What a layer returns in the running forward; NOT_BYPASSED if it must be computed, as it must be where others
        look on."""
        forward = self._forward
        if forward is None or forward.thread != threading.get_ident():
            return NOT_BYPASSED
        if torch.is_grad_enabled() or is_autocast() or not is_free(layer):
            return NOT_BYPASSED
        if forward.calls is None:
            forward.calls = {}
            self._look_up(forward)
        call = next(forward.calls.get(id(layer), iter(())), None)
        if call is None or forward.row is None:
            return NOT_BYPASSED
        is_other = call.differs(list(nested.tensors(given)), forward.row)
        if is_other is None:
            return NOT_BYPASSED
        self._doubts.append(is_other)
        return call.output(forward.row)

    def _look_up(self, forward: _Forward) -> None:
        """Find what was computed for a call of the model, or compute it now for this step and those to come."""
        run = current_run()
        is_new_run, self._run = run is not self._run, run
        self._check_model(is_new_run)
        known = self._steps_of(forward.arguments)
        if known is None:
            return
        tensors = list(nested.tensors(forward.arguments))
        inputs = [tensors[place].to(self._stage.device) for place in known.tape.inputs]
        row = known.find(inputs)
        self.settle()  # The device was waited for just now.
        if row is None:
            steps = [inputs, *(coming_inputs(run, inputs) if known.is_guessing else ())]
            row = known.compute(self._model, steps, self._visiting, self._stage)
            self.stats.computed_steps += len(steps)
        else:
            self.stats.found_forwards += 1
        forward.row = row.to(self._stage.device, non_blocking=True, copy=True)
        forward.calls = {layer: iter(calls) for layer, calls in known.by_layer.items()}

    def _steps_of(self, arguments: Any) -> KnownSteps | None:
        form = torch.get_num_threads(), nested.signature(arguments)  # On a CPU, threads round in their own ways.
        if form not in self._known:
            if len(self._known) >= _MAX_FORMS:
                self._known.clear()
            parts = named_parts(self._model)
            paths = [path for path, part in parts.items() if id(part) in self.groups]
            tape = find_tape(self._model, arguments[0], arguments[1], 0, among=paths)
            layers = [id(parts[path]) for path in tape.layers]
            self._known[form] = KnownSteps(tape, layers) if layers else None
        return self._known[form]

    def _check_model(self, is_new_run: bool) -> None:
        """Drop what depends on weights or parts of the model that have changed, or on adapters that were switched."""
        model, adapters = self._states or (None, None)
        if model is None or adapters is None or not adapters.holds() or (is_new_run and not model.holds()):
            parts = self._model.modules(), ()
            self._states = [ModelState(each, kernels=True, adapted=self._model) for each in parts]
            self._known.clear()
        for group in self.groups.values():
            group.is_due |= is_new_run
        changes = [group.prepare() for group in self.groups.values()]
        if changes != self._changes:
            self._changes = changes
            for known in filter(None, self._known.values()):
                known.forget()

    @contextlib.contextmanager
    def _visiting(self, path: str) -> Iterator[torch.nn.Module]:
        """Inside, the weights of a layer are on the device."""
        layer = self._model.get_submodule(path)
        group = self.groups[id(layer)]
        try:
            group.load()
            group.lend_own()
            yield layer
        finally:
            group.unload()


class _LayerHook(LoadHook):
    """Answers for a layer, or brings its weights in."""

    may_be_left_out = False

    def __init__(self, component: OffloadedComponent, layers: TimeLayers, layer: torch.nn.Module) -> None:
        super().__init__(component, layers.groups[id(layer)])
        self._layers = layers

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._layers.answer(module, (args, kwargs))

    def _begin(self, lent: list[WeightGroup]) -> None:
        self._stage.check_call()
        self._layers.stats.live_calls += 1
        self._group.load()
        self._group.lend_own()

    def _end(self) -> None:
        self._group.unload()

    _fail = _end
