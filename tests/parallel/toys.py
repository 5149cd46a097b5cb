"""A transformer small enough to see through, which calls torch's attention itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

WIDTH, HEADS = 16, 4


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.to_out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.to_qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.to_out(self.attend(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2))

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


class DirectAttention(Attention):
    """Holds torch's function itself, from before anybody could replace it."""

    attend = staticmethod(F.scaled_dot_product_attention)  # type: ignore[assignment]


class HandmadeAttention(Attention):
    """Does not use torch's attention at all."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None
    ) -> torch.Tensor:  # type: ignore[override]
        return torch.softmax(query @ key.transpose(-2, -1), dim=-1) @ value


class Block(torch.nn.Module):
    def __init__(self, attention: Callable[[], Attention]) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attn = attention()

    def forward(self, hidden_states: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        added = 0.0 if table is None else table
        return hidden_states + self.attn(self.norm(hidden_states + added))


class Transformer(torch.nn.Module):
    def __init__(self, attention: Callable[[], Attention] = Attention, layers: int = 3) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(attention) for _ in range(layers))
        self.proj_out = torch.nn.Linear(WIDTH, 4)

    def forward(
        self, hidden_states: torch.Tensor, ids: torch.Tensor | None = None, text: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """`text` is of no use but to those who want to know how many of the tokens are text."""
        table = None if ids is None else self.embed(ids)
        for block in self.blocks:
            hidden_states = block(hidden_states, table)
        return self.proj_out(hidden_states)


def build(attention: Callable[[], Attention] = Attention) -> Transformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(attention).eval()


def tokens(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length))


def compile_blocks(model: Transformer) -> None:
    for block in model.blocks:
        block.compile(backend="eager")
