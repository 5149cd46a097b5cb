"""Would a replay still do what the model's forward does? And does it leave out anything that others rely on?

A replay reads weights at the addresses that they had, so it sees what is written into them. Anything else that a
forward looks at in Python must be as it was: modules, adapters and their scales, attention processors, settings, hooks
(`looked`), methods and functions (`code`), and torch's choice of kernels. All of that is compared in C, so that a
thousand modules take less than a millisecond, while the device computes.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Iterator
from itertools import chain
from operator import attrgetter, eq, getitem, is_
from typing import Any

import torch

from ..arch.modules import unwrapped
from ..core.interop import accelerate_hook, diffusers_hooks, global_hooks, has_cache_dit, is_helper, kernel_settings
from ..core.tensor_parts import is_strided, take_apart
from ..hooks import HookOrder
from ..hooks.intercept import attached_registry
from .code import Reached
from .looked import Looked

_address, _dtype, _contents = torch.Tensor.data_ptr, attrgetter("dtype"), attrgetter("cell_contents")
_FORMS = (torch.Tensor.size, torch.Tensor.stride)


class Snapshot:
    """What a forward of a model depends on beside its inputs. It keeps no weight alive that the model has dropped."""

    def __init__(self, model: torch.nn.Module, idle: Collection[torch.nn.Module] = ()) -> None:
        """`idle`: modules that take no part."""
        self.is_of_parts, seen = idle != (), Looked(model, idle)
        reached = Reached(seen.classes.values(), seen.functions)
        self._code, self._cells = reached.lookups(), reached.cells
        self._contents = list(map(_contents, self._cells))
        seen.look_at(chain(self._code[-1], self._contents))
        self._held = [table.values() for table in seen.weights]
        held, others = list(chain.from_iterable(self._held)), [one for one in seen.tensors if is_strided(one[2])]
        self._ids = list(map(id, held))
        parts = take_apart([one for one in (*held, *(tensor for *_, tensor in others)) if one is not None])
        self._weights = list(map(weakref.ref, parts.plain))
        self._addresses = list(map(_address, self.weights()))
        self._dtypes = list(map(_dtype, self.weights()))
        self._forms = [(of, list(map(of, self.weights()))) for of in _FORMS]
        self._tables = [*seen.tables, *(table for table in parts.tables if table)]
        self._copies = [table.copy() for table in self._tables]
        self._empty = [*seen.empty, *global_hooks()]
        self.modules, self._types = seen.modules, list(map(type, seen.modules))
        places = [one for one in others if one[0] is not None]
        self._in, self._keys, self._tensors = map(list, zip(*places, strict=True)) if places else ([], [], [])
        self._slotted = [(holder, name, getattr(holder, name)) for holder, name in seen.slotted]
        self._classes = list(map(vars, reached.classes))
        self._lengths = _lengths(self._classes)
        self._settings = kernel_settings()

    def weights(self) -> Iterator[torch.Tensor]:
        """The plain tensors that a forward reads; None in place of what is gone."""
        call: Any = operator.call
        return map(call, self._weights)

    def is_in_place(self) -> bool:
        """Whether the weights are where they were: a replay may not run otherwise."""
        try:
            return self._addresses == list(map(_address, self.weights()))
        except TypeError:  # One is gone.
            return False

    def is_current(self) -> bool:
        """Whether a forward would do the same."""
        if any(self._empty) or not all(map(is_, map(type, self.modules), self._types)):
            return False
        if not self.has_same_weights():
            return False
        try:
            # Not a list of them: a thousand tuples would have the garbage collector run.
            has_same_forms = all(all(map(eq, map(of, self.weights()), before)) for of, before in self._forms)
            has_same_dtypes = all(map(is_, map(_dtype, self.weights()), self._dtypes))
            return has_same_forms and has_same_dtypes and self._holds_the_same() and self._runs_the_same()
        except (RuntimeError, ValueError):  # A tensor or an array has taken the place of another.
            return False
        except (TypeError, KeyError, IndexError, AttributeError):  # Something is gone.
            return False

    def has_same_weights(self) -> bool:
        """Whether parameters and buffers are those that were there."""
        return self._ids == list(map(id, chain.from_iterable(self._held)))

    def is_of(self, modules: Collection[torch.nn.Module]) -> bool:
        """Whether a model of these modules may come to be as it was: none has gone, and no weight was replaced."""
        return all(module in modules for module in self.modules) and self.has_same_weights()

    def _holds_the_same(self) -> bool:
        return (
            all(map(eq, self._tables, self._copies))
            and all(map(is_, map(getitem, self._in, self._keys), self._tensors))
            and all(_is_same(getattr(holder, name), before) for holder, name, before in self._slotted)
        )

    def _runs_the_same(self) -> bool:
        getters, namespaces, values = self._code
        now = chain.from_iterable(map(operator.call, getters, namespaces))
        has_same_code = all(map(is_, now, values)) and self._lengths == _lengths(self._classes)
        has_same_code = has_same_code and all(map(is_, map(_contents, self._cells), self._contents))
        return has_same_code and self._settings == kernel_settings()

    def changed(self) -> str:
        """The first thing that is not as it was, in words."""
        if not self.is_in_place():
            return "its weights"
        for table, before in zip(self._tables, self._copies, strict=True):
            if isinstance(table, dict) and table != before:
                names = [str(name) for name in {**before, **table} if table.get(name) is not before.get(name)]
                return f"the attribute {names[0]!r}" if names else "an attribute"
        return "a hook, a method or an attribute"


def _is_same(one: Any, other: Any) -> bool:
    """Whether a forward cannot tell two values apart. Of a tensor it reads the memory."""
    return one is other or (not isinstance(one, torch.Tensor) and bool(one == other))


def _lengths(classes: list[Any]) -> list[int]:
    """How many attributes each has, but for a note that Python itself makes when an object is copied."""
    return [len(entries) - ("__slotnames__" in entries) for entries in classes]


# ------------------------------------------------------------------------------------------------ hooks


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
