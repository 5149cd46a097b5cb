"""How do layers that depend on time alone do without the device?

Their weights stay on the host. At the first step of a run they visit the device once, layer by layer, to be computed
for all steps to come, each step with the shapes of its own call, so the bits are those of the model. The outputs, a few
MiB a step, wait on the host. A later call of the model with the same time, guidance and pooled text finds its outputs
by the bits of these, and the layers return them.

What the layers are given is checked: in the first forward of a run before each output is used, and after that once a
forward, behind it. A layer that is called otherwise is computed as ever, with its weights brought in for the call.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import tree
from ..arch.modules import named_parts, tensor_bytes, unwrapped
from ..errors import ModelError
from ..hooks import NOT_BYPASSED, HookOrder, ModelHook, Run
from ..hooks.runs import run_around
from ..other_libraries import compiled_call
from ..trace.time_only import Tape, find_tape
from .host import HostMemory
from .moving import install_hooks
from .sizes import Component
from .staging import Stage
from .tiers import Tier
from .timesteps import coming_inputs
from .weight_groups import WeightGroup
from .weights import ALIGNMENT, tensors_of

HOOK = "samovar_time_layers"
"""The name of our hooks."""
_MOST_KEPT = 2**30
"""Bytes of outputs that are kept on the host."""
_PROBES = 8
"""Numbers of each weight that are looked at to see whether it was changed without torch counting."""


LEAST_IN_BLOCKS, LEAST_OUTSIDE = 2**20, 2**26
"""Bytes of the smallest layers that are worth it. Outside of blocks a layer also runs in steps that a cache skips."""


def find_time_layers(component: Component, args: Any, kwargs: Any) -> dict[str, torch.nn.Module]:
    """The layers of a component that a call with these arguments shows to depend on time alone."""
    model = unwrapped(component.module)
    tape = find_tape(model, args, kwargs, LEAST_IN_BLOCKS)
    parts = named_parts(model)
    found: dict[str, torch.nn.Module] = {}
    for path in dict.fromkeys(() if tape is None else tape.layers):
        layer, blocks = parts[path], tuple(f"{block}." for block in component.blocks)
        is_watched = bool(layer._forward_hooks or layer._forward_pre_hooks)
        above = [parts[path[:end]] for end in range(len(path)) if path[end] == "."]
        is_compiled = any(compiled_call(part) is not None for part in (layer, *above, model))
        least = LEAST_IN_BLOCKS if path.startswith(blocks) else LEAST_OUTSIDE
        is_own = all(id(tensor) not in component.skip for tensor in tensors_of(layer))
        if not is_watched and not is_compiled and is_own and tensor_bytes([layer]) >= least:
            found[path] = layer
    return found


class _Part(NamedTuple):
    """Where a tensor is in a row."""

    start: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype

    def view(self, row: torch.Tensor) -> torch.Tensor:
        return row[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass
class _Known:
    """What was computed ahead for one form of arguments."""

    tape: Tape
    keys: torch.Tensor
    """A row of bytes for each step: what the model was given."""
    rows: torch.Tensor
    """A row of bytes for each step, on the host: the outputs of the layers, then their inputs."""
    outputs: list[_Part]
    """By call of a layer."""
    inputs: list[list[_Part]]
    is_proved: bool = False
    """Whether a forward of this run has shown that the layers are given what was expected."""

    @property
    def num_bytes(self) -> int:
        return self.rows.numel()


@dataclass
class _Forward:
    """One call of the model."""

    args: Any
    kwargs: Any
    known: _Known | None = None
    row: torch.Tensor | None = None
    """Outputs and inputs of its step, on the device."""
    is_looked_up: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    given: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What layers were given and what was expected, to be compared after the forward."""


@dataclass
class TimeStats:
    """What was computed ahead, since the offload was attached."""

    computed_steps: int = 0
    found_steps: int = 0
    """Forwards that found their outputs."""
    live_calls: int = 0
    """Calls of layers whose weights were brought in for the call."""


class TimeLayers:
    """The time-only layers of one component."""

    def __init__(
        self, name: str, model: torch.nn.Module, paths: Sequence[str], stage: Stage, host: HostMemory, tier: Tier
    ) -> None:
        parts = named_parts(model)
        self.layers: dict[str, torch.nn.Module] = {path: parts[path] for path in paths}
        self.stats = TimeStats()
        self._tier = tier
        self._name, self._model, self._stage = name, unwrapped(model), stage
        self._groups = {
            path: WeightGroup(f"{name}.{path}", lambda layer=layer: tensors_of(layer), stage, host)
            for path, layer in self.layers.items()
        }
        self._paths = {id(layer): path for path, layer in self.layers.items()}
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._tapes: dict[Hashable, Tape | None] = {}
        self._state: list[Any] = []
        self._structure: tuple[int, ...] = ()
        self._run: Run | None = None
        self._forward: _Forward | None = None
        self._doubt: torch.Tensor | None = None
        """Whether a layer was given something unexpected in the last forward, on the device."""

    def install(self, undo: contextlib.ExitStack) -> None:
        """Put hooks on the model and on the layers, and keep their weights on the host."""
        for group in self._groups.values():
            group.is_pinned, group.tier = False, self._tier
            group.adopt()
        install_hooks(undo, HOOK, [(self._model, _CallHook(self))])
        install_hooks(undo, HOOK, [(layer, _LayerHook(self, path)) for path, layer in self.layers.items()])
        undo.callback(self.forget)

    def restore(self) -> None:
        """Let the weights go for good."""
        for group in self._groups.values():
            group.restore()

    def forget(self) -> None:
        """Drop what was computed ahead."""
        self._known.clear()
        self._tapes.clear()
        self._forward = self._run = self._doubt = None

    # ------------------------------------------------------------------------------------------------ a forward

    def begin(self, args: Any, kwargs: Any) -> None:
        self.end()
        self._forward = _Forward(args, kwargs)

    def end(self) -> None:
        """Compare what the layers were given with what was expected, without waiting."""
        forward, self._forward = self._forward, None
        if forward is None or forward.known is None:
            return
        if sum(forward.counts.values()) + len(forward.counts) == len(forward.known.tape.layers):
            forward.known.is_proved = True
        if forward.given:
            given = torch.cat([_bits(one) for one, _ in forward.given])
            expected = torch.cat([_bits(other) for _, other in forward.given])
            self._doubt = (given != expected).any().reshape(1)

    def end_run(self) -> None:
        """Wait for the last comparison."""
        doubt, self._doubt = self._doubt, None
        if doubt is not None and doubt.item():
            self._raise()

    def answer(self, path: str, args: Any, kwargs: Any) -> Any:
        """What a layer returns in the running forward; NOT_BYPASSED if it must be computed."""
        forward = self._forward
        if forward is None or torch.is_grad_enabled():
            return NOT_BYPASSED
        if not forward.is_looked_up:
            forward.is_looked_up = True
            self._look_up(forward)
        known = forward.known
        if known is None or forward.row is None:
            return NOT_BYPASSED
        nth = forward.counts[path] = forward.counts.get(path, -1) + 1
        calls = [number for number, layer in enumerate(known.tape.layers) if layer == path]
        number = calls[nth] if nth < len(calls) else None
        tensors = list(tree.tensors((args, kwargs)))
        if number is None or not _are_alike(tensors, known.inputs[number]):
            return NOT_BYPASSED
        pairs = [(one, part.view(forward.row)) for one, part in zip(tensors, known.inputs[number], strict=True)]
        if known.is_proved:
            forward.given += pairs
        elif not all(torch.equal(_bits(one), _bits(other)) for one, other in pairs):
            self._drop(known)
            forward.known = None
            return NOT_BYPASSED
        return known.outputs[number].view(forward.row)

    def _look_up(self, forward: _Forward) -> None:
        """Find what was computed for a call of the model, or compute it now for this step and those to come."""
        run = run_around(self._model)
        is_new_run = run is not self._run
        self._run = run
        self._check_weights(is_new_run)
        form = tree.signature((forward.args, forward.kwargs))
        if form not in self._tapes:
            paths = [path for path, part in named_parts(self._model).items() if id(part) in self._paths]
            self._tapes[form] = find_tape(self._model, forward.args, forward.kwargs, 0, among=paths)
        tape = self._tapes[form]
        if tape is None:
            return
        tensors = list(tree.tensors((forward.args, forward.kwargs)))
        inputs = [tensors[place].to(self._stage.device) for place in tape.inputs]
        key = torch.cat([_bits(tensor) for tensor in inputs]) if inputs else torch.zeros(0, dtype=torch.uint8)
        known, index = self._known.get(form), None
        if known is not None:
            index = self._index_of(known, key)
        if known is None or index is None:
            known, index = self._compute(form, tape, key, [inputs, *coming_inputs(run, inputs)]), 0
        elif is_new_run:
            known.is_proved = False
        self.stats.found_steps += 1
        forward.known = known
        forward.row = known.rows[index].to(self._stage.device, non_blocking=True, copy=True)

    def _index_of(self, known: _Known, key: torch.Tensor) -> int | None:
        """The step with this key. This waits for the device, and so learns of the last forward's doubts, too."""
        same = (known.keys == key).all(1)
        doubt, self._doubt = self._doubt, None
        found = (same if doubt is None else torch.cat([same, doubt])).tolist()
        if doubt is not None and found.pop():
            self._raise()
        return found.index(True) if True in found else None

    def _raise(self) -> None:
        self.forget()
        raise ModelError(
            f"Layers of {self._name} that see time alone were given other values than were computed ahead, so the last "
            "forward is wrong. Something in the model depends on more than its arguments. Turn this off: "
            "OffloadConfig(precompute=False)."
        )

    # ------------------------------------------------------------------------------------------------ ahead of a step

    def _compute(self, form: Hashable, tape: Tape, key: torch.Tensor, steps: list[list[torch.Tensor]]) -> _Known:
        """Compute the layers for some steps."""
        outputs: list[_Part] = []
        inputs: list[list[_Part]] = []
        pieces: list[tuple[_Part, torch.Tensor]] = []
        size = 0

        def place(tensors: Sequence[torch.Tensor]) -> _Part:
            nonlocal size
            first = tensors[0]
            part = _Part(size, first.numel() * first.element_size(), first.shape, first.dtype)
            size += -(-part.num_bytes // ALIGNMENT) * ALIGNMENT
            stacked = torch.stack([_bits(tensor) for tensor in tensors])
            pieces.append((part, stacked.to("cpu", non_blocking=False)))
            return part

        for given, made in tape.play(self._model, steps, self._fetched):
            outputs.append(place(made))
            inputs.append([place(tensors) for tensors in zip(*given, strict=True)])
        keys = [torch.cat([_bits(tensor) for tensor in step]) if step else key for step in steps]
        with torch.inference_mode(False):
            rows = torch.empty(len(steps), size, dtype=torch.uint8, pin_memory=self._stage.device.type == "cuda")
            for part, piece in pieces:
                rows[:, part.start : part.start + part.num_bytes] = piece
        known = _Known(tape, torch.stack(keys), rows, outputs, inputs)
        self._keep(form, known)
        self.stats.computed_steps += len(steps)
        return known

    def _keep(self, form: Hashable, known: _Known) -> None:
        before = self._known.pop(form, None)
        if before is not None and before.num_bytes + known.num_bytes <= _MOST_KEPT:
            known.keys = torch.cat([known.keys, before.keys])
            with torch.inference_mode(False):
                known.rows = _pinned_like(torch.cat([known.rows, before.rows]), known.rows)
        self._known[form] = known
        while len(self._known) > 1 and sum(k.num_bytes for k in self._known.values()) > _MOST_KEPT:
            self._known.popitem(last=False)

    def _drop(self, known: _Known) -> None:
        for form in [form for form, other in self._known.items() if other is known]:
            del self._known[form], self._tapes[form]

    @contextlib.contextmanager
    def _fetched(self, path: str) -> Iterator[torch.nn.Module]:
        layer = named_parts(self._model)[path]
        with self.on_device(self._paths[id(layer)]):
            yield layer

    @contextlib.contextmanager
    def on_device(self, path: str) -> Iterator[None]:
        """Inside, a layer's weights are on the device."""
        group = self._groups[path]
        group.prepare()
        group.load()
        self._stage.compute_waits(self._stage.mark_copied())
        try:
            yield
        finally:
            group.unload()

    def _check_weights(self, is_new_run: bool) -> None:
        """Drop everything if a weight or the structure of the model has changed."""
        if is_new_run:
            structure = tuple(map(id, self._model.modules()))
            if structure != self._structure:
                self._structure = structure
                self._tapes.clear()
                self._known.clear()
        if not all(weight.is_same() for weight in self._state) or not self._state:
            self._state = [_Seen(tensor) for layer in self.layers.values() for tensor in tensors_of(layer)]
            self._known.clear()


class _Seen:
    """A weight as it was."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._address, self._version = tensor, tensor.data_ptr(), tree.version(tensor)
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
        self._probe = flat[:: max(flat.numel() // _PROBES, 1)]
        self._values = self._probe.clone()

    def is_same(self) -> bool:
        tensor = self._tensor
        return (
            tensor.data_ptr() == self._address
            and tree.version(tensor) == self._version
            and torch.equal(self._probe, self._values)
        )


class _CallHook(ModelHook):
    """Tells of the model's calls, with the arguments that the caller gave."""

    order = HookOrder.OUTERMOST

    def __init__(self, layers: TimeLayers) -> None:
        self._layers = layers

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._layers.begin(args, kwargs)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._layers.end()
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        self._layers.end()


class _LayerHook(ModelHook):
    """Answers for a layer, or brings its weights in."""

    order = HookOrder.OFFLOAD

    def __init__(self, layers: TimeLayers, path: str) -> None:
        self._layers, self._path = layers, path
        self._open: list[contextlib.AbstractContextManager[None]] = []

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._layers.answer(self._path, args, kwargs)

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._layers.stats.live_calls += 1
        brought = self._layers.on_device(self._path)
        brought.__enter__()
        self._open.append(brought)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._open.pop().__exit__(None, None, None)
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        self._open.pop().__exit__(None, None, None)


def _are_alike(tensors: Sequence[torch.Tensor], parts: Sequence[_Part]) -> bool:
    forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
    return forms == [(part.shape, part.dtype) for part in parts]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # One number has any stride.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _pinned_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if like.is_pinned() else tensor
