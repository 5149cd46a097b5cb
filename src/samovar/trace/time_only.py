"""Time-only layers: those that see neither the sample nor the text's tokens, and what leads to them.

Modulations are fed by time, guidance and pooled text alone, so their outputs can be computed before the step that needs
them. They are found by a forward of the model's twin without weights. Each torch function that it calls is noted in a
graph if all that it takes is known: weights, small arguments, and what was made of them. The part of the graph that
leads to these layers gives their inputs at another step, from the small arguments there.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..arch.modules import named_parts, unwrapped
from ..core import nested
from ..core.interop import memory_of
from ..core.tensor_parts import num_bytes_of
from ..hooks.intercept import bare_class, call_bare
from .meta_mode import MetaCopier, MetaMode, with_few_values
from .twin import Forward, TrialFailed, trial

_LARGE = 2**16
"""An argument with more elements than this, or with tokens, is not known."""
SMALL_OUTPUT = 1 / 8
"""A layer's outputs may take this share of the bytes of its weights."""
_PLAIN = ("torch.nn.modules.linear", "torch.nn.modules.sparse", "torch.nn.modules.conv")
"""Where layers come from whose output follows from their weights and arguments alone."""
_RANDOM = ("rand", "dropout", "alpha_dropout", "feature_dropout", "bernoulli", "normal", "uniform_", "multinomial",
           "exponential_", "cauchy_", "log_normal_", "geometric_", "poisson")  # fmt: skip
_PLACES = ("device", "is_cuda", "is_cpu", "get_device")
"""What tells where a weight is: the weights of these layers stay on the host."""
_HERE = torch.device("cpu", 0)
"""What a forward is told of the device of any tensor."""


class Form(NamedTuple):
    """What a tensor is, but for its values."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class LayerCall(NamedTuple):
    """A call of a time-only layer: its path, what it is given, and what it returns."""

    layer: str
    given: tuple[Form, ...]
    returns: Form


@dataclass(frozen=True)
class Tape:
    """What leads from the small arguments of a forward to its time-only layers, and these layers."""

    inputs: tuple[int, ...]
    """Which tensors among the arguments are read, by their place among all."""
    layer_calls: tuple[LayerCall, ...]
    """In their order; a layer that is called twice is here twice."""
    _graph: Graph

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers, in the order of their calls."""
        return tuple(call.layer for call in self.layer_calls)

    def play(
        self,
        model: torch.nn.Module,
        steps: Sequence[Sequence[torch.Tensor]],
        fetch: Callable[[str], AbstractContextManager[torch.nn.Module]],
    ) -> Iterator[tuple[list[list[torch.Tensor]], list[torch.Tensor]]]:
        """For each call of a layer: its tensors and its output at each step. `steps` holds the `inputs` of each;
        `fetch` brings a layer's weights to the device."""
        device = steps[0][0].device if steps[0] else torch.device("cpu")
        arguments = [iter(step) for step in steps]
        last = {used: node for node in self._graph.nodes for used in node.all_input_nodes}
        known: list[dict[Any, Any]] = [{_HERE: device} for _ in steps]
        for node in self._graph.nodes:
            given: Any = [map_aggregate((node.args, node.kwargs), partial(_filled, values)) for values in known]
            if node.op == "placeholder":
                outputs = [next(tensors) for tensors in arguments]
            elif node.op == "get_attr":
                value = node.meta.get("value")
                value = operator.attrgetter(node.target)(unwrapped(model)) if value is None else value
                outputs = [value.detach().to(device, copy=True)] * len(steps)
            elif node.op == "call_module":
                with fetch(node.target) as layer:
                    outputs = [call_bare(layer, args, kwargs) for args, kwargs in given]
                yield [list(nested.tensors(each)) for each in given], outputs
            else:
                outputs = [node.target(*args, **kwargs) for args, kwargs in given]
            for values, output in zip(known, outputs, strict=True):
                values[node] = output
                for used in (node, *node.all_input_nodes):
                    if last.get(used, node) is node:
                        del values[used]


def _filled(values: dict[Any, Any], item: Any) -> Any:
    return values.get(item, item) if isinstance(item, (Node, torch.device)) else item


class Search(NamedTuple):
    """What a forward without weights has shown."""

    tape: Tape | None
    problem: str = ""
    """Why there was no such forward, if there was none."""


def find_tape(
    model: torch.nn.Module, args: Any, kwargs: Any, least_bytes: int, among: Collection[str] | None = None
) -> Search:
    """The tape of a forward with these arguments, if a layer of at least `least_bytes`, and `among` these paths, is
    time-only."""
    if is_autocast():
        return Search(None, "it is called under autocast")
    model = unwrapped(model)
    wanted = {
        path: part for path, part in named_parts(model).items()
        if path and is_plain(part) and (among is None or path in among) and _own_bytes(part) >= max(least_bytes, 1)
    }  # fmt: skip
    while True:
        try:
            # A thread of its own is free of the modes that the caller is in, such as those that watch attentions.
            with ThreadPoolExecutor(1) as thread:
                recorder = thread.submit(_record, model, args, kwargs, wanted).result()
        except TrialFailed as error:
            return Search(None, str(error))
        tape = recorder.tape()
        wrong = recorder.rejected.intersection(tape.layers)  # A layer that is called in two ways.
        if not wrong:
            return Search(tape if tape.layers else None)
        wanted = {path: part for path, part in wanted.items() if path not in recorder.rejected}


def is_autocast() -> bool:
    """Whether torch changes dtypes as it likes."""
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def is_plain(module: torch.nn.Module) -> bool:
    """Whether a module is one of torch's own layers, as it came."""
    return (
        not module._modules
        and "forward" not in vars(module)
        and getattr(bare_class(module).forward, "__module__", None) in _PLAIN
    )


def _record(model: torch.nn.Module, args: Any, kwargs: Any, wanted: dict[str, torch.nn.Module]) -> _Recorder:
    recorder = _Recorder()
    with trial((args, kwargs)):
        twin = MetaCopier({layer: partial(recorder.call, path, layer) for path, layer in wanted.items()}).copy(model)
        given = recorder.given(twin, (args, kwargs))
        # torch gives up for good what it has compiled if it is called inside a mode that sees operations.
        with torch.compiler.set_stance("force_eager"), MetaMode(), recorder:
            twin(*given[0], **given[1])
        return recorder


class _Recorder(TorchFunctionMode):
    """Notes what a twin does with the tensors that do not depend on large arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.rejected: set[str] = set()
        self._graph = Graph()
        self._nodes: Any = WeakTensorKeyDictionary()
        """By tensor: what makes it. A tensor that is not here is unknown."""
        self._inside: str | None = None

    def given(self, twin: torch.nn.Module, arguments: Any) -> Any:
        """The arguments for the twin. What is known at first are its weights, other tensors that it holds, and those of
        the arguments that are small."""
        for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
            if tensor.dtype is not torch.uint8:  # That of a quantised weight is stood in for.
                self._name(self._graph.get_attr(name), tensor)
        for module in twin.modules():
            held = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_modules")}
            for tensor in nested.tensors(held):
                if not tensor.is_meta and tensor not in self._nodes:
                    self._name(self._graph.get_attr("held"), tensor).meta["value"] = tensor
        places = itertools.count()

        def take(tensor: torch.Tensor) -> torch.Tensor:
            place, taken = next(places), with_few_values(tensor)
            if tensor.numel() <= _LARGE and not (tensor.is_floating_point() and tensor.ndim > 2):
                self._name(self._graph.placeholder("given"), taken).meta["place"] = place
            return taken

        return nested.map_tensors(take, arguments)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        name = getattr(function.__self__, "__name__", name) if name == "__get__" else name
        if name in ("to", "type_as") and len(args) == 2 and isinstance(args[1], torch.Tensor):
            function, args = torch.Tensor.to, (args[0], args[1].dtype)  # The other tensor's values do not matter.
        tensors = list(nested.tensors((args, kwargs)))
        versions = list(map(nested.version, tensors))
        output = _HERE if name == "device" else function(*args, **kwargs)
        changed = [t for t, before in zip(tensors, versions, strict=True) if nested.version(t) != before]
        made = list(nested.tensors(output))
        if made or name in _PLACES:  # Whoever looks at the weights of a layer must find them where they are.
            nodes = [self._nodes[tensor] for tensor in tensors if tensor in self._nodes]
            looked_at = {node.target.rpartition(".")[0] for node in nodes if node.op == "get_attr"}
            self.rejected |= looked_at - {self._inside}
        if self._inside is None:  # Without values nothing is set, and nothing counted.
            self._note(name, function, (args, kwargs), tensors[:1] if name == "__setitem__" else changed, output)
        return output

    def _note(self, name: str, function: Any, given: Any, changed: list[torch.Tensor], output: Any) -> None:
        """Know what a call has made, or what it has written into."""
        tensors = {id(tensor): tensor for tensor in nested.tensors(given)}
        is_known = all(tensor in self._nodes for tensor in tensors.values()) and not name.startswith(_RANDOM)
        written = {memory_of(tensor) for tensor in changed if tensor in self._nodes}
        made = {id(tensor) for tensor in nested.tensors(output)}
        if written and not is_known:  # An unknown value was written into this memory.
            for tensor in [known for known in self._nodes if memory_of(known) in written]:
                del self._nodes[tensor]
        elif is_known and not is_autocast() and (written or (made and made.isdisjoint(tensors))):
            node = self._graph.call_function(function, *self._held(given))
            node.meta["writes"] = written
            if not written:
                self._name(node, output)

    def call(self, path: str, layer: torch.nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Called in place of a layer that may be time-only."""
        tensors = list(nested.tensors((args, kwargs)))
        if self._inside is None and path not in self.rejected:
            if is_autocast() or not all(tensor in self._nodes for tensor in tensors):
                self.rejected.add(path)
                return forward(*args, **kwargs)
            self._inside = path
            try:
                output = forward(*args, **kwargs)
            finally:
                self._inside = None
            if output.nbytes <= SMALL_OUTPUT * _own_bytes(layer) and output.is_contiguous():
                node = self._name(self._graph.call_module(path, *self._held((args, kwargs))), output)
                forms = [Form(tensor.shape, tensor.dtype) for tensor in (*tensors, output)]
                node.meta["call"] = LayerCall(path, tuple(forms[:-1]), forms[-1])
                return output
            self.rejected.add(path)  # What it does may lead to other layers.
        return forward(*args, **kwargs)

    def _held(self, given: Any) -> Any:
        """Arguments as the graph holds them."""
        return map_aggregate(given, lambda item: self._nodes[item] if isinstance(item, torch.Tensor) else item)

    def _name(self, node: Node, made: Any) -> Node:
        """Know what a node makes: a tensor, or several."""
        if isinstance(made, torch.Tensor):
            node.meta["memory"] = memory_of(made)
            self._nodes[made] = node
        else:
            for place, part in enumerate(made):
                if isinstance(part, torch.Tensor):
                    self._name(self._graph.call_function(operator.getitem, (node, place)), part)
        return node

    def tape(self) -> Tape:
        """What leads to the layers that were found."""
        used: set[Node] = set()
        memories: set[int] = set()
        """Those that used values lie in."""
        for node in reversed(self._graph.nodes):
            if node.op == "call_module" or node in used or not memories.isdisjoint(node.meta.get("writes", ())):
                used.update(node.all_input_nodes)
                memories.update(given.meta["memory"] for given in node.all_input_nodes if "memory" in given.meta)
            else:
                self._graph.erase_node(node)
        places, calls = ([node.meta[of] for node in self._graph.nodes if of in node.meta] for of in ("place", "call"))
        return Tape(tuple(places), tuple(calls), self._graph)


def _own_bytes(module: torch.nn.Module) -> int:
    return num_bytes_of(parameter for parameter in module._parameters.values() if parameter is not None)
