"""How is an attention shared that diffusers computes by hand?

Its oldest processors ask for the scores, and then multiply them by the values. Here they are given scores that are not
there yet, and know of what they are to be made: the multiplication is the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attention import AttentionCall
from .failures import ShardingError


class PendingScores:
    """Takes the place of the scores of an attention until they are multiplied by its values."""

    def __init__(
        self,
        attend: Callable[[AttentionCall], torch.Tensor],
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> None:
        """Of an attention of diffusers, with queries (batch x heads, rows, width) and a mask that is added."""
        self._attend = attend
        self._heads = module.heads if query.shape[0] % module.heads == 0 else 1
        self._scale = module.scale
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
        if mask is not None:
            # Of each head, or the same for all.
            mask = self._with_heads(mask) if mask.shape[0] == self._query.shape[0] else mask.unsqueeze(1)
            mask = mask.to(query.dtype)
        return self._attend(AttentionCall(query, key, value, mask, scale=self._scale)).flatten(0, 1)

    def _with_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1, self._heads, *tensor.shape[1:])
