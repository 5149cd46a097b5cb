"""Time-only layers: those that see neither the sample nor the text's tokens, and what leads to them.

Modulations are fed by time, guidance and pooled text alone, so their outputs can be computed before the step that needs
them. They are found by a forward of the model's twin without weights. Each torch function that it calls is noted in a
graph if all that it takes is known: weights, small arguments, and what was made of them. The part of the graph that
leads to these layers gives their inputs at another step, from the small arguments there.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
from ..hooks.handle import for_now
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
"""What shows where a weight is: the weights of these layers stay on the host."""
_HERE = torch.device("cpu", 0)
"""The device that a forward sees of any tensor."""


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

    inputs: tuple[int, ...] = ()
    """Which tensors among the arguments are read, by their place among all."""
    layer_calls: tuple[LayerCall, ...] = ()
    """In their order; a layer that is called twice is here twice."""
    _graph: Graph = field(default_factory=Graph)
    problem: str = ""
    """Why no forward could be searched, if none could."""

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
        columns = iter(zip(*steps, strict=True))
        last = {used: node for node in self._graph.nodes for used in node.all_input_nodes}
        known: dict[Node, Sequence[Any]] = {}
        """What nodes give, by step, as long as it is needed."""
        for node in self._graph.nodes:
            given: Any = [_filled((node.args, node.kwargs), known, step, device) for step in range(len(steps))]
            if node.op == "placeholder":
                known[node] = next(columns)
            elif node.op == "get_attr":
                held = node.meta.get("value")
                held = operator.attrgetter(node.target)(unwrapped(model)) if held is None else held
                known[node] = [held.detach().to(device, copy=True)] * len(steps)
            elif node.op == "call_module":
                with fetch(node.target) as layer:
                    outputs = known[node] = [call_bare(layer, args, kwargs) for args, kwargs in given]
                yield [list(nested.tensors(each)) for each in given], outputs
            else:
                known[node] = [node.target(*args, **kwargs) for args, kwargs in given]
            for used in (node, *node.all_input_nodes):
                if last.get(used, node) is node:
                    del known[used]


def _filled(given: Any, known: Mapping[Node, Sequence[Any]], step: int, device: torch.device) -> Any:
    """Arguments of a node at a step."""

    def fill(item: Any) -> Any:
        return known[item][step] if isinstance(item, Node) else device if item == _HERE else item

    return map_aggregate(given, fill)


def find_tape(
    model: torch.nn.Module, args: Any, kwargs: Any, least_bytes: int, among: Collection[str] | None = None
) -> Tape:
    """The tape of a forward with these arguments, with the time-only layers of at least `least_bytes` and `among` these
    paths."""
    if is_autocast():
        return Tape(problem="it is called under autocast")
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
            return Tape(problem=str(error))
        tape = recorder.tape()
        if recorder.rejected.isdisjoint(tape.layers):
            return tape if tape.layers else Tape()
        for path in recorder.rejected:  # A layer that is called in two ways, or looked at.
            wanted.pop(path, None)


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
            for tensor in nested.tensors(vars(module)):
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
        kwargs, name = kwargs or {}, _name_of(function)
        if name in ("to", "type_as") and len(args) == 2 and isinstance(args[1], torch.Tensor):
            function, args = torch.Tensor.to, (args[0], args[1].dtype)  # The other tensor's values do not matter.
        given = list(nested.tensors((args, kwargs)))
        versions = list(map(nested.version, given))
        output = _HERE if name == "device" else function(*args, **kwargs)
        made = list(nested.tensors(output))
        if made or name in _PLACES:
            self._reject_owners(given)
        if self._inside is None:
            written = [t for t, before in zip(given, versions, strict=True) if nested.version(t) != before]
            written = given[:1] if name == "__setitem__" else written  # Without values nothing is set or counted.
            is_new = made and {id(tensor) for tensor in made}.isdisjoint(map(id, given))
            node = None
            if (written or is_new) and self._knows(given) and not name.startswith(_RANDOM):
                node = self._graph.call_function(function, *self._held((args, kwargs)))
            self._note_writes(written, node)
            if node is not None and not written:
                self._name(node, output)
        return output

    def _reject_owners(self, given: Sequence[torch.Tensor]) -> None:
        """Whoever looks at the weights of a layer must find them where they are."""
        nodes = [self._nodes[tensor] for tensor in given if tensor in self._nodes]
        looked_at = {node.target.rpartition(".")[0] for node in nodes if node.op == "get_attr"}
        self.rejected |= looked_at - {self._inside}

    def _note_writes(self, written: Sequence[torch.Tensor], node: Node | None) -> None:
        """What shares memory with tensors that were written into is from now on what this node has made of it, or
        unknown."""
        memories = {memory_of(tensor) for tensor in written if tensor in self._nodes}
        for tensor in [known for known in self._nodes if memory_of(known) in memories] if memories else ():
            if node is None:
                del self._nodes[tensor]
            else:
                self._nodes[tensor] = self._graph.call_function(_after, (self._nodes[tensor], node))

    def _knows(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether what is made of these tensors is known. Autocast changes dtypes as it likes."""
        return not is_autocast() and all(tensor in self._nodes for tensor in given)

    def call(self, path: str, layer: torch.nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Called in place of a layer that may be time-only."""
        given = list(nested.tensors((args, kwargs)))
        if path not in self.rejected and self._knows(given):
            with for_now(self, _inside=path):
                output = forward(*args, **kwargs)
            if output.nbytes <= SMALL_OUTPUT * _own_bytes(layer) and output.is_contiguous():
                node = self._name(self._graph.call_module(path, *self._held((args, kwargs))), output)
                *forms, made = (Form(tensor.shape, tensor.dtype) for tensor in (*given, output))
                node.meta["call"] = LayerCall(path, tuple(forms), made)
                return output
        self.rejected.add(path)
        return forward(*args, **kwargs)  # What it does may lead to other layers.

    def _held(self, given: Any) -> Any:
        """Arguments as the graph holds them."""
        return map_aggregate(given, lambda item: self._nodes[item] if isinstance(item, torch.Tensor) else item)

    def _name(self, node: Node, made: Any) -> Node:
        """Know what a node makes: a tensor, or several."""
        if isinstance(made, torch.Tensor):
            self._nodes[made] = node
            return node
        for place, part in enumerate(made):
            if isinstance(part, torch.Tensor):
                self._name(self._graph.call_function(operator.getitem, (node, place)), part)
        return node

    def tape(self) -> Tape:
        """What leads to the layers that were found."""
        self._graph.eliminate_dead_code(lambda node: node.op == "call_module")
        places, calls = ([node.meta[of] for node in self._graph.nodes if of in node.meta] for of in ("place", "call"))
        return Tape(tuple(places), tuple(calls), self._graph)


def _name_of(function: Any) -> str:
    """The name of a function, or of the attribute that it reads."""
    name: str = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name


def _after(tensor: torch.Tensor, write: Any) -> torch.Tensor:
    """A tensor once something was written into it."""
    return tensor


def _own_bytes(module: torch.nn.Module) -> int:
    return num_bytes_of(parameter for parameter in module._parameters.values() if parameter is not None)
