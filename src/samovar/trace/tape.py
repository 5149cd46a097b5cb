"""A tape of what was noted of a forward, to be played again with other arguments.

A tape holds calls of torch functions and of layers, in order. The tensors in their arguments are kept by number, the
model's weights by name, and the device as wherever the tape is played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..arch.modules import named_parts
from ..hooks.intercept import call_bare


class Value(NamedTuple):
    """A tensor that the tape makes or is given."""

    number: int


class Weight(NamedTuple):
    """A parameter or buffer of the model."""

    path: str
    name: str


class Here:
    """The device on which the tape is played."""


class Form(NamedTuple):
    """What a tensor is, but for its values."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


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
    given: tuple[Form, ...] = ()
    """What a layer takes."""
    returns: Form | None = None
    """What a layer returns."""

    def values(self) -> set[int]:
        """The tensors that it takes."""
        return {held.number for held in leaves((self.args, self.kwargs)) if isinstance(held, Value)}


@dataclass(frozen=True)
class Tape:
    """The calls that lead from the small arguments of a forward to its time-only layers, and these layers."""

    inputs: tuple[int, ...]
    """Which tensors among the arguments are read, by their place among all."""
    calls: tuple[Call, ...]
    _places: Mapping[int, int]
    """The value that each of the inputs is."""
    _last: Mapping[int, int]
    """By value: the last call that uses it."""

    @property
    def layer_calls(self) -> tuple[Call, ...]:
        """A layer that is called twice is here twice."""
        return tuple(call for call in self.calls if call.layer)

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
        fill = _Filler(model, device)
        values: list[dict[int, torch.Tensor]] = [
            {self._places[place]: tensor for place, tensor in zip(self.inputs, tensors, strict=True)}
            for tensors in steps
        ]
        for number, call in enumerate(self.calls):
            filled = [map_parts(partial(fill, known), (call.args, call.kwargs)) for known in values]
            if call.function is None:
                with fetch(call.layer) as layer:
                    outputs = [call_bare(layer, args, kwargs) for args, kwargs in filled]
                yield [tensors_in(given) for given in filled], outputs
            else:
                outputs = [call.function(*args, **kwargs) for args, kwargs in filled]
            for known, output in zip(values, outputs, strict=True):
                if call.makes:
                    known.update(zip(call.makes, tensors_in(output), strict=True))
                for index in [index for index in known if self._last.get(index, -1) <= number]:
                    del known[index]


class _Filler:
    """Puts tensors in the place of what the tape holds for them."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._parts, self._device = named_parts(model), device
        self._weights: dict[Weight, torch.Tensor] = {}

    def __call__(self, known: Mapping[int, torch.Tensor], held: Any) -> Any:
        if isinstance(held, Value):
            return known[held.number]
        if isinstance(held, Weight):
            if held not in self._weights:
                self._weights[held] = _tensor(self._parts[held.path], held.name).detach().to(self._device)
            return self._weights[held]
        if isinstance(held, Here):
            return self._device
        return held.to(self._device) if isinstance(held, torch.Tensor) else held


def make_tape(noted: Sequence[Call], inputs: Mapping[int, int], memories: Mapping[int, int]) -> Tape | None:
    """What leads to the layers among some calls; None if there are none. `inputs`: the value of each argument by its
    place. `memories`: by value, which memory it is in."""
    wanted: set[int] = set()
    written: set[int] = set()
    calls: list[Call] = []
    for call in reversed(noted):
        if call.layer or wanted.intersection(call.makes) or call.memory in written:
            calls.append(call)
            wanted |= call.values()
            written |= {memories[index] for index in call.values() if index in memories}
    calls.reverse()
    if not any(call.layer for call in calls):
        return None
    last = {index: number for number, call in enumerate(calls) for index in call.values()}
    read = {place: index for place, index in inputs.items() if index in wanted}
    return Tape(tuple(read), tuple(calls), read, last)


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    held = module._parameters if name in module._parameters else module._buffers
    tensor = held[name]
    assert tensor is not None
    return tensor


def map_parts(function: Callable[[Any], Any], value: Any) -> Any:
    """The arguments of a torch function with each part replaced."""
    kind = type(value)
    if kind in (list, tuple):
        return kind([map_parts(function, item) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, (Value, Weight)):
        return kind(*[map_parts(function, item) for item in value])
    if kind is dict:
        return {key: map_parts(function, item) for key, item in value.items()}
    if kind is slice:
        return slice(*[map_parts(function, item) for item in (value.start, value.stop, value.step)])
    return function(value)


def leaves(value: Any) -> list[Any]:
    """The parts of the arguments of a torch function."""
    found: list[Any] = []
    map_parts(found.append, value)
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in the arguments or the output of a torch function; quick, as it runs for each call."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return tensors_in((value.start, value.stop, value.step)) if isinstance(value, slice) else []
