"""The request and guidance branch of a call, and a state for each pair of them.

A denoiser is called several times a step: once for each guidance branch, and for each request when requests are
interleaved. What a hook remembers from one step to the next belongs to one of these call sequences. Which one it is
must be known, never counted or guessed:

1. diffusers' `cache_context("cond")` on a hooked model sets the branch (see `intercept`);
2. if a pipeline does not name the branch, `BranchHook` recognises it by the conditioning, whose values stay the same
   through all steps (see `branches`);
3. if neither works, the branch is None and a hook must not reuse anything.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar


class CallContext(NamedTuple):
    """The call sequence that the running call belongs to."""

    request: Hashable = None
    branch: str | None = None


_NO_CONTEXT = CallContext()
running_context: ContextVar[CallContext] = ContextVar("samovar_call_context", default=_NO_CONTEXT)
"""The context of the running call; `call_context` is the safe way to set it."""


def current_context() -> CallContext:
    """The context of the running call."""
    return running_context.get()


@contextlib.contextmanager
def call_context(*, request: Hashable = ..., branch: Any = ...) -> Iterator[CallContext]:
    """Run the block inside as part of a request, a branch, or both; what is not given stays."""
    given: dict[str, Any] = {"request": request, "branch": branch}
    inner = current_context()._replace(**{name: value for name, value in given.items() if value is not ...})
    token = running_context.set(inner)
    try:
        yield inner
    finally:
        running_context.reset(token)


class BaseState:
    """What a hook remembers for one call sequence."""

    def reset(self) -> None:
        """Forget everything, as if just made."""
        raise NotImplementedError(f"{type(self).__name__} must define reset().")


State = TypeVar("State", bound=BaseState)


class StateManager(Generic[State]):
    """One state for each request and branch, made when it is first needed."""

    max_states = 256
    """Kept at a time: a pipeline whose conditioning is new at each step must not fill the memory. The one that was
    used longest ago is reset and dropped."""

    def __init__(self, state_cls: type[State], *args: Any, **kwargs: Any) -> None:
        self._make: Callable[[], State] = functools.partial(state_cls, *args, **kwargs)
        self._states: OrderedDict[CallContext, State] = OrderedDict()
        self._named = threading.local()
        self._lock = threading.Lock()

    def set_context(self, name: str | None) -> None:
        """Name the branch, for this manager and this thread; None follows the running call."""
        self._named.branch = name

    @property
    def context(self) -> CallContext:
        """The key of the state that `get_state` returns now."""
        context = running_context.get()
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
                if len(self._states) > self.max_states:
                    self._states.popitem(last=False)[1].reset()
            self._states.move_to_end(key)
            return state

    def states(self) -> dict[CallContext, State]:
        """All states there are, by context."""
        return dict(self._states)

    def drop(self, request: Hashable) -> None:
        """Forget one request, which is finished or was cancelled."""
        self._forget([key for key in list(self._states) if key.request == request])

    def reset(self) -> None:
        """Reset and forget all states, and the branch that was set."""
        self._named = threading.local()
        self._forget(list(self._states))

    def _forget(self, keys: list[CallContext]) -> None:
        with self._lock, contextlib.ExitStack() as resets:  # One that raises stops no other.
            for key in keys:
                state = self._states.pop(key, None)
                if state is not None:
                    resets.callback(state.reset)
