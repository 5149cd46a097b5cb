"""How does a model's attention reach us, and nobody else's?

While a sharded model's forward runs, the functions that compute attention are replaced; the replacements look whose
forward runs on their thread and let everybody else's calls through. Most attention ends in torch's scaled dot product
attention, that of diffusers' dispatcher and of models that call torch directly. What holds torch's own function itself,
from before, is seen by a TorchFunctionMode only, which costs a little at every operation; a model is rehearsed under
it, and runs under it only if the rehearsal showed that it must.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from .attention import AttentionCall, sdpa
from .flex import read_flex_call
from .scores import PendingScores

Attend = Callable[[AttentionCall], torch.Tensor]
"""What is asked in place of scaled dot product attention."""


class _Running(threading.local):
    attend: Attend | None = None


_running = _Running()
_lock = threading.Lock()
_inside = 0


class _Entrance(NamedTuple):
    """A function that computes attention, or begins to."""

    module: str
    path: str
    brought: Callable[..., Any]
    """What is called in its place: with whom to ask, the function itself, whether compiled code calls it, and then as
    it was called."""

    def owner(self) -> Any:
        *owners, _ = self.path.split(".")
        return functools.reduce(getattr, owners, sys.modules[self.module])

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def _torch_attention(attend: Attend, own: Any, is_compiled: bool, *args: Any, **kwargs: Any) -> Any:
    return attend(AttentionCall(*args, **kwargs))


def _flex_attention(attend: Attend, own: Any, is_compiled: bool, *args: Any, **kwargs: Any) -> Any:
    return attend(read_flex_call(own, is_compiled, *args, **kwargs))


def _attention_scores(attend: Attend, own: Any, is_compiled: bool, *args: Any, **kwargs: Any) -> Any:
    return PendingScores(attend, *args, **kwargs)


_ENTRANCES = (
    _Entrance("torch.nn.functional", "scaled_dot_product_attention", _torch_attention),
    _Entrance("torch.nn.attention.flex_attention", "flex_attention", _flex_attention),
    _Entrance("diffusers.models.attention_processor", "Attention.get_attention_scores", _attention_scores),
)
_replaced: dict[_Entrance, Callable[..., Any]] = {}
"""The functions that are replaced now."""


@functools.cache
def _replacement(entrance: _Entrance, own: Callable[..., Any]) -> Callable[..., Any]:
    """What takes a function's place. Compiled code breaks its graph there. Made when it is first needed: torch's
    compiler takes seconds to load."""

    def bring(is_compiled: bool, args: Any, kwargs: Any) -> Any:
        attend = _running.attend
        return own(*args, **kwargs) if attend is None else entrance.brought(attend, own, is_compiled, *args, **kwargs)

    disable: Any = torch.compiler.disable
    outside_graph = disable(bring)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return outside_graph(torch.compiler.is_compiling(), args, kwargs)

    return replacement


def _replace() -> None:
    for entrance in _ENTRANCES:
        # Of a module that nobody has loaded, nothing is called.
        if entrance.module in sys.modules and entrance not in _replaced:
            own = _replaced[entrance] = getattr(entrance.owner(), entrance.name)
            setattr(entrance.owner(), entrance.name, _replacement(entrance, own))


def _restore() -> None:
    for entrance, own in _replaced.items():
        setattr(entrance.owner(), entrance.name, own)
    _replaced.clear()


class _Mode(TorchFunctionMode):
    """Sees every call of torch's own function."""

    def __init__(self, noted: Callable[[], None] | None) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attend = _running.attend
        if func is sdpa and attend is not None:
            if self._noted is not None:
                self._noted()
            return attend(AttentionCall(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def attention_through(attend: Attend, *, everywhere: bool, noted: Callable[[], None] | None = None) -> Iterator[None]:
    """Bring this thread's attention to `attend`; with `everywhere`, also that of code which holds torch's function
    itself, and tell `noted` of each such call."""
    global _inside
    outer = _running.attend
    with _lock:
        _inside += 1
        _replace()
    _running.attend = attend
    try:
        with _Mode(noted) if everywhere else contextlib.nullcontext():
            yield
    finally:
        _running.attend = outer
        with _lock:
            _inside -= 1
            if not _inside:
                _restore()


@contextlib.contextmanager
def attention_left_alone() -> Iterator[None]:
    """Let this thread's attention be torch's own again."""
    outer = _running.attend
    _running.attend = None
    try:
        yield
    finally:
        _running.attend = outer
