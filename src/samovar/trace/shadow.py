"""Trial runs without side effects, on a model's shadow.

A shadow is a tree of other module objects of the same classes with the same parameters. A trial on the shadow fires
nobody's hooks, advances none of the model's counters, draws none of the user's random numbers, and writes into no
tensor that the user holds. Modules that must not run in a trial, such as blocks, are answered for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..arch.modules import unwrapped
from ..core import nested
from ..core.interop import CAPTURING_OUTPUTS, COMPILED_CALL, FORWARD_WRAPPERS, accelerate_weights, compute_dtype
from ..core.quantisers import begin_state, kept_beside_weights, move_beside_weights
from ..core.tensor_parts import is_plain, rebuilt
from ..hooks import NOT_BYPASSED, HookOrder, HookRegistry
from ..hooks.intercept import attached_registry, bare_class, never_compiled

Answer = Callable[[torch.nn.Module, Any, Any], Any]
"""Called with the original module and its arguments; NOT_BYPASSED lets the shadow's forward run."""

_SHARED = (
    type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, types.BuiltinFunctionType,
    types.ModuleType, torch.dtype, torch.device, torch.Size
)  # fmt: skip
"""Values that no forward writes into."""
_HOOKS = frozenset(key for key in vars(torch.nn.Module()) if key.endswith("_hooks") or "_hooks_" in key)
"""Entries that hold torch's hooks."""
_OTHERS_ENTRIES = FORWARD_WRAPPERS | {COMPILED_CALL, CAPTURING_OUTPUTS}
"""Entries of others' hooks, and of torch.compile; a shadow has none of them, and none of ours. transformers puts the
hooks that it needs on the shadow as well, when it finds no note that they are there."""


class TrialFailed(Exception):
    """The model raised during a trial."""


class Shadow:
    """A model that can be tried."""

    def __init__(
        self, model: torch.nn.Module, answers: Mapping[torch.nn.Module, Answer], *, sharded: bool = True
    ) -> None:
        """`answers`: called in place of these modules. `sharded`: as a rank computes its share, if the model is split.
        TrialFailed if the model has parts that cannot be copied."""
        with trial(()):
            self.root = shadow_of(model, answers, sharded=sharded)

    def run(self, args: Any, kwargs: Any) -> Any:
        """The output for copies of these arguments; TrialFailed for whatever the model raises."""
        given = nested.map_tensors(torch.clone, (args, kwargs))
        with trial((args, kwargs)):
            return never_compiled(self.root.__call__)(*given[0], **given[1])

    def close(self) -> None:
        """Free the shadow at once, and all tensors here: its classes form cycles with this object, which only the
        garbage collector would find."""
        vars(self).clear()


def shadow_of(
    module: torch.nn.Module, answers: Mapping[torch.nn.Module, Answer] | None = None, *, sharded: bool = True
) -> torch.nn.Module:
    """A module's shadow, with everything in it."""
    return Copier(answers or {}, sharded).copy(unwrapped(module))


@contextlib.contextmanager
def trial(given: Any) -> Iterator[None]:
    """Inside, no gradients are recorded; afterwards all random generators are as before. An exception comes out as
    TrialFailed."""
    devices = {tensor.device for tensor in nested.tensors(given) if tensor.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(list(devices)), torch.set_grad_enabled(False):
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):  # The user's Ctrl-C is not the model's failure.
                raise
            raise TrialFailed(f"{type(error).__name__}: {error}") from error
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def draws_random_numbers(call: Callable[[], Any]) -> bool:
    """Whether a call draws from any global generator."""
    before = _random_states()
    call()
    return before != _random_states()


def _random_states() -> list[Any]:
    is_cuda_used: Callable[[], bool] = torch.cuda.is_initialized
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if is_cuda_used() else ())]
    return [random.getstate(), repr(np.random.get_state()), *(state.tolist() for state in states)]


class Copier:
    """Copies a tree of modules, each once however often it is held."""

    def __init__(self, answers: Mapping[torch.nn.Module, Answer], sharded: bool = True) -> None:
        self._answers, self._sharded = answers, sharded
        self._objects: dict[int, Any] = {}
        """Copies of attributes by the identity of the original: shared objects stay shared."""
        self._copies: dict[int, torch.nn.Module] = {}

    def copy(self, root: torch.nn.Module) -> torch.nn.Module:
        for module in root.modules():  # All of them first: attributes may hold any of them.
            bare = unwrapped(module)
            if isinstance(bare, torch.jit.ScriptModule):  # It has no state in Python and cannot be copied.
                self._copies[id(bare)] = bare
            elif id(bare) not in self._copies:
                self._copies[id(bare)] = object.__new__(_quiet_class(bare_class(bare)))
            begin_state(bare)
            self._objects |= {id(tensor): tensor for tensor in kept_beside_weights(bare)}
        for module in list(root.modules()):
            bare = unwrapped(module)
            shadow = self._copies[id(bare)]
            if not vars(shadow):
                self._fill(shadow, bare)
                if self._sharded:
                    _keep_sharding(shadow, bare, is_root=bare is root)
        return self._copies[id(root)]

    def _fill(self, shadow: torch.nn.Module, module: torch.nn.Module) -> None:
        entries: dict[str, Any] = {}
        answer = self._answers.get(module)
        is_wrapped = answer is not None or not FORWARD_WRAPPERS.isdisjoint(vars(module))
        for key, value in vars(module).items():
            if key.startswith("_samovar_") or key in _OTHERS_ENTRIES or (key == "forward" and is_wrapped):
                continue
            if key in _HOOKS:
                entries[key] = OrderedDict()
            elif key == "_modules":
                entries[key] = {
                    name: None if m is None else self._copies[id(unwrapped(m))] for name, m in value.items()
                }
            elif key == "_parameters":
                entries[key] = dict(value)
            else:
                entries[key] = self.translated(value)
        vars(shadow).update(entries)
        if answer is not None:
            shadow.__class__ = _answering_class(type(shadow), answer, module)
        elif compute_dtype(module) or any(p is not None and p.is_meta for p in module._parameters.values()):
            shadow.register_forward_pre_hook(bring_weights(module))

    def translated(self, value: Any, levels: int = 6) -> Any:
        """An attribute for the shadow: shadows replace modules, copies replace what the model may write into."""
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._with_cells(value, levels)
        if isinstance(value, _SHARED) or not levels:
            return value
        if isinstance(value, torch.nn.Module):
            return self._copies.get(id(unwrapped(value)), value)
        if isinstance(value, types.MethodType):
            owner = self._copies.get(id(value.__self__))
            return value if owner is None else types.MethodType(value.__func__, owner)
        if id(value) not in self._objects:
            self._objects[id(value)] = self._copied(value, levels - 1)
        return self._objects[id(value)]

    def _with_cells(self, function: types.FunctionType, levels: int) -> Any:
        """A function that closes over modules of the model, closing over their shadows instead."""
        held = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
        if not any(isinstance(item, torch.nn.Module) or hasattr(item, "__self__") for item in held):
            return function
        cells = tuple(types.CellType(self.translated(item, levels - 1)) for item in held)
        if len(cells) != len(function.__closure__ or ()):
            return function
        return types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )

    def _copied(self, value: Any, levels: int) -> Any:
        if isinstance(value, functools.partial):
            function, args, keywords = (self.translated(v, levels) for v in (value.func, value.args, value.keywords))
            return functools.partial(function, *args, **keywords)
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, torch.nn.Parameter) or value.is_meta else value.detach().clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if type(value) in (list, tuple, set, deque):
            return type(value)(self.translated(item, levels) for item in value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.translated(item, levels)) for key, item in value.items())
        try:
            copied = copy.copy(value)
        except (TypeError, ValueError, RuntimeError):  # A lock, a stream or a process group is not a forward's state.
            return value
        if copied is not value and hasattr(copied, "__dict__"):
            vars(copied).update({key: self.translated(item, levels) for key, item in vars(value).items()})
        return copied


_quiet_classes: weakref.WeakKeyDictionary[type, type[torch.nn.Module]] = weakref.WeakKeyDictionary()


def _quiet_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class whose calls run only the instance's hooks: torch's global hooks belong to others."""
    if cls not in _quiet_classes:
        _quiet_classes[cls] = subclass(cls, cls.forward, _call_impl=_quiet_call)
    return _quiet_classes[cls]


def _quiet_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    for before in self._forward_pre_hooks.values():
        before(self, args)
    output = self.forward(*args, **kwargs)
    for after in self._forward_hooks.values():
        after(self, args, output)
    return output


def _keep_sharding(shadow: torch.nn.Module, module: torch.nn.Module, is_root: bool) -> None:
    """Hooks that shard work over ranks are part of a forward; the root's have already run when it is tried."""
    registry = attached_registry(module)
    if registry is not None and not is_root:
        for name, hook in registry.hooks(HookOrder.SHARD).items():
            HookRegistry.get_or_create(shadow).register_hook(name, hook)


def _answering_class(cls: type[torch.nn.Module], answer: Answer, module: torch.nn.Module) -> type[torch.nn.Module]:
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = answer(module, args, kwargs)
        return cls.forward(self, *args, **kwargs) if output is NOT_BYPASSED else output

    return subclass(cls, functools.wraps(cls.forward)(forward))


def subclass(cls: type[torch.nn.Module], forward: Callable[..., Any], **others: Any) -> type[torch.nn.Module]:
    """A class of the same name with another forward."""
    make_class: Any = type(cls)
    body = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__, **others}
    made: type[torch.nn.Module] = make_class(cls.__name__, (cls,), body)
    return made


def bring_weights(original: torch.nn.Module, device: torch.device | None = None) -> Any:
    """A hook that copies weights to a shadow when it first runs, where the original's are elsewhere."""
    stored, dtype = accelerate_weights(original), compute_dtype(original)

    def bring(module: torch.nn.Module, args: Any) -> None:
        where = device or next((tensor.device for tensor in nested.tensors(args)), torch.device("cpu"))
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and (tensor.device != where or dtype not in (None, tensor.dtype)):
                    source = stored[name] if tensor.is_meta and stored is not None else tensor
                    held[name] = rebuilt(
                        source, functools.partial(_brought, where, dtype if is_plain(source) else None)
                    )
        move_beside_weights(module, where)

    return bring


def _brought(device: torch.device, dtype: torch.dtype | None, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device, dtype)
