"""The hooks around a module's call, and their order.

A call of a hooked module goes through its hooks in sorted order: every `pre_forward`, then the one hook that overrides
`new_forward` or else the module itself, then every `post_forward` in reverse. A hook's `bypass` may answer before any
of that. `intercept` brings the call here.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.errors import HookConflictError, SettingError
from . import intercept
from .intercept import Function, Recorder, never_compiled, skip_frame

NOT_BYPASSED: Any = type("NotBypassed", (), {"__repr__": lambda self: "NOT_BYPASSED"})()
"""What `ModelHook.bypass` returns to let the call go on."""


Forward = Callable[[Any, Any], Any]
"""What is left of a call, of arguments and keyword arguments."""


class HookOrder(enum.IntEnum):
    """Which hooks are outside of others. A cached step must not move weights, so cache is outside offload."""

    OUTERMOST = 0
    SHARD = 1
    CACHE = 2
    MEETING = 3
    OFFLOAD = 4
    OTHER = 5


class ModelHook:
    """Code attached to a module. Override only the methods that you need."""

    order: HookOrder = HookOrder.OTHER
    may_be_left_out = False
    """Whether a replayed forward of a module around this hook's may leave it out."""

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Called once, before the hook is attached; if it raises, the hook is not."""
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Called once, after the hook was removed or replaced."""
        return module

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """An output that replaces the call, or NOT_BYPASSED. No other hook sees a bypassed call."""
        return NOT_BYPASSED

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The positional and keyword arguments to go on with."""
        return args, kwargs

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's forward, which is `call_original`. Only one hook of a module may override this."""
        raise NotImplementedError(f"{type(self).__name__} does not override new_forward.")

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """The output to go on with."""
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        """Called in place of `post_forward` when something raised after this hook's `pre_forward`."""

    def arrive(self, module: torch.nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Computes a call that no cache has answered, perhaps together with others. `forward(args, kwargs)` goes on
        with the hooks inside the cache, and then the module itself. Only one hook of a module may override this."""
        return forward(args, kwargs)

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """Forget what was remembered from earlier calls."""
        return module

    def call_original(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with the hooks of other libraries around it; for use in `new_forward`."""
        return intercept.call_bare(module, args, kwargs)


def _overrides(hook: ModelHook, method: str) -> bool:
    return method in vars(hook) or getattr(type(hook), method) is not getattr(ModelHook, method)


class _Link(NamedTuple):
    """What a hook overrides of the methods around a call."""

    bypass: Function | None
    new_forward: Function | None
    pre_forward: Function | None
    post_forward: Function | None
    failed_forward: Function | None


class _Chain(NamedTuple):
    """The sorted hooks, reduced to the methods that they override: the others cost nothing."""

    links: tuple[_Link, ...] = ()
    override: Function | None = None

    def run(self, module: torch.nn.Module, inner: Function, args: Any, kwargs: Any) -> Any:
        num_open, links, override = 0, self.links, self.override
        for link in links:
            if link.bypass is not None:
                output = link.bypass(module, *args, **kwargs)
                if output is not NOT_BYPASSED:
                    return output
        try:
            for link in links:
                if link.pre_forward is not None:
                    args, kwargs = link.pre_forward(module, *args, **kwargs)
                num_open += 1
            output = inner(module, args, kwargs) if override is None else override(module, *args, **kwargs)
            for link in reversed(links):
                if link.post_forward is not None:
                    output = link.post_forward(module, output)
                num_open -= 1
            return output
        except BaseException as error:
            with contextlib.ExitStack() as stack:  # Innermost first; one that raises stops no other.
                for link in links[:num_open]:
                    if link.failed_forward is not None:
                        stack.callback(link.failed_forward, module, error)
            raise


def _chain_of(hooks: list[ModelHook], wrap: Callable[[Function], Function] | None) -> _Chain:
    def part(hook: ModelHook, method: str) -> Function | None:
        if not _overrides(hook, method):
            return None
        found: Function = getattr(hook, method)
        # The graph may go on inside new_forward, where the module's own forward is called.
        return found if wrap is None else skip_frame(found) if method == "new_forward" else wrap(found)

    links = tuple(filter(any, (_Link(*(part(hook, method) for method in _Link._fields)) for hook in hooks)))
    return _Chain(links, next((link.new_forward for link in links if link.new_forward is not None), None))


Runner = Callable[[torch.nn.Module, Function, Any, Any], Any]


class HookRegistry:
    """The hooks of one module. A module without hooks is not changed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._hooks: dict[str, ModelHook] = {}
        self.run: Runner = _Chain().run
        """Runs the hooks around `inner(module, args, kwargs)`."""
        self._run_outside_graph: Runner | None = None
        self.recorder: Recorder | None = None
        """Replays the module's own forward, inside all hooks."""
        self.arrive: Any = None
        """That of the hook that overrides it."""
        self._inside = _Chain()
        """Below a hook that overrides `arrive`: the hooks inside the cache, which run once for calls that meet."""

    @classmethod
    def get_or_create(cls, module: torch.nn.Module) -> HookRegistry:
        """The registry of a module; the same one as long as it has hooks or is referenced."""
        if not isinstance(module, torch.nn.Module):
            raise SettingError(f"Hooks attach to a torch.nn.Module, not to {module!r} ({type(module).__name__}).")
        attached = intercept.attached_registry(module) or _held_registries.get(id(module))
        if attached is None:
            attached = _held_registries[id(module)] = cls(module)
        return attached

    check_if_exists_or_initialize = get_or_create

    def register_hook(self, name: str, hook: ModelHook) -> None:
        """Attach a hook. One of the same name is replaced, with a warning. A refused hook changes nothing."""
        self._check(name, hook)
        module, replaced = self._module, self._hooks.get(name)
        with contextlib.ExitStack() as undo:
            if replaced is not None:
                warnings.warn(
                    f"Hook {name!r} on {type(module).__name__} is replaced. If you did not intend that, remove the "
                    "old one first or use another name.",
                    stacklevel=2,
                )
                replaced.detach_hook(module)
                undo.callback(replaced.initialize_hook, module)
            hook.initialize_hook(module)
            undo.callback(hook.detach_hook, module)
            undo.callback(self._use, dict(self._hooks))
            self._use({**self._hooks, name: hook})
            undo.pop_all()

    def _check(self, name: str, hook: ModelHook) -> None:
        if not isinstance(name, str) or not isinstance(hook, ModelHook):
            raise SettingError(
                f"register_hook takes a name and then a ModelHook, not {name!r} and {hook!r}. "
                "(diffusers' own registry takes them the other way round.)"
            )
        if not isinstance(hook.order, HookOrder):
            raise SettingError(
                f"The order of hook {name!r} must be a HookOrder, such as HookOrder.CACHE; not {hook.order!r}."
            )
        if _overrides(hook, "new_forward"):
            for other, present in self._hooks.items():
                if other != name and _overrides(present, "new_forward"):
                    raise HookConflictError(
                        f"Hook {name!r} overrides new_forward, but {other!r} does so already on this "
                        f"{type(self._module).__name__}, and only one can. Remove {other!r} first, or let "
                        f"{name!r} use pre_forward and post_forward."
                    )

    def _use(self, hooks: dict[str, ModelHook]) -> None:
        self._hooks.clear()
        self._hooks.update(hooks)
        self.update_sorted_hooks()

    def remove_hook(self, name: str) -> None:
        """Detach a hook; an unknown name is ignored. With the last one, every trace of us goes."""
        hook = self._hooks.pop(name, None)
        if hook is not None:
            self.update_sorted_hooks()
            hook.detach_hook(self._module)

    def get_hook(self, name: str) -> ModelHook | None:
        """The hook of that name, if there is one."""
        return self._hooks.get(name)

    def reset_hook(self, name: str) -> None:
        """Make one hook forget what it remembers; it stays attached."""
        hook = self._hooks.get(name)
        if hook is not None:
            hook.reset_state(self._module)

    def reset(self) -> None:
        """Remove all hooks and their states, innermost first; the module is as it was before the first."""
        with contextlib.ExitStack() as removals:
            for name, hook in self._hooks.items():
                removals.callback(self.remove_hook, name)
                removals.callback(hook.reset_state, self._module)

    def update_sorted_hooks(self) -> None:
        """Sort again: by order class, then by name, with a hook that overrides `new_forward` last in its class."""

        ordered = sorted(self._hooks.items(), key=lambda it: (it[1].order, _overrides(it[1], "new_forward"), it[0]))
        self._hooks.clear()
        self._hooks.update(ordered)
        self.run = self._build_chain().run
        self._run_outside_graph = None
        if self._hooks:
            intercept.install(self._module, self)
        else:
            intercept.uninstall(self._module, self)

    def enter(self, inner: Function, args: Any, kwargs: Any) -> Any:
        """Go on with a call inside the cache, by the hook that overrides `arrive`."""
        module, inside = self._module, self._inside
        return self.arrive(module, lambda args, kwargs: inside.run(module, inner, args, kwargs), args, kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module through its hooks."""
        return self._module(*args, **kwargs)

    @property
    def run_outside_graph(self) -> Runner:
        """`run` for a graph break: the hooks themselves must not be compiled."""
        if self._run_outside_graph is None:
            skip_frame(_Chain.run)
            self._run_outside_graph = self._build_chain(never_compiled).run
        return self._run_outside_graph

    def _build_chain(self, wrap: Callable[[Function], Function] | None = None) -> _Chain:
        hooks = list(self._hooks.values())
        self.arrive = next((hook.arrive for hook in hooks if _overrides(hook, "arrive")), None)
        within = [hook for hook in hooks if hook.order > HookOrder.CACHE and self.arrive is not None]
        self._inside = _chain_of(within, wrap)
        return _chain_of([hook for hook in hooks if hook not in within], wrap)

    @property
    def chain(self) -> tuple[tuple[str, HookOrder], ...]:
        """The names of the hooks and their order classes, outermost first."""
        return tuple((name, hook.order) for name, hook in self._hooks.items())

    @property
    def by_name(self) -> dict[str, ModelHook]:
        """The hooks by name, outermost first, as they are at any time; to look at."""
        return self._hooks

    def hooks(self, order: HookOrder) -> dict[str, ModelHook]:
        """The hooks of one order class by name, outermost first."""
        return {name: hook for name, hook in self._hooks.items() if hook.order is order}

    def __contains__(self, name: str) -> bool:
        return name in self._hooks

    def refuse_second(self, name: str, what: str, param: str) -> None:
        """Refuse a module that has this hook of a feature already. `what` it has then, and by which setting."""
        if name in self:
            raise SettingError(
                f"This {type(self._module).__name__} has {what} already, perhaps from attach() on a pipeline that "
                "shares it. Detach that first: samovar.detach(that pipeline).",
                param=param,
            )

    def __repr__(self) -> str:
        chain = ", ".join(f"{name} ({order.name.lower()})" for name, order in self.chain)
        return f"HookRegistry({type(self._module).__name__}: {chain or 'no hooks'})"


_held_registries: weakref.WeakValueDictionary[int, HookRegistry] = weakref.WeakValueDictionary()
"""Registries by the identity of their module, which each keeps alive, as long as they are referenced."""


def install_hook(undo: contextlib.ExitStack, module: torch.nn.Module, name: str, hook: ModelHook) -> None:
    """Register a hook on a module; `undo` removes it."""
    registry = HookRegistry.get_or_create(module)
    registry.register_hook(name, hook)
    undo.callback(registry.remove_hook, name)
