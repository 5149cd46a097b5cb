"""How does a call of a module reach its hooks?

A hooked module's class is swapped for a subclass of the same name whose `__call__` goes through the
registry. So hooks stand outside of everything that others put on the instance: accelerate's and
diffusers' hooks replace `forward`, `Module.compile` replaces what `__call__` runs, and torch's own
forward hooks run inside it; all stay as they are, whoever came first. Restoring the class and
dropping one entry of `__dict__` is all it takes to be gone. Copies and pickles are of the bare class.

Calling `module.forward(...)` by hand goes through the hooks as well, once.

Under `torch.compile` hooks run outside the graph. A compiled block (`block.compile()`, before or
after hooking) stays one graph. Compiling a module *around* hooked ones breaks its graph at each.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .registry import HookRegistry

    _Module = torch.nn.Module
else:
    _Module = object

_ENTRY = "_samovar_hooks"


class _Inside(threading.local):
    """The module whose own forward comes next on this thread: it must not be intercepted again."""

    module: torch.nn.Module | None = None


_inside = _Inside()
_torch_call = torch.nn.Module.__call__
_any_global_hook: Callable[[], Any] = torch.nn.modules.module._has_any_global_hook
_is_compiling = torch.compiler.is_compiling


class _Hooked(_Module):
    """Put before a module's class to intercept its calls."""

    bare_forward: Callable[..., Any]
    bare_call: Callable[..., Any]
    """The class's own `forward`, and its own `__call__`, which takes the module as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return _outside_graph["call"](self, args, kwargs)
        registry = self.__dict__.get(_ENTRY)
        if registry is None:  # Another library swapped the class after us, and our hooks are gone.
            return call_bare(self, args, kwargs)
        return registry.run(self, call_bare, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the bare module, and need no Samovar to be read."""
        reduced: Any = super().__reduce_ex__(protocol)
        rebuild, arguments, *rest = reduced
        own, bare = type(self), bare_class(self)
        arguments = tuple(bare if item is own else item for item in arguments)
        if rebuild is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle insists that this one makes an object of the very class it pickles.
            rebuild, arguments = copyreg._reconstructor, (*arguments, object, None)  # type: ignore[attr-defined]
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if key != _ENTRY}
        return (rebuild, arguments, *rest)


def attached_registry(module: torch.nn.Module) -> HookRegistry | None:
    """The registry that intercepts a module's calls, if it is hooked."""
    registry: HookRegistry | None = vars(module).get(_ENTRY)
    return registry


def install(module: torch.nn.Module, registry: HookRegistry) -> None:
    """Bring the module's calls to the registry."""
    if not _outside_graph:
        # Not when this file is imported: torch's compiler takes seconds to load.
        _outside_graph["call"] = outside_graph(_call_outside_graph, recursive=False)
        _outside_graph["call_bare"] = outside_graph(call_bare, recursive=False)
        _outside_graph["runner"] = outside_graph(_runner)
    vars(module)[_ENTRY] = registry
    if not isinstance(module, _Hooked):
        module.__class__ = _hooked_class(type(module))


def uninstall(module: torch.nn.Module) -> None:
    """Leave the module as it was."""
    vars(module).pop(_ENTRY, None)
    module.__class__ = bare_class(module)


def bare_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The module's own class, hooked or not."""
    cls = type(module)
    bare: type[torch.nn.Module] = cls.__bases__[-1] if cls.__bases__[0] is _Hooked else cls
    return bare


def call_bare(module: Any, args: Any, kwargs: Any) -> Any:
    """Call a hooked module as if it had no hooks of ours."""
    instance = module.__dict__
    if not (
        instance["_forward_hooks"]
        or instance["_forward_pre_hooks"]
        or instance["_backward_hooks"]
        or instance["_backward_pre_hooks"]
        or "_compiled_call_impl" in instance
        or "forward" in instance
        or module.bare_call is not _torch_call
        or _any_global_hook()
    ):
        # Nobody put anything around forward, so torch would call it and do no more.
        return module.bare_forward(*args, **kwargs)
    outer = _inside.module
    _inside.module = module
    try:
        return module.bare_call(module, *args, **kwargs)
    finally:
        _inside.module = outer


_outside_graph: dict[str, Callable[..., Any]] = {}


def _call_outside_graph(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    run = _outside_graph["runner"](module)
    call = _outside_graph["call_bare"]
    return call(module, args, kwargs) if run is None else run(module, call, args, kwargs)


def _runner(module: torch.nn.Module) -> Callable[..., Any] | None:
    registry = attached_registry(module)
    return None if registry is None else registry.run_outside_graph


def outside_graph(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """The function, never compiled; nor what it calls, unless `recursive` is False."""
    disable: Any = torch.compiler.disable
    disabled: Callable[..., Any] = disable(function, recursive=recursive)
    return disabled


_hooked_classes: dict[type, type[torch.nn.Module]] = {}


def _hooked_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """One subclass for all instances of a class, so that compiled blocks go on sharing their code."""
    if cls not in _hooked_classes:
        body: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "forward": _intercepted_forward(cls),
            "bare_forward": cls.forward,
            "bare_call": staticmethod(cls.__call__),
        }
        if hasattr(cls, "cache_context"):
            body["cache_context"] = _followed_cache_context(cls.cache_context)
        make_class: Any = type(cls)
        _hooked_classes[cls] = make_class(cls.__name__, (_Hooked, cls), body)
    return _hooked_classes[cls]


def _intercepted_forward(cls: type[torch.nn.Module]) -> Callable[..., Any]:
    bare: Callable[..., Any] = cls.forward

    def call_forward(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return bare(module, *args, **kwargs)

    @functools.wraps(bare)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return bare(self, *args, **kwargs)
        if _inside.module is self:
            _inside.module = None
            return bare(self, *args, **kwargs)
        registry = attached_registry(self)
        if registry is None:  # Somebody kept this bound method from when the module was hooked.
            return bare(self, *args, **kwargs)
        return registry.run(self, call_forward, args, kwargs)

    return forward


def _followed_cache_context(bare: Callable[..., Any]) -> Callable[..., Any]:
    """diffusers' `cache_context`, which names the branch of the calls inside it for us too."""

    @functools.wraps(bare)
    @contextlib.contextmanager
    def cache_context(self: torch.nn.Module, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        from .context import call_context

        with call_context(branch=name), bare(self, name, *args, **kwargs):
            yield

    return cache_context
