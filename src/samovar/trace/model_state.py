"""The one change detector: whether a model is still what it was when something was learned of it.

Compared are modules and their classes, forwards, weights and buffers (which, in which dtype, written in place or not),
adapters, attention processors, and hooks of others. Compared in C, so that a thousand modules take well under a
millisecond. Writes through `.data` have no version: nothing whose bits matter may rest on this alone. For who reads
weights where they lie, their addresses count instead.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from ..core.adapters import adapter_layers, adapter_settings, loaded_adapters
from ..core.interop import kernel_settings
from ..core.tensor_parts import take_apart
from ..hooks.intercept import bare_class

_version, _dtype, _forward = attrgetter("_version"), attrgetter("dtype"), attrgetter("forward")
_call: Any = operator.call
_FORMS = (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride)
_MOVED = "weights lie elsewhere or in another form"
_PROCESSORS = "attention processors are others or have other settings"
_nothing = type(None)
"""Stands for the weak reference to a parameter that a module does not have."""
_own_hooks: weakref.WeakSet[Any] = weakref.WeakSet()
MAX_STATES = 16
"""States of a model that are remembered, so that one that comes back is known."""


def own(hook: Any) -> None:
    """Ignore one of our hooks on a module."""
    _own_hooks.add(hook)


class ModelState:
    """Some modules as they are now. It keeps no weight alive that they drop."""

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        *,
        addresses: bool = False,
        kernels: bool = False,
        adapted: torch.nn.Module | None = None,
        tensors: Iterable[torch.Tensor] = (),
    ) -> None:
        """`addresses`: where weights lie counts, and not what is written into them; the same of `tensors`, which are no
        weights. `kernels`: with torch's settings that choose kernels, and the attention that diffusers has chosen.
        `adapted`: with the adapters of this model."""
        self._modules, self._model, self._kernels = list(modules), adapted, kernels
        self._entries = list(map(vars, self._modules))
        self._classes = {bare_class(module): None for module in self._modules}
        self._tables = [table.values() for table in chain.from_iterable(map(_held_by, self._entries))]
        parts = chain.from_iterable(self._tables)
        self._parts = [_nothing if part is None else weakref.ref(part) for part in parts]
        weights = [part for table in self._tables for part in table if isinstance(part, torch.Tensor)]
        self._weights = list(map(weakref.ref, weights))
        self._counted = [weakref.ref(each) for each in weights if not addresses and not each.is_inference()]
        self._plain = list(map(weakref.ref, take_apart([*weights, *tensors]).plain)) if addresses else []
        is_adapted = adapted is not None and bool(loaded_adapters(adapted))
        self._adapters = adapter_layers(adapted.modules() if adapted is not None and is_adapted else self._modules)
        self._hooks = [each[kind] for each in self._entries for kind in ("_forward_hooks", "_forward_pre_hooks")]
        self._attentions = [each for each in self._entries if "processor" in each]
        self._facts = list(self._read())

    def _read(self) -> Iterator[tuple[str, Any]]:
        """What is compared, in words with its value now; what decides whether all is in place comes first."""
        parts = list(chain.from_iterable(self._tables))
        is_same = len(parts) == len(self._parts) and all(map(is_, parts, map(_call, self._parts)))
        yield "modules or weights were replaced", is_same
        yield _MOVED, [list(map(form, self.plain())) for form in _FORMS]
        yield "weights were written in place", list(map(_version, map(_call, self._counted)))
        yield "weights have another dtype", list(map(_dtype, map(_call, self._weights)))
        yield "modules have another class", list(map(type, self._modules))  # That of a hooked one equals its own.
        yield "a class has another forward", list(map(_forward, self._classes))
        yield "a module has another forward", [each.get("forward") for each in self._entries]
        loaded = () if self._model is None else loaded_adapters(self._model)
        yield "adapters were switched or scaled", [*loaded, *map(adapter_settings, self._adapters)]
        counts = {id(each): count for each in self._hooks if each and (count := _count(each))}
        yield "forward hooks came or went", counts
        processors = [each.get("processor") for each in self._attentions]
        yield _PROCESSORS, [(processor, _settings(processor)) for processor in processors]
        yield "torch's choice of kernels is another", kernel_settings() if self._kernels else ()

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return self.change() is None

    def change(self, num_facts: int | None = None) -> str | None:
        """The first thing that is not as it was, in words; None if all is."""
        pairs = zip(self._facts[:num_facts], self._read(), strict=False)
        try:
            return next((what for (what, before), (_, now) in pairs if now != before), None)
        except TypeError:  # A part of a weight is gone.
            return _MOVED

    def is_in_place(self) -> bool:
        """Whether modules and weights are the same, where they were."""
        return self.change(2) is None

    def plain(self) -> Iterator[torch.Tensor]:
        """The plain tensors whose addresses count; None in place of what is gone."""
        return map(_call, self._plain)


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
        self._model, self._modules, self._count = model, modules, 0
        self._states: dict[int, ModelState] = {}
        """By number."""
        self._number = self._add()

    def _add(self) -> int:
        self._count += 1
        self._states[self._count] = ModelState(self._modules(), adapted=self._model)
        self._states.pop(self._count - MAX_STATES, None)
        return self._count

    def check(self) -> int:
        """The number of the current state."""
        state = self._states.get(self._number)
        if state is None or state.change() is not None:
            known = (number for number, state in self._states.items() if state.holds())
            self._number = next(known, 0) or self._add()
        return self._number


def _count(hooks: Mapping[int, Any]) -> int:
    return sum(hook not in _own_hooks for hook in hooks.values())


def _settings(processor: Any) -> dict[str, Any]:
    """The settings of a processor, such as the scales of an IP-Adapter."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in getattr(processor, "__dict__", {}).items()
        if isinstance(value, (bool, int, float, str, list))
    }
