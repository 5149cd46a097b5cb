"""Interception of a module's calls by its hooks.

A hooked module's type is swapped for a subclass of the same name whose `__call__` goes through the registry. So hooks
are outside of everything that others put on the instance: accelerate's and diffusers' hooks replace `forward`,
`Module.compile` replaces the code that `__call__` runs, and torch's own forward hooks run inside it. All of them stay
as they are, whoever came first. To others the module's `__class__` is unchanged, and its `type()` equals it; only
`type(module) is Class` sees the difference. Copies and pickles are of the bare class.

A method that others replace on the module's class (`Class.forward = faster`) takes effect at the next call, hooked or
not. A direct call of `module.forward(...)` is a call of the module, unless another library has put its own `forward` on
the instance.

Under `torch.compile` hooks run outside the graph. A compiled block (`block.compile()`, before or after hooking) stays
one graph. Compiling a module *around* hooked ones breaks its graph at each. A compiled function does not see a hooked
child whose `forward` it calls directly: that child runs without its hooks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import HookConflictError, SettingError
from ..core.interop import COMPILED_CALL, global_hooks
from .context import call_context

if TYPE_CHECKING:
    from .registry import HookRegistry

    _Module = torch.nn.Module
else:
    _Module = object

Function = Callable[..., Any]
_ENTRY = "_samovar_hooks"
_INSIDE = "_samovar_inside"

set_class: Callable[[Any, type], None] = object.__dict__["__class__"].__set__
"""Swaps an object's class, whatever the object itself says of its `__class__`."""
_plain_call: Any = torch.nn.Module.__call__
_plain_call_impl: Any = torch.nn.Module._call_impl
_GLOBAL_HOOKS = global_hooks()
_is_compiling = torch.compiler.is_dynamo_compiling


class _Inside(threading.local):
    """The module whose own forward is running on this thread: it must not be intercepted again."""

    module: torch.nn.Module | None = None


_inside = _Inside()


class BareCopies:
    """Put before a class: copies and pickles are of the bare class, and need no Samovar to be read."""

    _samovar_bare: Any
    """The class that this one stands before. Its methods are looked up at each call: others may replace them."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        rebuild, arguments, *rest = reduced
        own = type(self)
        bare = vars(own).get("_samovar_bare", own)
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if not str(key).startswith("_samovar_")}
        return (rebuild, tuple(bare if item is own else item for item in arguments), *rest)


def class_before(cls: Any, front: type, body: dict[str, Any], metaclass: Any = None) -> Any:
    """A class of the same name that puts `front` before a class."""
    identity = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    make_class = metaclass or type(cls)
    return make_class(cls.__name__, (front, cls), {**identity, "_samovar_bare": cls, **body})


class _Hooked(BareCopies, _Module):
    """Put before a module's class to intercept its calls."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return _outside_graph.call(self, args, kwargs)
        registry = self.__dict__.get(_ENTRY)
        if registry is None:  # A class was derived from this type while there were hooks, and they are gone.
            return super().__call__(*args, **kwargs)
        return registry.run(self, call_bare, args, kwargs)


def attached_registry(module: torch.nn.Module) -> HookRegistry | None:
    """The registry that intercepts a module's calls, if it is hooked."""
    registry: HookRegistry | None = module.__dict__.get(_ENTRY)
    return registry


def install(module: torch.nn.Module, registry: HookRegistry) -> None:
    """Bring the module's calls to the registry; a module that does not allow it is left as it was."""
    attached = attached_registry(module)
    if attached is registry:
        return
    if attached is not None:
        raise HookConflictError(
            f"This {type(module).__name__} is hooked through another registry. Use HookRegistry.get_or_create(module)."
        )
    _prepare_for_compilation()
    try:
        set_class(module, _hooked_class(type(module), hasattr(module, "cache_context")))
    except (TypeError, AttributeError) as error:
        raise SettingError(
            f"A {type(module).__name__} cannot be hooked, because its class cannot be subclassed ({error}). "
            "Hook the module that it wraps, or one that contains it."
        ) from error
    vars(module)[_ENTRY] = registry
    vars(module)[_INSIDE] = False


def uninstall(module: torch.nn.Module, registry: HookRegistry) -> None:
    """Leave the module as it was before `install`."""
    if attached_registry(module) is registry:
        del vars(module)[_ENTRY], vars(module)[_INSIDE]
        set_class(module, bare_class(module))


def bare_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The module's own class, hooked or not."""
    cls = type(module)
    bare: type[torch.nn.Module] = cls.__bases__[-1] if cls.__bases__[0] is _Hooked else cls
    return bare


def call_bare(module: Any, args: Any, kwargs: Any) -> Any:
    """Call a module as if it had no hooks of ours, or replay such a call where it is recorded."""
    registry = module.__dict__.get(_ENTRY)
    if registry is None:  # The last hook removed itself during the call.
        return module(*args, **kwargs)
    if registry.arrive is not None:
        return registry.enter(_call_recorded, args, kwargs)
    return _call_recorded(module, args, kwargs)


def _call_recorded(module: Any, args: Any, kwargs: Any) -> Any:
    registry = module.__dict__.get(_ENTRY)
    if registry is None:
        return module(*args, **kwargs)
    recorder = registry.recorder
    if recorder is None or is_watched():
        return _call_itself(module, args, kwargs)
    return recorder(lambda given: _call_itself(module, *given), (args, kwargs))


def _call_itself(module: Any, args: Any, kwargs: Any) -> Any:
    instance, bare = module.__dict__, module._samovar_bare
    if not (
        instance["_forward_hooks"]
        or instance["_forward_pre_hooks"]
        or instance["_backward_hooks"]
        or instance["_backward_pre_hooks"]
        or "forward" in instance
        or COMPILED_CALL in instance
        or bare.__call__ is not _plain_call
        or bare._call_impl is not _plain_call_impl
        or any(_GLOBAL_HOOKS)
    ):
        # There is nothing around forward, so torch would only call it.
        return bare.forward(module, *args, **kwargs)
    outer, was_inside = _inside.module, instance[_INSIDE]
    _inside.module, instance[_INSIDE] = module, True
    try:
        return bare.__call__(module, *args, **kwargs)
    finally:
        _inside.module = outer
        if _INSIDE in instance:
            instance[_INSIDE] = was_inside


# ------------------------------------------------------------------------------------------------ recorded forwards

Recorder = Callable[[Callable[[Any], Any], Any], Any]
"""Runs a module's forward, or replays what it did: returns what the function returns for what is given, which are
tensors, numbers and strings in any containers. For inputs of one form it always does the same."""


class _Watched(threading.local):
    depth = 0


_watched = _Watched()


def is_watched() -> bool:
    """Whether forwards on this thread must run."""
    return _watched.depth > 0


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, forwards on this thread run."""
    _watched.depth += 1
    try:
        yield
    finally:
        _watched.depth -= 1


# ------------------------------------------------------------------------------------------------ hooked classes

_hooked_classes: dict[tuple[type, bool], type[torch.nn.Module]] = {}


def _hooked_class(cls: type[torch.nn.Module], has_cache_context: bool) -> type[torch.nn.Module]:
    """One subclass for all instances of a class, so that compiled blocks go on sharing their code."""
    if issubclass(cls, _Hooked):  # Derived by others from a hooked type: it intercepts already.
        return cls
    known = _hooked_classes.get((cls, has_cache_context))
    if known is None or vars(known)["forward"].__wrapped__ is not cls.forward:  # Its signature is shown.
        body: dict[str, Any] = {
            "__class__": property(bare_class, _set_class),
            "forward": _intercepted_forward(cls),
            _INSIDE: True,
        }
        if has_cache_context:
            body["cache_context"] = _followed_cache_context(cls)
        if hasattr(cls, "__deepcopy__"):
            body["__deepcopy__"] = _bare_deepcopy
        metaclass: Any = type(cls)
        made = class_before(cls, _Hooked, body, _equal_to_bare(metaclass))
        known = _hooked_classes[cls, has_cache_context] = made
    return known


@functools.cache
def _equal_to_bare(metaclass: Any) -> Any:
    """Keeps `type(module) == Class` and `type(module) in classes` true, which diffusers' `from_pipe` relies on."""

    def bare(cls: Any) -> Any:
        return vars(cls).get("_samovar_bare", cls)

    def equal(cls: Any, other: Any) -> bool:
        return isinstance(other, type) and bare(cls) is bare(other)

    def hashed(cls: Any) -> int:
        return hash(bare(cls))

    for function in (bare, equal, hashed):
        skip_frame(function)
    return type(metaclass.__name__, (metaclass,), {"__eq__": equal, "__hash__": hashed})


def _set_class(self: torch.nn.Module, cls: type) -> None:
    """Others may swap the class too (torch's parametrisations, lazy modules); ours stays in front of theirs."""
    is_hooked = attached_registry(self) is not None
    set_class(self, _hooked_class(cls, hasattr(self, "cache_context")) if is_hooked else cls)


def _intercepted_forward(bare: Any) -> Function:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            is_inside = self._samovar_inside
            return bare.forward(self, *args, **kwargs) if is_inside else _outside_graph.call(self, args, kwargs)
        registry = attached_registry(self)
        # Without a registry: this bound method was kept from when the module was hooked.
        if registry is None or _inside.module is self or "forward" in self.__dict__:
            return bare.forward(self, *args, **kwargs)
        return registry.run(self, call_bare, args, kwargs)

    # torch limits the number of graphs per code object: every class has its own, as it had without hooks.
    forward.__code__ = forward.__code__.replace()
    return functools.wraps(bare.forward)(forward)


def _followed_cache_context(cls: Any) -> Function:
    """diffusers' `cache_context`, which names the branch of the calls inside it for us too."""

    @contextlib.contextmanager
    def cache_context(self: torch.nn.Module, name: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # A wrapper, such as a compiled model, has no own method but passes on that of the model inside.
        has_own = hasattr(cls, "cache_context")
        bare = cls.cache_context.__get__(self) if has_own else cls.__getattr__(self, "cache_context")
        with call_context(branch=name), bare(name, *args, **kwargs) as inner:
            yield inner

    return cache_context


def _bare_deepcopy(self: torch.nn.Module, memo: dict[int, Any]) -> Any:
    """For classes that copy themselves: what they copy must be bare."""
    hooked, entries = type(self), {key: vars(self).pop(key) for key in list(vars(self)) if key.startswith("_samovar_")}
    set_class(self, bare_class(self))
    try:
        return copy.deepcopy(self, memo)
    finally:
        set_class(self, hooked)
        vars(self).update(entries)


# ------------------------------------------------------------------------------------------------ torch.compile


class _OutsideGraph:
    """Where a graph breaks to run hooks."""

    call: Function
    runner: Callable[[torch.nn.Module], Any]


_outside_graph = _OutsideGraph()


def _prepare_for_compilation() -> None:
    """Called at the first hook and not on import: torch's compiler takes seconds to load."""
    if not vars(_outside_graph):
        _outside_graph.runner = never_compiled(lambda module: attached_registry(module).run_outside_graph)  # type: ignore[union-attr]
        _outside_graph.call = never_compiled(_call_outside_graph, recursive=False)
        calls = _call_outside_graph, call_bare, _call_recorded, _call_itself, bare_class, attached_registry
        for function in calls:
            skip_frame(function)
        from torch._dynamo import trace_rules

        # These run outside of the graph of a model that is compiled as a whole.
        of_hooks = ("hooks.runs", "hooks.branches", "hooks.roles")
        for room in ("core.nested", *of_hooks, "arch", "trace", "cache"):
            trace_rules.add(f"samovar.{room}")


def _call_outside_graph(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return _outside_graph.runner(module)(module, call_bare, args, kwargs)


def never_compiled(function: Function, recursive: bool = True) -> Function:
    """The function outside of any graph and, if `recursive`, everything that it calls too."""
    disable: Any = torch.compiler.disable
    disabled: Function = disable(function, recursive=recursive)
    return disabled


def skip_frame(function: Function) -> Function:
    """Make torch's compiler leave this function as it is; what it calls may be compiled."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)
    return function
