"""The one change detector: is a model still what it was when something was learned of it?

Compared are modules and their classes, forwards, weights and buffers (which, in which dtype, written in place or not),
adapters, attention processors, and hooks of others. Compared in C, so that a thousand modules take well under a
millisecond. Writes through `.data` have no version: nothing whose bits matter may rest on this alone. For who reads
weights where they lie, their addresses count instead.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, compress, repeat, starmap
from operator import attrgetter, is_
from typing import Any

import torch

from ..core.adapters import adapter_settings, adapters_of, loaded_adapters
from ..core.interop import kernel_settings
from ..core.tensor_parts import take_apart
from ..hooks.intercept import bare_class

_version, _dtype, _forward = attrgetter("_version"), attrgetter("dtype"), attrgetter("forward")
_call: Any = operator.call
_address = torch.Tensor.data_ptr
_own_hooks: weakref.WeakSet[Any] = weakref.WeakSet()
MAX_STATES = 16
"""States of a model that are told from new ones."""


def own(hook: Any) -> None:
    """Ignore one of our hooks on a module."""
    _own_hooks.add(hook)


class ModelState:
    """Some modules as they are now. It keeps no weight alive that they drop."""

    def __init__(self, modules: Iterable[torch.nn.Module], *, addresses: bool = False, kernels: bool = False) -> None:
        """`addresses`: where weights lie counts, and not what is written into them. `kernels`: with torch's settings
        that choose kernels, and the attention that diffusers has chosen."""
        self._modules = list(modules)
        self._entries = list(map(vars, self._modules))
        self._weights = _Weights(self._entries, addresses)
        # The type of a module that we have hooked equals its own.
        self._types = list(map(type, self._modules))
        self._classes = {bare_class(module): None for module in self._modules}
        self._forwards = list(map(_forward, self._classes))
        self._own_forwards = _own_forwards(self._entries)
        self._adapters = adapters_of(self._modules)
        self._hooks = [each[kind] for each in self._entries for kind in ("_forward_hooks", "_forward_pre_hooks")]
        self._has_hooks, self._counts = any(self._hooks), list(map(_count, self._hooks))
        self._processors = [(each, each["processor"], _settings(each["processor"])) for each in self._entries
                            if "processor" in each]  # fmt: skip
        self._kernels = kernel_settings() if kernels else None

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return self.change() is None

    def change(self) -> str | None:
        """The first thing that is not as it was, in words; None if all is."""
        return self._weights.change() or next(self._changes(), None)

    def is_in_place(self) -> bool:
        """Whether modules and weights are the same, where they were."""
        return self._weights.is_in_place()

    def plain(self) -> Iterator[torch.Tensor]:
        """The plain tensors whose addresses count; None in place of what is gone."""
        return self._weights.plain()

    def _changes(self) -> Iterator[str]:
        if list(map(type, self._modules)) != self._types:
            yield "modules have another class"
        if list(map(_forward, self._classes)) != self._forwards:
            yield "a class has another forward"
        if _own_forwards(self._entries) != self._own_forwards:
            yield "a module has another forward"
        if any(adapter_settings(module) != adapter for module, adapter in self._adapters):
            yield "adapters were switched or scaled"
        if (self._has_hooks or any(self._hooks)) and list(map(_count, self._hooks)) != self._counts:
            yield "forward hooks came or went"
        if not all(starmap(_is_same_processor, self._processors)):
            yield "attention processors are others or have other settings"
        if self._kernels is not None and kernel_settings() != self._kernels:
            yield "torch's choice of kernels is another"


class _Weights:
    """The parts, parameters and buffers of modules."""

    def __init__(self, modules: Iterable[Mapping[str, Any]], addresses: bool) -> None:
        """`modules`: their attributes."""
        held = list(chain.from_iterable(map(_held_by, modules)))
        self._held = [table.values() for table in held if table]
        self._empty = [table for table in held if not table]
        parts = self._now()
        self._parts = [_nothing if part is None else weakref.ref(part) for part in parts]
        self._is_tensor = [isinstance(part, torch.Tensor) for part in parts]
        tensors = list(compress(parts, self._is_tensor))
        self._dtypes = list(map(_dtype, tensors))
        self._has_version = [not addresses and not tensor.is_inference() for tensor in tensors]
        self._versions = list(map(_version, compress(tensors, self._has_version)))
        self._plain = list(map(weakref.ref, take_apart(tensors).plain)) if addresses else []
        self._addresses = list(map(_address, self.plain()))
        self._forms = [(of, list(map(of, self.plain()))) for of in (torch.Tensor.size, torch.Tensor.stride)]

    def plain(self) -> Iterator[torch.Tensor]:
        return map(_call, self._plain)

    def is_in_place(self) -> bool:
        try:
            return self._has_same_parts(self._now()) and list(map(_address, self.plain())) == self._addresses
        except TypeError:  # One is gone.
            return False

    def change(self) -> str | None:
        parts = self._now()
        if not self._has_same_parts(parts):
            return "modules or weights were replaced"
        tensors = list(compress(parts, self._is_tensor))
        if not self.is_in_place() or any(list(map(of, self.plain())) != before for of, before in self._forms):
            return "weights lie elsewhere or in another form"
        if list(map(_version, compress(tensors, self._has_version))) != self._versions:
            return "weights were written in place"
        return None if list(map(_dtype, tensors)) == self._dtypes else "weights have another dtype"

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(self._held))

    def _has_same_parts(self, parts: list[Any]) -> bool:
        is_as_long = len(parts) == len(self._parts) and not any(self._empty)
        return is_as_long and all(map(is_, parts, map(_call, self._parts)))


def _held_by(entries: Mapping[str, Any]) -> list[Any]:
    """The tables of a module's parts and weights. Those on the meta device are elsewhere for now: accelerate puts new
    tensors there after each call."""
    tables = [entries["_parameters"], entries["_buffers"]]
    is_elsewhere = any(tensor is not None and tensor.is_meta for table in tables for tensor in table.values())
    return [entries["_modules"], *(() if is_elsewhere else tables)]


class Generation:
    """Numbers the states of some modules, and of peft's adapters on a whole model. One that comes back, such as that of
    adapters which are switched on again, has the number that it had."""

    def __init__(self, model: torch.nn.Module, modules: Callable[[], Iterable[torch.nn.Module]] = tuple) -> None:
        self._model = model
        self._modules = modules
        self._count = 0
        self._states: dict[int, tuple[ModelState, tuple[str, ...], list[Any]]] = {}
        """The modules, the adapters that are loaded and their settings, by the number of the state."""
        self._number = self._look()

    def _look(self) -> int:
        self._count += 1
        loaded = loaded_adapters(self._model)
        adapters = adapters_of(self._model.modules()) if loaded else []
        self._states[self._count] = ModelState(self._modules()), loaded, adapters
        self._states.pop(self._count - MAX_STATES, None)
        return self._count

    def _holds(self, number: int) -> bool:
        state, loaded, adapters = self._states[number]
        is_same = all(adapter_settings(module) == settings for module, settings in adapters)
        return is_same and loaded_adapters(self._model) == loaded and state.holds()

    def check(self) -> int:
        """The number of the current state."""
        if self._number not in self._states or not self._holds(self._number):
            self._number = next(filter(self._holds, self._states), 0) or self._look()
        return self._number


def _nothing() -> None:
    """Stands for the weak reference to a parameter that a module does not have."""


def _own_forwards(entries: Iterable[dict[str, Any]]) -> list[Any]:
    """The forwards that instances have instead of their class's, None for those without."""
    return list(map(dict.get, entries, repeat("forward")))


def _count(hooks: Mapping[int, Any]) -> int:
    return sum(hook not in _own_hooks for hook in hooks.values())


def _is_same_processor(entries: Mapping[str, Any], processor: Any, settings: Mapping[str, Any]) -> bool:
    return entries.get("processor") is processor and _settings(processor) == settings


def _settings(processor: Any) -> dict[str, Any]:
    """The settings of a processor, such as the scales of an IP-Adapter."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in getattr(processor, "__dict__", {}).items()
        if isinstance(value, (bool, int, float, str, list))
    }
