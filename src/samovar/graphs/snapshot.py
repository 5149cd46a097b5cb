"""Would a replay still do what the model's forward does? And does it leave out anything that others rely on?

A replay reads weights at the addresses that they had, so it sees what is written into them. Anything else that a
forward looks at in Python must be as it was: modules, adapters and their scales, attention processors, flags, hooks,
methods. All of that is compared in C, so that a thousand modules take under a millisecond, while the device computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from operator import eq, is_
from typing import Any

import torch

from ..arch.modules import unwrapped
from ..hooks import HookOrder, HookRegistry
from ..hooks.intercept import attached_registry
from ..other_libraries import accelerate_hook, diffusers_hooks, has_cache_dit, has_global_hooks, is_helper
from ..tensors import take_apart

_CONTAINERS = (dict, list, set)
_TORCH_ENTRIES = frozenset(vars(torch.nn.Module()))
"""Entries of every module. What no forward looks at is not compared, and what it does is compared by itself."""
_SIMPLE = tuple(f"torch.nn.modules.{name}" for name in ("activation", "container", "conv", "linear", "normalization"))
"""Files of torch whose modules have no settings that anybody changes. Most modules are of these."""
_data_ptr = torch.Tensor.data_ptr


class Snapshot:
    """What a forward of a model depends on beside its inputs."""

    def __init__(self, model: torch.nn.Module, idle: Collection[torch.nn.Module] = ()) -> None:
        """`idle`: modules that take no part."""
        modules = [module for module in model.modules() if module not in idle]
        entries = list(map(vars, modules))
        held: list[Any] = [held for one in modules for held in (one._parameters, one._buffers) if held]
        self._held = [table.values() for table in held]
        self._flat = list(chain.from_iterable(self._held))
        self.weights = take_apart(tensor for tensor in self._flat if tensor is not None).plain
        self._addresses = list(map(_data_ptr, self.weights))
        told = [vars(module) for module in modules if type(module).__module__ not in _SIMPLE]
        objects = {id(held): held for table in told for held in table.values() if _is_plain_object(held)}
        told += map(vars, objects.values())
        containers = {id(held): held for table in told for held in _containers(table)}
        parts = [one._modules for one in modules if one._modules]
        self._tables: list[Any] = [*told, *parts, *(held for held in containers.values() if held)]
        self._copies = [held.copy() for held in self._tables]
        hooks = [held for one in modules for held in (one._forward_hooks, one._forward_pre_hooks)]
        self._empty = [*hooks, *(held for held in containers.values() if not held)]
        self._entries, self._lengths = entries, list(map(len, entries))
        self._modules, self._types = modules, list(map(type, modules))
        self._named = [(table, name, value) for table in told for name, value in table.items()
                       if isinstance(value, torch.Tensor)]  # fmt: skip
        self._methods = _methods(modules, objects.values())

    def is_in_place(self) -> bool:
        """Whether the weights are where they were: a replay may not run otherwise."""
        return self._addresses == list(map(_data_ptr, self.weights))

    def is_current(self) -> bool:
        """Whether a forward would do the same."""
        if any(self._empty) or self._lengths != list(map(len, self._entries)):
            return False
        if not all(map(is_, map(type, self._modules), self._types)):
            return False
        if not all(map(is_, chain.from_iterable(self._held), self._flat)):
            return False
        if not all(table.get(name) is value for table, name, value in self._named):
            return False
        try:
            same = all(map(eq, self._tables, self._copies))
        except (RuntimeError, ValueError):  # A tensor or an array has taken the place of another.
            return False
        return same and all(map(is_, _current(self._methods), (method for _, _, method in self._methods)))

    def changed(self) -> str:
        """The first thing that is not as it was, in words."""
        if not self.is_in_place():
            return "its weights"
        for table, before in zip(self._tables, self._copies, strict=True):
            if isinstance(table, dict) and table != before:
                names = [str(name) for name in {**before, **table} if table.get(name) is not before.get(name)]
                return f"the attribute {names[0]!r}" if names else "an attribute"
        return "a hook or a method"


def _containers(table: dict[str, Any], depth: int = 2) -> Iterator[Any]:
    """The containers among some attributes, and those in them."""
    for name, value in table.items():
        if isinstance(value, _CONTAINERS) and name not in _TORCH_ENTRIES and not str(name).startswith("_samovar_"):
            yield value
            if depth and isinstance(value, dict):
                yield from _containers(value, depth - 1)


def _is_plain_object(value: Any) -> bool:
    """Whether an attribute is an object with settings of its own, such as an attention processor."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (torch.nn.Module, torch.Tensor, HookRegistry, type))
        and not callable(getattr(value, "__get__", None))
        and type(value).__module__.partition(".")[0] not in ("torch", "builtins")
        and not isinstance(value, _CONTAINERS)
    )


Method = tuple[Any, str, Any]


def _methods(modules: list[torch.nn.Module], objects: Any) -> list[Method]:
    called = {type(one): "__call__" for one in objects if callable(one)}
    classes = {type(one): "forward" for one in modules} | called
    return [(cls, name, getattr(cls, name, None)) for cls, name in classes.items()]


def _current(methods: list[Method]) -> Iterator[Any]:
    return (getattr(cls, name, None) for cls, name, _ in methods)


# ------------------------------------------------------------------------------------------------ hooks


def obstacle(model: torch.nn.Module) -> str | None:
    """Which hooks a replay would leave out that must not be left out, if there are any."""
    own = attached_registry(model)
    if own is not None and own.hooks(HookOrder.SHARD):
        return "ranks exchange tensors inside its forward"
    if has_global_hooks():
        return "torch has global hooks, which see every module"
    if has_cache_dit(model):
        return "cache-dit decides inside its forward what runs"
    for path, module in model.named_modules():
        where = f"{path or type(unwrapped(model)).__name__} has"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{where} forward hooks of its user, which a replay would not call"
        if accelerate_hook(module) is not None:
            return f"{where} a hook of accelerate, which moves weights"
        if theirs := [name for name in diffusers_hooks(module) if not is_helper(name)]:
            return f"{where} diffusers' hook {theirs[0]!r}, which a replay would not call"
        registry = attached_registry(module)
        if registry is not None and module is not model:
            for name, order in registry.chain:
                hook = registry.get_hook(name)
                if hook is not None and not hook.may_be_left_out:
                    streams = "its weights are streamed" if order is HookOrder.OFFLOAD else f"the hook {name!r}"
                    return f"{where} what a replay would leave out: {streams}"
    return None
