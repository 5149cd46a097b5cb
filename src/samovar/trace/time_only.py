"""Which layers see neither the sample nor the text's tokens, and what do they see at another step?

Modulations are fed by time, guidance and pooled text alone, so their outputs can be computed before the step that needs
them. A rehearsal finds them: a shadow of the model runs on the meta device, where large arguments and weights have no
values, and every torch function that it calls is noted. What does not depend on a large argument is kept as a tape.
Played with the small arguments of another step, the tape gives the inputs of these layers at that step, by the calls
that the model itself would make.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from .. import tree
from ..arch.modules import named_parts, unwrapped
from ..hooks.intercept import call_bare
from .shadow import Shadow, TrialFailed, trial

_LARGE = 2**16
"""An argument with more elements than this, or with tokens, is not looked at."""
_SMALL_OUTPUT = 1 / 8
"""A layer's outputs may take this share of the bytes of its weights."""
_RANDOM = ("rand", "dropout", "bernoulli", "normal_", "uniform_", "multinomial", "exponential_", "cauchy_")
_PLACES = ("device", "is_cuda", "is_cpu", "get_device")
"""What tells where a weight is: the weights of these layers stay on the host."""


class _Value(NamedTuple):
    """A tensor that the tape makes or is given."""

    index: int


class _Weight(NamedTuple):
    """A parameter or buffer of the model."""

    path: str
    name: str


class _Here:
    """The device on which the tape is played."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a torch function, or of a layer that sees no large argument."""

    function: Callable[..., Any] | None
    layer: str
    """The layer's path, if it is one."""
    args: Any
    kwargs: Any
    makes: tuple[int, ...]
    """The values that it returns."""
    memory: int | None = None
    """The memory that it writes into, if it writes in place."""


@dataclass(frozen=True)
class Tape:
    """The calls that lead from the small arguments of a forward to its time-only layers, and these layers."""

    inputs: tuple[int, ...]
    """Which tensors among the arguments are read, by their place among all."""
    calls: tuple[Call, ...]
    layers: tuple[str, ...]
    """The paths of the layers, in the order of their calls; a layer that is called twice is here twice."""
    _places: Mapping[int, int]
    """The value that each of the inputs is."""
    _last: Mapping[int, int]
    """By value: the last call that uses it."""

    def play(
        self,
        model: torch.nn.Module,
        steps: Sequence[Sequence[torch.Tensor]],
        fetch: Callable[[str], AbstractContextManager[torch.nn.Module]],
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """For each call of a layer: its tensors and its outputs at each step. `steps` holds the `inputs` of each;
        `fetch` brings a layer's weights to the device."""
        device = steps[0][0].device if steps[0] else torch.device("cpu")
        parts = named_parts(model)
        values: list[dict[int, torch.Tensor]] = [
            {self._places[place]: tensor for place, tensor in zip(self.inputs, tensors, strict=True)}
            for tensors in steps
        ]
        weights: dict[_Weight, torch.Tensor] = {}

        def fill(held: Any, known: Mapping[int, torch.Tensor]) -> Any:
            if isinstance(held, _Value):
                return known[held.index]
            if isinstance(held, _Weight):
                if held not in weights:
                    weights[held] = _tensor(parts[held.path], held.name).detach().to(device)
                return weights[held]
            if isinstance(held, _Here):
                return device
            return held.to(device) if isinstance(held, torch.Tensor) else held

        for number, call in enumerate(self.calls):
            filled = [_map(lambda held, k=known: fill(held, k), (call.args, call.kwargs)) for known in values]
            if call.layer:
                with fetch(call.layer) as layer:
                    outputs = [call_bare(layer, args, kwargs) for args, kwargs in filled]
                yield [list(_tensors(given)) for given in filled], outputs
            else:
                assert call.function is not None
                outputs = [call.function(*args, **kwargs) for args, kwargs in filled]
            for known, output in zip(values, outputs, strict=True):
                if call.makes:
                    known.update(zip(call.makes, _tensors(output), strict=True))
                for index in [index for index in known if self._last.get(index, -1) <= number]:
                    del known[index]


def find_tape(
    model: torch.nn.Module, args: Any, kwargs: Any, least_bytes: int, among: Collection[str] | None = None
) -> Tape | None:
    """The tape of a forward with these arguments; None if no layer of at least `least_bytes`, and `among` these paths,
    is time-only, or if the model looks at values that a rehearsal does not have."""
    rejected: set[str] = set()
    while True:
        try:
            recorder = _rehearse(
                unwrapped(model),
                args,
                kwargs,
                lambda path, layer: (
                    _own_bytes(layer) >= max(least_bytes, 1)
                    and path not in rejected
                    and (among is None or path in among)
                ),
            )
        except TrialFailed:
            return None
        wrong = recorder.rejected.intersection(recorder.layers)  # A layer that is called in two ways.
        if not wrong:
            return recorder.tape()
        rejected |= wrong


def _rehearse(model: torch.nn.Module, args: Any, kwargs: Any, is_wanted: Callable[[str, Any], bool]) -> _Recorder:
    with trial((args, kwargs)):
        shadow = Shadow(model, {}, sharded=False)
        try:
            recorder = _Recorder(shadow.root, is_wanted)
            given = recorder.given((args, kwargs))
            with recorder:
                shadow.root(*given[0], **given[1])
            return recorder
        finally:
            shadow.close()


class _Recorder(TorchFunctionMode):
    """Notes what a shadow does with the tensors that do not depend on large arguments."""

    def __init__(self, shadow: torch.nn.Module, is_wanted: Callable[[str, torch.nn.Module], bool]) -> None:
        super().__init__()
        self.rejected: set[str] = set()
        self.layers: list[str] = []
        self._calls: list[Call] = []
        self._indices: dict[int, int] = {}
        """By the identity of a tensor: which value it is. A tensor that is in neither table is unknown."""
        self._weights: dict[int, _Weight] = {}
        self._inputs: dict[int, int] = {}
        """The value of each argument that is not large, by its place among all."""
        self._kept: list[Any] = []
        """All tensors, so that no identity is used twice."""
        self._in_memory: dict[int, list[int]] = {}
        """By memory: the identities of the known tensors in it."""
        self._metas: dict[int, torch.Tensor] = {}
        self._inside: str | None = None
        self._count = 0
        self._attributes = {id(tensor): tensor for m in shadow.modules() for tensor in tree.tensors(_attributes(m))}
        """Tensors that the model holds, but not as parameters or buffers."""
        twins: dict[int, torch.Tensor] = {}
        for path, module in named_parts(shadow).items():
            module._forward_pre_hooks.clear()  # Nobody needs to bring weights.
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        twin = twins.setdefault(id(tensor), _without_values(tensor))
                        self._kept += [tensor, twin]
                        self._weights.setdefault(id(twin), _Weight(path, name))
                        held[name] = twin  # type: ignore[assignment]
            if path and _is_plain(module) and is_wanted(path, module):
                vars(module)["forward"] = self._watched(path, module)

    # ------------------------------------------------------------------------------------------------ what is seen

    def given(self, arguments: Any) -> Any:
        """The arguments for the rehearsal."""
        places = iter(range(10**6))

        def take(tensor: torch.Tensor) -> torch.Tensor:
            place = next(places)
            is_large = tensor.numel() > _LARGE or (tensor.is_floating_point() and tensor.ndim > 2)
            tensor = tensor.detach() if is_large else tensor.detach().clone()
            self._kept.append(tensor)
            if not is_large:
                (self._inputs[place],) = self._name([tensor])
            return tensor

        return tree.map_tensors(take, arguments)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        name = getattr(function, "__name__", "")
        if not any(tensor.is_meta for tensor in tensors):
            output = function(*args, **kwargs)
        elif name in ("cpu", "cuda"):
            output = args[0]
        else:
            output = function(*_map(self._as_meta, args), **_map(self._as_meta, kwargs))
        owner = getattr(function, "__self__", None)
        self._check_weights(tensors, getattr(owner, "__name__", name) if name == "__get__" else name, output)
        if self._inside is None:
            self._note(function, name, args, kwargs, tensors, output)
        return output

    def _check_weights(self, tensors: Iterable[torch.Tensor], name: str, output: Any) -> None:
        """A layer whose weights others look at must keep them where they are."""
        if name in _PLACES or next(_tensors(output), None) is not None:
            for tensor in tensors:
                weight = self._weights.get(id(tensor))
                if weight is not None and weight.path != self._inside:
                    self.rejected.add(weight.path)

    def _note(self, function: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Any], output: Any) -> None:
        made = list(_tensors(output))
        self._kept += [*tensors, *made]
        writes = name == "__setitem__" or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))
        target = (kwargs["out"] if "out" in kwargs else args[0]) if writes and (args or "out" in kwargs) else None
        is_known = all(self._is_known(tensor) for tensor in tensors) and not name.startswith(_RANDOM)
        if isinstance(target, torch.Tensor):
            if is_known:
                self._add(Call(function, "", *self._held((args, kwargs)), (), _memory(target)))
            else:
                self._forget(_memory(target))
            return
        fresh = [tensor for tensor in made if all(tensor is not other for other in tensors)]
        if is_known and fresh and len(fresh) == len(made):
            self._add(Call(function, "", *self._held((args, kwargs)), self._name(made)))

    def _forget(self, memory: int) -> None:
        """An unknown value was written into some memory."""
        for identity in self._in_memory.pop(memory, ()):
            self._indices.pop(identity, None)

    def _watched(self, path: str, module: torch.nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            tensors = list(_tensors((args, kwargs)))
            if self._inside is not None or path in self.rejected:
                return forward(*args, **kwargs)
            if not all(map(self._is_known, tensors)):
                self.rejected.add(path)
                return forward(*args, **kwargs)
            self._inside = path
            try:
                output = forward(*args, **kwargs)
            finally:
                self._inside = None
            made = list(_tensors(output))
            self._kept += made
            size = sum(tensor.numel() * tensor.element_size() for tensor in made)
            if size > _SMALL_OUTPUT * _own_bytes(module) or not isinstance(output, torch.Tensor):
                self.rejected.add(path)
            else:
                self._add(Call(None, path, *self._held((args, kwargs)), self._name(made)))
                self.layers.append(path)
            return output

        return watched

    # ------------------------------------------------------------------------------------------------ the tape

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the tape, a weight, or one that the model holds."""
        return id(tensor) in self._indices or id(tensor) in self._weights or id(tensor) in self._attributes

    def _as_meta(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return value
        if id(value) not in self._metas:
            self._kept.append(value)
            self._metas[id(value)] = _without_values(value)
        return self._metas[id(value)]

    def _held(self, value: Any) -> Any:
        """Arguments as the tape keeps them."""

        def hold(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                index, weight = self._indices.get(id(item)), self._weights.get(id(item))
                return weight or (item if index is None else _Value(index))
            return _Here() if isinstance(item, torch.device) and item.type == "meta" else item

        return _map(hold, value)

    def _name(self, made: Sequence[torch.Tensor]) -> tuple[int, ...]:
        start, self._count = self._count, self._count + len(made)
        for index, tensor in enumerate(made, start):
            self._indices[id(tensor)] = index
            self._in_memory.setdefault(_memory(tensor), []).append(id(tensor))
        return tuple(range(start, self._count))

    def _add(self, call: Call) -> None:
        self._calls.append(call)

    def tape(self) -> Tape | None:
        """What leads to the layers that were found."""
        memories = {index: _memory(t) for t in self._kept if (index := self._indices.get(id(t))) is not None}
        wanted: set[int] = set()
        written: set[int] = set()
        calls: list[Call] = []
        for call in reversed(self._calls):
            if call.layer or wanted.intersection(call.makes) or (call.memory in written):
                calls.append(call)
                used = {held.index for held in _leaves((call.args, call.kwargs)) if isinstance(held, _Value)}
                wanted |= used
                written |= {memories[index] for index in used if index in memories}
        calls.reverse()
        layers = tuple(call.layer for call in calls if call.layer)
        if not layers:
            return None
        last: dict[int, int] = {}
        for number, call in enumerate(calls):
            for held in _leaves((call.args, call.kwargs)):
                if isinstance(held, _Value):
                    last[held.index] = number
        inputs = {place: index for place, index in self._inputs.items() if index in wanted}
        return Tape(tuple(inputs), tuple(calls), layers, inputs, last)


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether a module is a layer that nobody has changed."""
    return not module._modules and "forward" not in vars(module)


def _attributes(module: torch.nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name not in ("_modules", "_parameters", "_buffers")]


def _own_bytes(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module._parameters.values() if p is not None)


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    held = module._parameters if name in module._parameters else module._buffers
    tensor = held[name]
    assert tensor is not None
    return tensor


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """The arguments of a torch function with each part replaced."""
    kind = type(value)
    if kind in (list, tuple):
        return kind([_map(function, item) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, (_Value, _Weight)):
        return kind(*[_map(function, item) for item in value])
    if kind is dict:
        return {key: _map(function, item) for key, item in value.items()}
    if kind is slice:
        return slice(*[_map(function, item) for item in (value.start, value.stop, value.step)])
    return function(value)


def _leaves(value: Any) -> Iterator[Any]:
    found: list[Any] = []
    _map(found.append, value)
    return iter(found)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))
