"""How do ranks share an attention that torch's flex attention computes?

A flex attention may have a mask of blocks or a function of its scores, which know queries and keys by their place in
the whole sequence. So its tokens cannot be split; but its heads never meet, and each rank computes some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .attention import AttentionCall
from .collectives import Group
from .failures import ShardingError, StrategyError
from .layout import spread


@dataclass(frozen=True)
class FlexCall(AttentionCall):
    """A flex attention that scaled dot product attention could not compute."""

    flex: Callable[..., Any] | None = None
    """torch's own."""
    score_mod: Callable[..., Any] | None = None
    block_mask: Any = None
    kernel_options: Any = None

    def run_here(self) -> torch.Tensor:
        assert self.flex is not None
        output: torch.Tensor = self.flex(
            self.query, self.key, self.value, self.score_mod, self.block_mask, self.scale, self.enable_gqa,
            kernel_options=self.kernel_options,
        )  # fmt: skip
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
    """What a call of flex attention asks for. Without mask and function it is any other attention."""
    if return_lse or return_aux is not None:
        raise ShardingError("A flex attention whose log-sum-exp is asked for cannot be computed on several ranks.")
    if score_mod is None and block_mask is None:
        return AttentionCall(query, key, value, scale=scale, enable_gqa=enable_gqa)
    if is_compiled:  # Blocks that a mask leaves out are computed all the same where flex attention is not compiled.
        raise ShardingError(
            "A flex attention with a mask cannot be shared by ranks inside compiled code. Run the blocks uncompiled on "
            "several ranks, or compiled on one."
        )
    return FlexCall(
        query, key, value, scale=scale, enable_gqa=enable_gqa,
        flex=flex, score_mod=score_mod, block_mask=block_mask, kernel_options=kernel_options,
    )  # fmt: skip


def share_heads(call: FlexCall, group: Group) -> torch.Tensor:
    """A flex attention of which every rank has all: each computes some of the heads, and they exchange the outputs."""
    num_keys = call.key.shape[1]
    ratio = call.query.shape[1] // num_keys
    if num_keys < group.size:
        raise StrategyError(
            f"Flex attention is shared by its heads, and {num_keys} of keys are too few for {group.size} ranks. Use at "
            f"most {num_keys}."
        )
    counts = spread(num_keys, group.size)
    first, count = sum(counts[: group.index]), counts[group.index]
    own = FlexCall(
        call.query.narrow(1, first * ratio, count * ratio),
        call.key.narrow(1, first, count),
        call.value.narrow(1, first, count),
        scale=call.scale,
        enable_gqa=call.enable_gqa,
        flex=call.flex,
        score_mod=_of_later_heads(call.score_mod, first * ratio, place=2),
        block_mask=_mask_of_heads(call.block_mask, first * ratio, count * ratio),
        kernel_options=call.kernel_options,
    ).run_here()
    return torch.cat(group.gather_rows([own], [part * ratio for part in counts], dim=1)[0], dim=1)


def _of_later_heads(function: Callable[..., Any] | None, first: int, place: int) -> Callable[..., Any] | None:
    """The function for heads that are counted from another one on; `place` is that of the head among its arguments."""
    if function is None or not first:
        return function
    whole = function

    def shifted(*arguments: Any) -> Any:
        return whole(*arguments[:place], arguments[place] + first, *arguments[place + 1 :])

    return shifted


def _mask_of_heads(mask: Any, first: int, count: int) -> Any:
    if mask is None or (mask.kv_num_blocks.shape[1] == 1 and not first):
        return mask
    heads = slice(first, first + count) if mask.kv_num_blocks.shape[1] > 1 else slice(None)
    part = mask[:, heads]
    part.mask_mod = _of_later_heads(mask.mask_mod, first, place=1)
    return part
