"""Whose call is this? The request and the guidance branch, and a state for each pair of them.

A denoiser is called several times a step: once for each guidance branch, and for each request when
requests are interleaved. What a hook remembers from one step to the next belongs to one of these
lines of calls. Which one it is must be known, never counted or guessed:

1. diffusers' `cache_context("cond")` on a hooked model sets the branch (see `intercept`);
2. where a pipeline names no branch, `BranchHook` tells branches apart by the identity of the
   conditioning tensors, which a pipeline keeps through all its steps;
3. where neither tells, the branch is None and the hook must not reuse anything.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar, Token
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .registry import HookOrder, ModelHook


class CallContext(NamedTuple):
    """The line of calls that the running call belongs to."""

    request: Hashable = None
    branch: str | None = None


_NOBODY = CallContext()
_current: ContextVar[CallContext] = ContextVar("samovar_call_context", default=_NOBODY)
_KEEP: Any = object()


def current_context() -> CallContext:
    """The context of the running call."""
    return _current.get()


@contextlib.contextmanager
def call_context(*, request: Hashable = _KEEP, branch: str | None = _KEEP) -> Iterator[CallContext]:
    """Run the block inside as part of a request, a branch, or both; what is not given stays."""
    outer = _current.get()
    inner = CallContext(
        outer.request if request is _KEEP else request,
        outer.branch if branch is _KEEP else branch,
    )
    token = _current.set(inner)
    try:
        yield inner
    finally:
        _current.reset(token)


class BaseState:
    """What a hook remembers for one line of calls."""

    def reset(self) -> None:
        """Forget everything, as if just made."""
        raise NotImplementedError(f"{type(self).__name__} must say how it is reset: define reset().")


State = TypeVar("State", bound=BaseState)


class StateManager(Generic[State]):
    """One state for each request and branch, made when it is first asked for."""

    def __init__(self, state_cls: type[State], *args: Any, **kwargs: Any) -> None:
        self._make: Callable[[], State] = functools.partial(state_cls, *args, **kwargs)
        self._states: dict[CallContext, State] = {}
        self._named = threading.local()

    def set_context(self, name: str | None) -> None:
        """Name the branch by hand, for this manager and this thread; None follows the running call."""
        self._named.branch = name

    @property
    def context(self) -> CallContext:
        """The key of the state that `get_state` gives now."""
        context = _current.get()
        named: str | None = getattr(self._named, "branch", None)
        return context if named is None else context._replace(branch=named)

    def get_state(self) -> State:
        """The state of the running call's request and branch."""
        key = self.context
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = self._make()
        return state

    def states(self) -> dict[CallContext, State]:
        """All states there are, by context."""
        return dict(self._states)

    def drop(self, request: Hashable) -> None:
        """Forget one request: it is finished or was given up."""
        for key in [key for key in self._states if key.request == request]:
            self._states.pop(key).reset()

    def reset(self) -> None:
        """Reset and forget all states, and the branch named by hand."""
        states, self._states = self._states, {}
        for state in states.values():
            state.reset()
        self._named = threading.local()


_SAMPLE_OR_TIME = ("hidden_states", "sample", "latents", "x", "timestep", "timesteps", "t", "sigma")
_CONDITIONING = ("encoder", "prompt", "text", "txt", "caption", "context", "cond", "pooled", "cap_", "label")


def is_conditioning(parameter: str) -> bool:
    """Whether a denoiser's parameter of this name holds conditioning, not the sample or the time."""
    return parameter not in _SAMPLE_OR_TIME and any(word in parameter for word in _CONDITIONING)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class BranchHook(ModelHook):
    """Names the branch of a denoiser's call by its conditioning tensors, where the pipeline does not.

    The tensors are held as long as the branch is, so that no new tensor can take the place of an old
    one in memory and be mistaken for it. A pipeline that makes new ones at each step gets a new
    branch at each step: nothing is reused, nothing is wrong.
    """

    order = HookOrder.OUTERMOST
    most_branches = 16
    """Held for a model at a time; the one that was used longest ago goes first."""

    def __init__(self) -> None:
        self._parameters: tuple[str, ...] = ()
        self._branches: OrderedDict[tuple[Hashable, ...], tuple[str, list[torch.Tensor]]] = OrderedDict()
        self._count = 0
        self._open = threading.local()

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._parameters = tuple(inspect.signature(module.forward).parameters)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        context = _current.get()
        branch = context.branch or self._branch_of(context.request, args, kwargs)
        self._stack().append(_current.set(context._replace(branch=branch)))
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        _current.reset(self._stack().pop())
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        _current.reset(self._stack().pop())

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self._branches.clear()
        return module

    def _stack(self) -> list[Token[CallContext]]:
        stack: list[Token[CallContext]] | None = getattr(self._open, "tokens", None)
        if stack is None:
            stack = self._open.tokens = []
        return stack

    def _branch_of(self, request: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        held = [t for name, value in given.items() if is_conditioning(name) for t in _tensors(value)]
        if not held:
            return None
        key = (request, *((t.data_ptr(), t.shape, t.stride(), t.dtype, t._version) for t in held))
        known = self._branches.get(key)
        if known is None:
            self._count += 1
            known = self._branches[key] = (f"conditioning {self._count}", held)
            if len(self._branches) > self.most_branches:
                self._branches.popitem(last=False)
        self._branches.move_to_end(key)
        return known[0]
