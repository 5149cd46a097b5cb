"""Whose call is this? The request and the guidance branch, and a state for each pair of them.

A denoiser is called several times a step: once for each guidance branch, and for each request when
requests are interleaved. What a hook remembers from one step to the next belongs to one of these
lines of calls. Which one it is must be known, never counted or guessed:

1. diffusers' `cache_context("cond")` on a hooked model sets the branch (see `intercept`);
2. where a pipeline names no branch, `BranchHook` tells branches apart by the conditioning, whose
   values stay the same through all steps (see `branches`);
3. where neither tells, the branch is None and a hook must not reuse anything.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar, Token
from typing import Any, Generic, NamedTuple, TypeVar


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


def enter_context(context: CallContext) -> Token[CallContext]:
    """Make a context the running one until `leave_context`; `call_context` is the safer form."""
    return _current.set(context)


def leave_context(token: Token[CallContext]) -> None:
    """Go back to the context before `enter_context`."""
    _current.reset(token)


@contextlib.contextmanager
def call_context(*, request: Hashable = _KEEP, branch: str | None = _KEEP) -> Iterator[CallContext]:
    """Run the block inside as part of a request, a branch, or both; what is not given stays."""
    outer = _current.get()
    inner = CallContext(
        outer.request if request is _KEEP else request,
        outer.branch if branch is _KEEP else branch,
    )
    token = enter_context(inner)
    try:
        yield inner
    finally:
        leave_context(token)


class BaseState:
    """What a hook remembers for one line of calls."""

    def reset(self) -> None:
        """Forget everything, as if just made."""
        raise NotImplementedError(f"{type(self).__name__} must say how it is reset: define reset().")


State = TypeVar("State", bound=BaseState)


class StateManager(Generic[State]):
    """One state for each request and branch, made when it is first asked for."""

    most_states = 256
    """Kept at a time: a pipeline whose conditioning is new at each step must not fill the memory. The one
    that was used longest ago is reset and forgotten."""

    def __init__(self, state_cls: type[State], *args: Any, **kwargs: Any) -> None:
        self._make: Callable[[], State] = functools.partial(state_cls, *args, **kwargs)
        self._states: OrderedDict[CallContext, State] = OrderedDict()
        self._named = threading.local()
        self._lock = threading.Lock()

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
        return self.state_of(self.context)

    def state_of(self, key: CallContext) -> State:
        """The state of a request and branch."""
        with self._lock:
            state = self._states.get(key)
            if state is None:
                state = self._states[key] = self._make()
                if len(self._states) > self.most_states:
                    self._states.popitem(last=False)[1].reset()
            self._states.move_to_end(key)
            return state

    def states(self) -> dict[CallContext, State]:
        """All states there are, by context."""
        return dict(self._states)

    def drop(self, request: Hashable) -> None:
        """Forget one request: it is finished or was given up."""
        self._forget([key for key in list(self._states) if key.request == request])

    def drop_branch(self, context: CallContext) -> None:
        """Forget one branch of one request."""
        self._forget([context] if context in self._states else [])

    def reset(self) -> None:
        """Reset and forget all states, and the branch named by hand."""
        self._named = threading.local()
        self._forget(list(self._states))

    def _forget(self, keys: list[CallContext]) -> None:
        with self._lock, contextlib.ExitStack() as resets:  # One that raises keeps none of the others.
            for key in keys:
                state = self._states.pop(key, None)
                if state is not None:
                    resets.callback(state.reset)
