"""How do we intercept a model's attention, and only that model's?

While a sharded model's forward runs, the functions that compute attention are replaced. The replacements check whose
forward runs on their thread and let all other calls through. Most attention ends in torch's scaled dot product
attention, including that of diffusers' dispatcher. Code that imported torch's function earlier is visible only to a
TorchFunctionMode, which costs a little at every operation: a model is rehearsed under it, and runs under it only if the
rehearsal showed that it must.

Two more functions are captured. torch's flex attention: without a mask or a score function it is an attention like any
other. And the scores that diffusers' oldest processors compute by hand, and then multiply by the values: they get a
placeholder for the scores, and the multiplication becomes the attention.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..core.errors import ShardingError, StrategyError
from ..hooks.handle import for_now
from .attention import AttentionCall, sdpa
from .collectives import Group
from .layout import spread

Attend = Callable[[AttentionCall], torch.Tensor]
"""Called in place of scaled dot product attention."""


class _Running(threading.local):
    attend: Attend | None = None


_running = _Running()
_lock = threading.Lock()
_num_inside = 0


_Replacement = Callable[..., Any]
"""Called with `Attend`, the replaced function, whether compiled code calls it, and then its arguments."""

_REPLACEMENTS: dict[tuple[str, str], _Replacement] = {
    ("torch.nn.functional", "scaled_dot_product_attention"): (
        lambda attend, own, is_compiled, *args, **kwargs: attend(AttentionCall(*args, **kwargs))
    ),
    ("torch.nn.attention.flex_attention", "flex_attention"): (
        lambda attend, own, is_compiled, *args, **kwargs: attend(read_flex_call(own, is_compiled, *args, **kwargs))
    ),
    ("diffusers.models.attention_processor:Attention", "get_attention_scores"): (
        lambda attend, own, is_compiled, *args, **kwargs: PendingScores(attend, *args, **kwargs)
    ),
}
"""By module (and class) and name: the functions that compute attention, or begin to."""
_replaced: dict[tuple[str, str], Callable[..., Any]] = {}
"""The functions that are replaced now."""


@functools.cache
def _wrapped(own: Callable[..., Any], replacement: _Replacement) -> Callable[..., Any]:
    """Takes a function's place. Compiled code breaks its graph there. Made on first use: torch's compiler takes seconds
    to load."""

    def call(is_compiled: bool, args: Any, kwargs: Any) -> Any:
        attend = _running.attend
        return own(*args, **kwargs) if attend is None else replacement(attend, own, is_compiled, *args, **kwargs)

    disable: Any = torch.compiler.disable
    outside_graph = disable(call)
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
        for (path, name), replacement in _REPLACEMENTS.items():
            # A module that is not loaded is not called either.
            if path.partition(":")[0] in sys.modules and (path, name) not in _replaced:
                own = _replaced[path, name] = getattr(pkgutil.resolve_name(path), name)
                setattr(pkgutil.resolve_name(path), name, _wrapped(own, replacement))
    try:
        with attention_through(attend), _Mode() if everywhere else contextlib.nullcontext():
            yield
    finally:
        with _lock:
            _num_inside -= 1
            while not _num_inside and _replaced:
                (path, name), own = _replaced.popitem()
                setattr(pkgutil.resolve_name(path), name, own)


# ------------------------------------------------------------------------------------------------ flex attention


@dataclass(frozen=True)
class FlexCall(AttentionCall):
    """A flex attention with a block mask or a function of its scores.

    These know queries and keys by their position in the whole sequence, so its tokens cannot be split. But its heads
    are independent, and each rank can compute some of them.
    """

    flex: Any = None
    """torch's own function."""
    score_mod: Callable[..., Any] | None = None
    block_mask: Any = None

    def run_here(self) -> torch.Tensor:
        output: torch.Tensor = self.flex(
            self.query, self.key, self.value, self.score_mod, self.block_mask, self.scale, self.enable_gqa
        )
        return output


def read_flex_call(
    flex: Callable[..., Any],
    is_compiled: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> AttentionCall:
    """What a call of flex attention asks for."""
    if return_lse or return_aux is not None:
        raise ShardingError("A flex attention that returns its log-sum-exp cannot be computed on several ranks.")
    if score_mod is None and block_mask is None:
        return AttentionCall(query, key, value, scale=scale, enable_gqa=enable_gqa)
    if is_compiled:  # Only compiled flex attention skips the blocks that a mask leaves out.
        raise ShardingError(
            "A flex attention with a mask cannot be shared by ranks inside compiled code. Run the blocks uncompiled on "
            "several ranks, or compiled on one."
        )
    flex = functools.partial(flex, kernel_options=kernel_options)
    return FlexCall(
        query, key, value, scale=scale, enable_gqa=enable_gqa, flex=flex, score_mod=score_mod, block_mask=block_mask
    )


def share_heads(call: FlexCall, group: Group) -> torch.Tensor:
    """A flex attention that every rank has all of: each computes some of the heads, and they exchange the outputs."""
    num_key_heads = call.key.shape[1]
    ratio = call.query.shape[1] // num_key_heads
    if num_key_heads < group.size:
        raise StrategyError(
            f"Ranks share a flex attention by its heads, and {num_key_heads} key heads are too few for {group.size} "
            f"ranks. Use at most {num_key_heads}."
        )
    counts = spread(num_key_heads, group.size)
    first, count = sum(counts[: group.index]), counts[group.index]
    own = replace(
        call,
        query=call.query.narrow(1, first * ratio, count * ratio),
        key=call.key.narrow(1, first, count),
        value=call.value.narrow(1, first, count),
        score_mod=_from_head(call.score_mod, first * ratio, position=2),
        block_mask=_mask_of_heads(call.block_mask, first * ratio, count * ratio),
    ).run_here()
    return torch.cat(group.gather_rows([own], [part * ratio for part in counts], dim=1)[0], dim=1)


def _from_head(function: Callable[..., Any] | None, first: int, position: int) -> Callable[..., Any] | None:
    """The function for heads counted from `first`; `position` is that of the head among its arguments."""
    if function is None or not first:
        return function
    whole = function

    def shifted(*arguments: Any) -> Any:
        return whole(*arguments[:position], arguments[position] + first, *arguments[position + 1 :])

    return shifted


def _mask_of_heads(mask: Any, first: int, count: int) -> Any:
    if mask is None or (mask.kv_num_blocks.shape[1] == 1 and not first):
        return mask
    heads = slice(first, first + count) if mask.kv_num_blocks.shape[1] > 1 else slice(None)
    part = mask[:, heads]
    part.mask_mod = _from_head(mask.mask_mod, first, position=1)
    return part


# ------------------------------------------------------------------------------------------------ scores


class PendingScores:
    """Stands for the scores of an attention until they are multiplied by its values."""

    def __init__(
        self, attend: Attend, module: Any, query: torch.Tensor, key: torch.Tensor, attention_mask: Any = None
    ) -> None:
        """`module` is diffusers' Attention; queries are (batch x heads, rows, width), and the mask is additive."""
        self._attend, self._scale = attend, module.scale
        self._heads = module.heads if query.shape[0] % module.heads == 0 else 1
        self._query, self._key, self._mask = query, key, attention_mask

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.bmm or not isinstance(args[0], cls) or kwargs:
            raise ShardingError(
                f"An attention uses its scores in {function.__name__}, which cannot be computed on several ranks. Use "
                "a processor that calls torch's scaled dot product attention, such as AttnProcessor2_0."
            )
        return args[0]._times(args[1])

    def _times(self, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._with_heads(tensor) for tensor in (self._query, self._key, value))
        mask = self._mask
        if mask is not None:  # One per head, or one for all heads.
            mask = self._with_heads(mask) if mask.shape[0] == self._query.shape[0] else mask.unsqueeze(1)
            mask = mask.to(query.dtype)
        return self._attend(AttentionCall(query, key, value, mask, scale=self._scale)).flatten(0, 1)

    def _with_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1, self._heads, *tensor.shape[1:])
