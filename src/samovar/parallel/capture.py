"""Intercepts a model's attention, and only that model's.

While a sharded model's forward runs, the functions that compute attention are replaced. The replacements check whose
forward runs on their thread and let all other calls through. Most attention ends in torch's scaled dot product
attention, including that of diffusers' dispatcher. Code that imported torch's function earlier is visible only to a
TorchFunctionMode, which costs a little at every operation: a model is rehearsed under it, and runs under it only if the
rehearsal showed that it must.

Flex attention without a mask or a function of its scores is an attention like any other. With one, and where diffusers'
oldest processors compute scores by hand, attention is computed where all its tokens are: a plan that splits them is
refused.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..core.errors import ShardingError
from ..hooks.handle import for_now
from .attention import AttentionCall, sdpa

Attend = Callable[[AttentionCall], Any]
"""Called in place of an attention."""


class _Running(threading.local):
    attend: Attend | None = None


_running = _Running()
_lock = threading.Lock()
_num_inside = 0


def _read_flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, **others: Any,
) -> AttentionCall:  # fmt: skip
    others.pop("kernel_options", None)
    is_plain = score_mod is None and block_mask is None and not return_lse and not any(others.values())
    rare = "" if is_plain else "flex attention with a mask, a function of its scores, or its log-sum-exp returned"
    return AttentionCall(query, key, value, scale=scale, enable_gqa=enable_gqa, rare=rare)


def _read_scores(module: Any, query: Tensor, key: Tensor, *others: Any, **more: Any) -> AttentionCall:
    rare = "attention by a processor that multiplies its scores, instead of AttnProcessor2_0"
    return AttentionCall(query, key, key, rare=rare)


_READERS: dict[tuple[str, str], Callable[..., AttentionCall]] = {
    ("torch.nn.functional", "scaled_dot_product_attention"): AttentionCall,
    ("torch.nn.attention.flex_attention", "flex_attention"): _read_flex,
    ("diffusers.models.attention_processor:Attention", "get_attention_scores"): _read_scores,
}
"""By module (and class) and name: the functions that compute attention, or begin to."""
_replaced: dict[tuple[str, str], Callable[..., Any]] = {}
"""The functions that are replaced now."""


@functools.cache
def _wrapped(own: Callable[..., Any], read: Callable[..., AttentionCall]) -> Callable[..., Any]:
    """Takes a function's place. Compiled code breaks its graph there. Made on first use: torch's compiler takes seconds
    to load."""

    def run(is_compiled: bool, args: Any, kwargs: Any) -> Any:
        attend = _running.attend
        if attend is None:
            return own(*args, **kwargs)
        call = read(*args, **kwargs)
        if is_compiled and call.rare:
            raise ShardingError(
                f"{call.rare} would run uncompiled in compiled code. Run the blocks uncompiled on several ranks, or "
                "compiled on one."
            )
        return attend(replace(call, compute=functools.partial(own, *args, **kwargs)) if call.rare else call)

    disable: Any = torch.compiler.disable
    outside_graph = disable(run)
    return lambda *args, **kwargs: outside_graph(torch.compiler.is_compiling(), args, kwargs)


class _Mode(TorchFunctionMode):
    """Sees every call of torch's own function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attend = _running.attend
        if func is sdpa and attend is not None:
            return attend(replace(AttentionCall(*args, **(kwargs or {})), is_direct=True))
        return func(*args, **(kwargs or {}))


def attention_through(attend: Attend | None) -> contextlib.AbstractContextManager[None]:
    """Send this thread's attention to `attend`; with None, let it be torch's own again."""
    return for_now(_running, attend=attend)


@contextlib.contextmanager
def capturing(attend: Attend, *, everywhere: bool) -> Iterator[None]:
    """Send this thread's attention to `attend`. With `everywhere`, also that of code which holds torch's own
    function."""
    global _num_inside
    with _lock:
        _num_inside += 1
        for (path, name), read in _READERS.items():
            # A module that is not loaded is not called either.
            if path.partition(":")[0] in sys.modules and (path, name) not in _replaced:
                own = _replaced[path, name] = getattr(pkgutil.resolve_name(path), name)
                setattr(pkgutil.resolve_name(path), name, _wrapped(own, read))
    try:
        with attention_through(attend), _Mode() if everywhere else contextlib.nullcontext():
            yield
    finally:
        with _lock:
            _num_inside -= 1
            while not _num_inside and _replaced:
                (path, name), own = _replaced.popitem()
                setattr(pkgutil.resolve_name(path), name, own)
