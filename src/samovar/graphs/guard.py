"""What a recording depends on beside its inputs, and whether all of it is as it was.

A replay reads weights at the addresses that they had, so it sees what is written into them. Anything else is compared:
modules, their classes and attributes, objects in them such as attention processors, hooks, torch's choice of kernels,
functions by name in the files of these classes and in torch. A model with an attribute that cannot be compared runs.
What a forward reads elsewhere (variables of closures, contexts, the environment, tables of files) is not compared here:
that is what comparing every N-th replay with the forward's bits is for.
"""

from __future__ import annotations

import enum
import functools
import logging
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import starmap
from operator import eq, getitem
from typing import Any

import torch

from ..core.interop import accelerate_hook, diffusers_hooks, global_hooks, has_cache_dit, is_helper
from ..core.nested import ATOMS
from ..hooks import HookOrder
from ..hooks.intercept import attached_registry
from ..trace.model_state import ModelState
from .static_inputs import Unsuitable

_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType
_CLOSED = (
    *ATOMS, *_FUNCTIONS, type, enum.Enum, re.Pattern, logging.Logger, torch.Tensor, torch.jit.ScriptModule,
    types.ModuleType,
)  # fmt: skip
"""What is compared by identity or value, and not looked into."""
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Guard:
    """What a forward depends on, as it is now. It keeps no weight alive that the model has dropped."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Unsuitable if something cannot be compared."""
        self._tables: list[tuple[Any, Any]] = []
        """Attributes, and dictionaries, lists and sets in them, each with a copy."""
        self._tensors: list[tuple[Any, Any, torch.Tensor]] = []
        """Tensors that are no weights: the table that they are in, their key there, and they themselves."""
        self._classes: dict[int, type] = {}
        """By identity: a hooked class says that it equals its own."""
        self._modules: list[torch.nn.Module] = []
        seen, waiting = set[int](), [model, *global_hooks()]
        while waiting:
            value: Any = waiting.pop()
            if id(value) not in seen:
                seen.add(id(value))
                waiting += self._look_into(value)
        for base in self._classes.values():
            self._keep(vars(base), dict(vars(base)))
        others = [tensor for *_, tensor in self._tensors]
        self.state = ModelState(self._modules, addresses=True, kernels=True, tensors=others)
        files = {torch.nn.functional.__name__, *(base.__module__ for base in self._classes.values())}
        self._functions = list(map(_functions_of, files))

    def change(self) -> str | None:
        """The first thing that is not as it was, in words; None if a forward would do the same."""
        try:
            return self.state.change() or next(self._changes(), None)
        except (RuntimeError, ValueError, LookupError, AttributeError):  # A tensor has taken another's place.
            return "an attribute or a function"

    def _changes(self) -> Iterator[str]:
        if not all(starmap(eq, self._tables)):
            tables = [pair for pair in self._tables if isinstance(pair[1], dict)]
            names = (name for table, copy in tables for name in copy if table.get(name) is not copy[name])
            yield next((f"the attribute {name!r}" for name in names), "an attribute")
        if any(getitem(table, key) is not tensor for table, key, tensor in self._tensors):
            yield "a tensor among its attributes"
        if any(list(map(file.get, names)) != functions for file, names, functions in self._functions):
            yield "a function that code of the model knows by name"

    # ------------------------------------------------------------------------------------------ what a model holds

    def _look_into(self, value: Any) -> Iterable[Any]:
        """What a value holds. Unsuitable if that cannot be seen."""
        if isinstance(value, _CLOSED):
            return ()
        if isinstance(value, torch.nn.Module):
            return self._look_into_module(value)
        if isinstance(value, (dict, types.MappingProxyType)):
            return self._keep(value, dict(value))
        if isinstance(value, (list, deque, set)):
            return self._keep(value, value.copy())
        if isinstance(value, (tuple, frozenset)):
            return value
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        if isinstance(value, types.MethodType):
            return (value.__self__,)
        if hasattr(value, "__dict__") and not any(vars(base).get("__slots__") for base in type(value).__mro__):
            self._classes |= {id(base): base for base in type(value).__mro__[:-1]}
            return (vars(value),)
        raise Unsuitable(f"it holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be compared")

    def _look_into_module(self, module: torch.nn.Module) -> Iterable[Any]:
        entries, registry = vars(module), attached_registry(module)
        self._modules.append(module)
        self._classes |= {id(base): base for base in type(module).__mro__[:-1]}
        if registry is not None and len(self._modules) > 1:  # Hooks around the whole are not recorded.
            self._keep(registry.by_name, dict(registry.by_name))
        self._keep(entries, dict(entries))
        own = [name for name in entries if name not in _OF_EVERY_MODULE and not name.startswith("_samovar_")]
        return *entries["_modules"].values(), *map(entries.get, own)

    def _keep(self, table: Any, copy: Any) -> Iterable[Any]:
        """Compare a table from now on; return its values."""
        self._tables.append((table, copy))
        items = list(copy.items() if isinstance(copy, dict) else enumerate(copy))
        if not isinstance(copy, set):
            self._tensors += [(table, key, value) for key, value in items if isinstance(value, torch.Tensor)]
        return [value for _, value in items]


def _functions_of(module: str) -> tuple[dict[str, Any], list[str], list[Any]]:
    """The functions of a file: others may put their own in their place."""
    file = vars(sys.modules.get(module, types))
    found = {name: value for name, value in file.items() if isinstance(value, _FUNCTIONS)}
    return file, list(found), list(found.values())


def obstacle(model: torch.nn.Module) -> str | None:
    """Which hooks a replay would leave out that must not be left out, if there are any."""
    own = attached_registry(model)
    if own is not None and own.hooks(HookOrder.SHARD):
        return "ranks exchange tensors inside its forward"
    if any(global_hooks()):
        return "torch has global hooks, which see every module"
    if has_cache_dit(model):
        return "cache-dit decides inside its forward what runs"
    found = ((path, what) for path, module in model.named_modules() for what in _hooks_of(module, module is not model))
    return next((f"{path or type(model).__name__} has {what}" for path, what in found), None)


def _hooks_of(module: torch.nn.Module, is_inside: bool) -> Iterator[str]:
    has_others = accelerate_hook(module) is not None or not all(map(is_helper, diffusers_hooks(module)))
    if has_others or any(map(vars(module).get, _HOOKS)):
        yield "forward hooks of its user or of another library, which a replay would not call"
    registry = attached_registry(module) if is_inside else None
    for name, hook in () if registry is None else registry.by_name.items():
        if not hook.may_be_left_out:
            what = "its weights are streamed" if hook.order is HookOrder.OFFLOAD else f"the hook {name!r}"
            yield f"what a replay would leave out: {what}"
