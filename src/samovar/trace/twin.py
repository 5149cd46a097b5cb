"""Trial runs without side effects, on a model's twin.

A twin is a tree of other module objects of the same classes with the same parameters. A trial on it fires nobody's
hooks, advances none of the model's counters, draws none of the user's random numbers, and writes into no tensor that
the user holds. Modules that must not run in a trial, such as blocks, are answered for.
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
from torch.nn import Module

from ..arch.modules import unwrapped
from ..core import nested
from ..core.interop import CAPTURING_OUTPUTS, COMPILED_CALL, FORWARD_WRAPPERS, accelerate_weights, compute_dtype
from ..core.quantisers import begin_state, kept_beside_weights, move_beside_weights
from ..core.tensor_parts import is_plain, rebuilt
from ..hooks import HookOrder, HookRegistry
from ..hooks.intercept import attached_registry, bare_class, never_compiled

Forward = Callable[..., Any]
Answer = Callable[[Forward, Any, Any], Any]
"""Called in place of a module's forward: with the forward of its twin, and the arguments."""
Answers = Mapping[Module, Answer]

_SHARED = (
    type(None), bool, int, float, complex, str, bytes, type, types.BuiltinFunctionType, types.ModuleType, torch.dtype,
    torch.device, torch.Size, Module
)  # fmt: skip
"""Values that no forward writes into, and modules of others."""
_MAX_DEPTH = 6
_HOOKS = frozenset(key for key in vars(Module()) if key.endswith("_hooks") or "_hooks_" in key)
"""Entries that hold torch's hooks."""
_OTHERS_ENTRIES = FORWARD_WRAPPERS | {COMPILED_CALL, CAPTURING_OUTPUTS}
"""Entries of others' hooks, and of torch.compile; a twin has none of them, and none of ours. transformers puts the
hooks that it needs on the twin as well, when it finds no note that they are there."""


class TrialFailed(Exception):
    """The model raised during a trial."""


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
            if isinstance(error, TrialFailed) or not isinstance(error, Exception):  # Ctrl-C is not the model's failure.
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


def twin_of(module: Module, answers: Answers | None = None, **how: Any) -> Module:
    """A module's twin, with everything in it; TrialFailed if it has parts that cannot be copied. `how`: see Copier."""
    with trial(()):
        return Copier(answers, **how).copy(module)


def run_trial(twin: Module, args: Any, kwargs: Any) -> Any:
    """The output of a twin for copies of these arguments; TrialFailed for whatever the model raises."""
    given = nested.map_tensors(torch.clone, (args, kwargs))
    with trial((args, kwargs)):
        return never_compiled(twin.__call__)(*given[0], **given[1])


def free(twin: Module) -> None:
    """Free a twin at once, and all tensors in it: its answers form cycles with it."""
    for part in list(twin.modules()):
        vars(part).clear()


class Copier:
    """Makes twins of modules, one of each however often it is held."""

    def __init__(
        self, answers: Answers | None = None, *, sharded: bool = True, device: torch.device | None = None
    ) -> None:
        """`answers`: called in place of these modules. `sharded`: as a rank computes its share, if the model is split.
        `device`: where weights are copied to when they are needed and lie elsewhere."""
        self._answers, self._sharded, self._device = answers or {}, sharded, device
        self._copies: dict[int, Any] = {}
        """By the identity of the original: of modules, and of objects that they hold, so that shared ones stay so."""

    def copy(self, root: Module) -> Module:
        """The twin of a module, with everything in it."""
        new = {id(bare): bare for bare in map(unwrapped, root.modules()) if id(bare) not in self._copies}
        for key, module in new.items():  # All of them first: attributes may hold any of them.
            self._copies[key] = _blank(module)
            begin_state(module)
            self._copies |= {id(tensor): tensor for tensor in kept_beside_weights(module)}
        for key, module in new.items():
            self.fill(self._copies[key], module)
            if self._sharded and module is not unwrapped(root):  # The root's have run when it is tried.
                _keep_sharding(self._copies[key], module)
        found: Module = self._copies[id(unwrapped(root))]
        return found

    def fill(self, twin: Module, module: Module) -> None:
        """Give a twin what its module has."""
        entries = vars(twin)
        left_out = _OTHERS_ENTRIES if FORWARD_WRAPPERS.isdisjoint(vars(module)) else _OTHERS_ENTRIES | {"forward"}
        for key, value in vars(module).items():
            if key in _HOOKS:
                entries[key] = OrderedDict()
            elif key not in left_out and not key.startswith("_samovar_"):
                entries[key] = self.translated(value)
        self.place_weights(twin, module)
        if module in self._answers:
            answer(twin, self._answers[module])

    def place_weights(self, twin: Module, module: Module) -> None:
        """Have a twin find its weights when it runs."""
        is_elsewhere = any(weight is not None and weight.is_meta for weight in module._parameters.values())
        if self._device is not None or compute_dtype(module) or is_elsewhere:
            answer(twin, _bringing_weights(module, twin, self._device))

    def translated(self, value: Any, depth: int = _MAX_DEPTH) -> Any:
        """An attribute for the twin: twins replace modules, copies replace what the model may write into."""
        value = unwrapped(value) if isinstance(value, Module) else value
        if id(value) not in self._copies:
            if isinstance(value, _SHARED) or not depth:
                return value
            self._copies[id(value)] = self._translated(value, functools.partial(self.translated, depth=depth - 1))
        return self._copies[id(value)]

    def _translated(self, value: Any, inner: Callable[[Any], Any]) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, inner(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(inner(value.func), *inner(value.args), **inner(value.keywords))
        if type(value) in (list, tuple, set, deque):
            return type(value)(map(inner, value))
        if type(value) in (dict, OrderedDict):
            return type(value)((key, inner(item)) for key, item in value.items())
        with contextlib.suppress(Exception):  # An empty cell, a lock, a stream or a process group is no state.
            if isinstance(value, types.FunctionType):
                return _closing_over(value, inner) if value.__closure__ else value
            copied = copy.copy(value)
            if hasattr(copied, "__dict__"):
                vars(copied).update({key: inner(item) for key, item in vars(value).items()})
            return copied
        return value

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """What takes the place of a tensor that is no parameter of a module."""
        return tensor if isinstance(tensor, torch.nn.Parameter) or tensor.is_meta else tensor.detach().clone()


def _closing_over(function: types.FunctionType, inner: Callable[[Any], Any]) -> types.FunctionType:
    """A function with other values in its closure."""
    cells = tuple(types.CellType(inner(cell.cell_contents)) for cell in function.__closure__ or ())
    defaults = function.__defaults__
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def answer(twin: Module, by: Answer) -> None:
    """Have calls of a twin answered for."""
    forward = twin.forward

    @functools.wraps(forward)
    def answered(*args: Any, **kwargs: Any) -> Any:
        return by(forward, args, kwargs)

    vars(twin)["forward"] = answered


def _blank(module: Module) -> Module:
    """A twin that has nothing yet."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"a {module.original_name} is scripted, and has no state in Python that can be copied")
    return object.__new__(_quiet_class(bare_class(module)))


_quiet_classes: weakref.WeakKeyDictionary[type, type[Module]] = weakref.WeakKeyDictionary()


def _quiet_class(cls: type[Module]) -> type[Module]:
    """A class whose calls run only the instance's hooks: torch's global hooks belong to others."""
    if cls not in _quiet_classes:
        make_class: Any = type(cls)
        body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_call_impl": _quiet_call}
        _quiet_classes[cls] = make_class(cls.__name__, (cls,), body)
    return _quiet_classes[cls]


def _quiet_call(self: Module, *args: Any, **kwargs: Any) -> Any:
    for before in self._forward_pre_hooks.values():
        before(self, args)
    output = self.forward(*args, **kwargs)
    for after in self._forward_hooks.values():
        after(self, args, output)
    return output


def _keep_sharding(twin: Module, module: Module) -> None:
    """Hooks that shard work over ranks are part of a forward."""
    registry = attached_registry(module)
    for name, hook in {} if registry is None else registry.hooks(HookOrder.SHARD).items():
        HookRegistry.get_or_create(twin).register_hook(name, hook)


def _bringing_weights(original: Module, twin: Module, device: torch.device | None) -> Answer:
    """Copy weights to a twin when it runs, where the original's are elsewhere or in another dtype than it computes."""
    stored, dtype = accelerate_weights(original), compute_dtype(original)

    def bring(forward: Forward, args: Any, kwargs: Any) -> Any:
        where = device or next((tensor.device for tensor in nested.tensors((args, kwargs))), torch.device("cpu"))
        for held in (twin._parameters, twin._buffers):
            for name, tensor in held.items():
                if tensor is not None and (tensor.device != where or dtype not in (None, tensor.dtype)):
                    source = stored[name] if tensor.is_meta and stored is not None else tensor
                    cast = dtype if is_plain(source) else None
                    held[name] = rebuilt(source, lambda plain, cast=cast: plain.detach().to(where, cast))  # type: ignore[misc]
        move_beside_weights(twin, where)
        return forward(*args, **kwargs)

    return bring
