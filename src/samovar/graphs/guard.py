"""What a recording depends on beside its inputs, and whether all of it is as it was.

A replay reads weights at the addresses that they had, so it sees what is written into them. Anything else is compared:
modules, their classes and attributes, objects in them such as attention processors, hooks, torch's choice of kernels,
functions by name in the files of these classes and in torch. A model with an attribute that cannot be compared runs.
What a forward reads elsewhere (variables of closures, contexts, the environment, tables of files) is not compared here:
that is what comparing every so many replays with the forward's bits is for.
"""

from __future__ import annotations

import enum
import functools
import logging
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import eq, getitem
from typing import Any

import torch

from ..core.interop import accelerate_hook, diffusers_hooks, global_hooks, has_cache_dit, is_helper
from ..core.nested import ATOMS
from ..hooks import HookOrder
from ..hooks.intercept import attached_registry
from ..trace.model_state import ModelState
from .static_inputs import Unsuitable

_CLOSED = (
    *ATOMS, type, enum.Enum, re.Pattern, logging.Logger, torch.Tensor, torch.jit.ScriptModule,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip
"""What is compared by identity or value, and not looked into."""
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MAX_TABLES = 100_000


class Guard:
    """What a forward depends on, as it is now. It keeps no weight alive that the model has dropped."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Unsuitable if something cannot be compared."""
        found = _Found(model)
        self.state = ModelState(found.modules, addresses=True, kernels=True)
        self._tables, self._copies = found.tables, found.copies
        self._empty = [*found.hooks, *global_hooks()]
        self._tensors = found.tensors
        self._addresses = self._where()
        self._code = list(
            map(_functions, {torch.nn.functional.__name__, *(cls.__module__ for cls in found.classes.values())})
        )

    def is_in_place(self) -> bool:
        """Whether modules, weights and other tensors are where they were: a replay may not run otherwise."""
        return self.state.is_in_place() and self._where() == self._addresses

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for *_, tensor in self._tensors]

    def change(self) -> str | None:
        """The first thing that is not as it was, in words; None if a forward would do the same."""
        if any(self._empty):
            return "forward hooks came"
        try:
            return self.state.change() or next(self._changes(), None)
        except (RuntimeError, ValueError, LookupError, AttributeError):  # A tensor has taken another's place.
            return "an attribute or a function"

    def _changes(self) -> Iterator[str]:
        if not all(map(eq, self._tables, self._copies)):
            yield next(chain.from_iterable(map(_named, self._tables, self._copies)), "an attribute")
        if any(getitem(table, key) is not tensor for table, key, tensor in self._tensors):
            yield "a tensor among its attributes"
        if any(list(map(file.get, names)) != functions for file, names, functions in self._code):
            yield "a function that code of the model knows by name"


class _Found:
    """Everything that a model holds, however deep."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules: list[torch.nn.Module] = []
        self.tables: list[Any] = []
        """Attributes, and dictionaries, lists and sets in them."""
        self.copies: list[Any] = []
        self.hooks: list[Any] = []
        self.tensors: list[tuple[Any, Any, torch.Tensor]] = []
        """Tensors that are no weights: the table that they are in, their key there, and they themselves."""
        self.classes: dict[int, type] = {}
        """By identity: a hooked class says that it is equal to its own."""
        seen, waiting = set[int](), [model]
        while waiting:
            value: Any = waiting.pop()
            if id(value) not in seen:
                seen.add(id(value))
                waiting += self._look_into(value)
            if len(self.tables) > _MAX_TABLES:
                raise Unsuitable(f"it holds more than {_MAX_TABLES} objects, too many to compare at each call")

    def _look_into(self, value: Any) -> Iterable[Any]:
        """What a value holds. Unsuitable if that cannot be seen."""
        if isinstance(value, _CLOSED):
            return ()
        if isinstance(value, torch.nn.Module):
            return self._look_into_module(value)
        if isinstance(value, (dict, types.MappingProxyType)):
            return self._add(value, dict(value), value.items())
        if isinstance(value, (list, deque)):
            return self._add(value, value.copy(), enumerate(value))
        if isinstance(value, set):
            return self._add(value, value.copy(), ())
        if isinstance(value, (tuple, frozenset)):
            return value
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        if isinstance(value, types.MethodType):
            return (value.__self__,)
        if hasattr(value, "__dict__") and not any(vars(base).get("__slots__") for base in type(value).__mro__):
            self._add_class(type(value))
            return (vars(value),)
        raise Unsuitable(f"it holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be compared")

    def _look_into_module(self, module: torch.nn.Module) -> Iterable[Any]:
        entries, registry = vars(module), attached_registry(module)
        self.modules.append(module)
        self._add_class(type(module))
        self.hooks += [entries[name] for name in _HOOKS]
        if registry is not None and self.modules[0] is not module:  # Hooks around the whole are not recorded.
            self._add(registry.by_name, dict(registry.by_name), ())
        own = {name: value for name, value in entries.items() if name not in _OF_EVERY_MODULE}
        self._add(entries, dict(entries), own.items())
        return *entries["_modules"].values(), *(own[name] for name in own if not name.startswith("_samovar_"))

    def _add(self, table: Any, copy: Any, items: Iterable[tuple[Any, Any]]) -> list[Any]:
        self.tables.append(table)
        self.copies.append(copy)
        pairs = list(items)
        self.tensors += [(table, key, value) for key, value in pairs if isinstance(value, torch.Tensor)]
        return [value for _, value in pairs]

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__[:-1]:
            if id(base) not in self.classes:
                self.classes[id(base)] = base
                self._add(vars(base), dict(vars(base)), ())


def _functions(module: str) -> tuple[Mapping[str, Any], list[str], list[Any]]:
    """The functions of a file: others may put their own in their place."""
    namespace = vars(sys.modules.get(module, types))
    kinds = types.FunctionType, types.BuiltinFunctionType
    found = {name: value for name, value in namespace.items() if isinstance(value, kinds)}
    return namespace, list(found), list(found.values())


def _named(table: Any, before: Any) -> Iterator[str]:
    """The attributes that are others in a table."""
    if isinstance(before, dict):
        names = (name for name in {**before, **table} if table.get(name) is not before.get(name))
        yield from (f"the attribute {name!r}" for name in names)


def obstacle(model: torch.nn.Module) -> str | None:
    """Which hooks a replay would leave out that must not be left out, if there are any."""
    own = attached_registry(model)
    if own is not None and own.hooks(HookOrder.SHARD):
        return "ranks exchange tensors inside its forward"
    if any(global_hooks()):
        return "torch has global hooks, which see every module"
    if has_cache_dit(model):
        return "cache-dit decides inside its forward what runs"
    for path, module in model.named_modules():
        found = next(_hooks_of(module, is_inside=module is not model), None)
        if found is not None:
            return f"{path or type(model).__name__} has {found}"
    return None


def _hooks_of(module: torch.nn.Module, is_inside: bool) -> Iterator[str]:
    if any(map(vars(module).get, _HOOKS)):
        yield "forward hooks of its user, which a replay would not call"
    if accelerate_hook(module) is not None:
        yield "a hook of accelerate, which moves weights"
    for name in diffusers_hooks(module):
        if not is_helper(name):
            yield f"diffusers' hook {name!r}, which a replay would not call"
    registry = attached_registry(module) if is_inside else None
    for name, hook in () if registry is None else registry.by_name.items():
        if not hook.may_be_left_out:
            what = "its weights are streamed" if hook.order is HookOrder.OFFLOAD else f"the hook {name!r}"
            yield f"what a replay would leave out: {what}"
