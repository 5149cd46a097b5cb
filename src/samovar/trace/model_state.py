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
from functools import partial
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
    ) -> None:
        """`addresses`: where weights lie counts, and not what is written into them. `kernels`: with torch's settings
        that choose kernels, and the attention that diffusers has chosen. `adapted`: with the adapters of this model."""
        modules = list(modules)
        self._tables = [table.values() for table in chain.from_iterable(map(_held_by, map(vars, modules)))]
        parts = list(chain.from_iterable(self._tables))
        self._parts = list(map(_reference, parts))
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        self._plain = list(map(weakref.ref, take_apart(tensors).plain)) if addresses else []
        reads: dict[str, Callable[[], Any]] = {
            "modules or weights were replaced": self._has_same_parts,
            _MOVED: lambda: [list(map(form, map(_call, self._plain))) for form in _FORMS],
            **_weight_reads(tensors, counts=not addresses),
            **_module_reads(modules, adapted),
            "torch's choice of kernels is another": kernel_settings if kernels else tuple,
        }
        self._facts = [(what, read, read()) for what, read in reads.items()]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return self.change() is None

    def change(self, num_facts: int | None = None) -> str | None:
        """The first thing that is not as it was, in words; None if all is."""
        try:
            return next((what for what, read, before in self._facts[:num_facts] if read() != before), None)
        except TypeError:  # A part of a weight is gone.
            return _MOVED

    def is_in_place(self) -> bool:
        """Whether modules and weights are the same, where they were."""
        return self.change(2) is None

    def plain(self) -> Iterator[torch.Tensor]:
        """The plain tensors whose addresses count; None in place of what is gone."""
        return map(_call, self._plain)

    def _has_same_parts(self) -> bool:
        parts = list(chain.from_iterable(self._tables))
        return len(parts) == len(self._parts) and all(map(is_, parts, map(_call, self._parts)))


def _weight_reads(tensors: list[torch.Tensor], counts: bool) -> dict[str, Callable[[], Any]]:
    """What is compared of weights; with `counts`, how often they were written."""
    held = list(map(weakref.ref, tensors))
    counted = [weakref.ref(tensor) for tensor in tensors if counts and not tensor.is_inference()]
    return {
        "weights were written in place": lambda: list(map(_version, map(_call, counted))),
        "weights have another dtype": lambda: list(map(_dtype, map(_call, held))),
    }


def _module_reads(modules: list[torch.nn.Module], model: torch.nn.Module | None) -> dict[str, Callable[[], Any]]:
    """What is compared of modules beside their weights."""
    entries = list(map(vars, modules))
    classes = {bare_class(module): None for module in modules}
    hooks = [each[kind] for each in entries for kind in ("_forward_hooks", "_forward_pre_hooks")]
    loaded: Callable[[], tuple[str, ...]] = tuple if model is None else partial(loaded_adapters, model)
    adapted = adapter_layers(model.modules() if model is not None and loaded() else modules)
    attentions = [each for each in entries if "processor" in each]
    return {
        "modules have another class": lambda: list(map(type, modules)),  # That of a hooked one equals its own.
        "a class has another forward": lambda: list(map(_forward, classes)),
        "a module has another forward": lambda: [each.get("forward") for each in entries],
        "adapters were switched or scaled": lambda: [*loaded(), *map(adapter_settings, adapted)],
        "forward hooks came or went": lambda: {id(each): count for each in hooks if each and (count := _count(each))},
        "attention processors are others or have other settings": lambda: [
            (each.get("processor"), _settings(each.get("processor"))) for each in attentions
        ],
    }


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


def _reference(part: Any) -> Callable[[], Any]:
    return _nothing if part is None else weakref.ref(part)


def _count(hooks: Mapping[int, Any]) -> int:
    return sum(hook not in _own_hooks for hook in hooks.values())


def _settings(processor: Any) -> dict[str, Any]:
    """The settings of a processor, such as the scales of an IP-Adapter."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in getattr(processor, "__dict__", {}).items()
        if isinstance(value, (bool, int, float, str, list))
    }
