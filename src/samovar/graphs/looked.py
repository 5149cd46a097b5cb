"""What may a forward look at, beside its inputs? Everything that a model's modules hold, however deep.

Attributes of modules, of objects in them (such as attention processors), what is in containers, and the hooks of
Samovar on modules inside. The same for values elsewhere that a forward's code knows by name.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..core.nested import ATOMS
from ..hooks.intercept import attached_registry
from .code import LEAVES

_HELD = ("_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_UNREAD = frozenset(vars(torch.nn.Module()))
"""Entries of every module. Forwards look at few of them, and those are looked at here by themselves."""
_CONTAINERS = (dict, list, set, deque)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CLOSED = (*ATOMS, type, types.BuiltinFunctionType, types.ModuleType, enum.Enum, np.ndarray, np.generic)
"""What is not looked into."""
_MOST, _DEEPEST = 4096, 5
"""Longer containers are not looked into, nor is what is nested deeper."""
_OUTSIDE = 3
"""How deep what is outside of the model counts as nested: it may know everything else."""


class Looked:
    """All that was found."""

    def __init__(self, model: torch.nn.Module, idle: Collection[torch.nn.Module] = ()) -> None:
        """`idle`: modules that take no part."""
        self.modules: list[torch.nn.Module] = []
        self.weights: list[Any] = []
        """Tables of parameters and buffers that hold any."""
        self.tables: list[Any] = []
        """Dictionaries, lists and sets whose contents count: attributes, parts, and what is in them."""
        self.empty: list[Any] = []
        """Those that hold nothing."""
        self.slotted: list[tuple[Any, str]] = []
        """Attributes that are in no dictionary: the objects that have them, and their names."""
        self.tensors: list[tuple[Any, Any, torch.Tensor]] = []
        """Tensors that are no weights: the table that they are in, their key there, and they themselves."""
        self.classes: dict[int, type] = {}
        """By identity."""
        self.functions: list[Any] = []
        """What is called, beside the forwards of modules."""
        self._model, self._idle = model, idle
        self._known: set[int] = set()
        self._take_modules(model)

    def look_at(self, values: Iterable[Any]) -> None:
        """Look also into values outside of the model that its code knows by name. Modules there take no part."""
        for value in values:
            if not isinstance(value, torch.Tensor):
                self._look(value, _OUTSIDE, in_object=True)

    def _take_modules(self, root: torch.nn.Module) -> None:
        for module in root.modules():
            if id(module) not in self._known and module not in self._idle:
                self._known.add(id(module))
                self._take_module(module)

    def _take_module(self, module: torch.nn.Module) -> None:
        entries, registry = vars(module), attached_registry(module)
        self.modules.append(module)
        self.classes[id(type(module))] = type(module)
        self.empty += [entries[name] for name in _HOOKS]
        for name in _HELD:
            (self.weights if entries[name] else self.empty).append(entries[name])
        (self.tables if entries["_modules"] else self.empty).append(entries["_modules"])
        self.tables.append(entries)
        if registry is not None and module is not self._model:  # Hooks around the whole are not part of a replay.
            self.tables.append(registry.by_name)
        self._look_into(entries, {key: value for key, value in entries.items() if key not in _UNREAD}, 0)

    def _look_into(self, table: Any, parts: Mapping[Any, Any], depth: int, in_object: bool = False) -> None:
        for key, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.tensors.append((table, key, part))
            else:
                self._look(part, depth, in_object)

    def _look(self, value: Any, depth: int, in_object: bool) -> None:
        if isinstance(value, _CLOSED) or depth > _DEEPEST:
            return
        if isinstance(value, _FUNCTIONS):
            self.functions.append(value)
        elif isinstance(value, torch.nn.Module):
            if not in_object:  # A module that is hidden in a list. An object may know others that take no part.
                self._take_modules(value)
        elif id(value) not in self._known:
            self._known.add(id(value))
            if isinstance(value, (*_CONTAINERS, tuple)):
                self._take_container(value, depth, in_object)
            elif type(value).__module__.partition(".")[0] not in LEAVES:
                self._take_object(value, depth)

    def _take_container(self, value: Any, depth: int, in_object: bool) -> None:
        if not isinstance(value, tuple):
            (self.tables if value else self.empty).append(value)
        if len(value) <= _MOST:
            parts = value if isinstance(value, dict) else dict(enumerate(value))
            self._look_into(value, dict(parts), depth + 1, in_object)

    def _take_object(self, value: Any, depth: int) -> None:
        """An object with settings of its own, such as an attention processor."""
        self.classes[id(type(value))] = type(value)
        held = [name for name in _slots(type(value)) if hasattr(value, name)]
        if held:
            self.slotted += [(value, name) for name in held]
            self._look_into(None, {name: getattr(value, name) for name in held}, depth + 1, in_object=True)
        if hasattr(value, "__dict__"):
            self._take_container(vars(value), depth, in_object=True)


def _slots(cls: type) -> tuple[str, ...]:
    found = (vars(base).get("__slots__", ()) for base in cls.__mro__)
    names = chain.from_iterable((one,) if isinstance(one, str) else one for one in found)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
