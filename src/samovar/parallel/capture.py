"""How does a model's attention reach us, and nobody else's?

While a sharded model's forward runs, torch's scaled dot product attention is replaced; the replacement looks
whose forward runs on its thread and lets everybody else's calls through. diffusers' dispatcher and models that
call torch directly both end there. What holds torch's own function itself, from before, is seen by a
TorchFunctionMode only, which costs a little at every operation; a model is rehearsed under it, and runs under it
only if the rehearsal showed that it must.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .attention import sdpa

Attend = Callable[..., torch.Tensor]
"""What is called in place of scaled dot product attention."""


class _Running(threading.local):
    attend: Attend | None = None


_running = _Running()
_lock = threading.Lock()
_inside = 0


def _replacement(*args: Any, **kwargs: Any) -> Any:
    attend = _running.attend
    return sdpa(*args, **kwargs) if attend is None else attend(*args, **kwargs)


@functools.cache
def _outside_graph() -> Callable[..., Any]:
    """The replacement for compiled code, which breaks its graph there. Made when it is first needed: torch's compiler
    takes seconds to load."""
    disable: Any = torch.compiler.disable
    disabled: Callable[..., Any] = disable(_replacement)
    return disabled


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
            return attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def attention_through(attend: Attend, *, everywhere: bool, noted: Callable[[], None] | None = None) -> Iterator[None]:
    """Bring this thread's attention to `attend`; with `everywhere`, also that of code which holds torch's function
    itself, and tell `noted` of each such call."""
    global _inside
    outer = _running.attend
    replacement = _outside_graph()
    with _lock:
        _inside += 1
        F.scaled_dot_product_attention = replacement
    _running.attend = attend
    try:
        with _Mode(noted) if everywhere else contextlib.nullcontext():
            yield
    finally:
        _running.attend = outer
        with _lock:
            _inside -= 1
            if not _inside:
                F.scaled_dot_product_attention = sdpa


@contextlib.contextmanager
def attention_left_alone() -> Iterator[None]:
    """Let this thread's attention be torch's own again."""
    outer = _running.attend
    _running.attend = None
    try:
        yield
    finally:
        _running.attend = outer
