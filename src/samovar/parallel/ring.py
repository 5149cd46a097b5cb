"""How is attention computed when keys and values go round?

Each rank attends to the keys that it holds while it passes them on, and merges the parts by their log-sum-exp
(ring attention, arXiv 2310.01889). It never holds more than two parts of the keys. Rows that every rank has are
counted once, with its own keys. The mask does not travel: each rank has all columns of its rows.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from .attention import Attention
from .collectives import Group

ROWS_AT_ONCE = 1024
"""Queries for which scores are held at a time, where no kernel returns the log-sum-exp."""


def ring_attention(attention: Attention, group: Group, convert_to_fp32: bool = True) -> torch.Tensor:
    """The attention of this rank's queries to the keys of all ranks."""
    kept, counts = attention.replicated_keys, attention.key_counts
    mask = attention.mask_of_own_rows(group.index)
    starts = list(accumulate(counts, initial=kept))
    key, value = attention.key, attention.value
    flat = torch.cat([key[:, :, kept:].reshape(-1), value[:, :, kept:].reshape(-1)])
    row = flat.numel() // counts[group.index]
    merged: tuple[torch.Tensor, torch.Tensor] | None = None
    for turn in range(group.size):
        holder = (group.index - turn) % group.size
        arriving = None
        if turn + 1 < group.size:
            arriving = group.pass_on(flat, row * counts[(holder - 1) % group.size])
        if turn:
            key, value = _unpacked(flat, attention, counts[holder])
        columns = None
        if mask is not None:
            columns = mask.narrow(3, starts[holder], counts[holder])
            columns = columns if turn else torch.cat([mask[..., :kept], columns], dim=3)
        part = attend_with_lse(attention.query, key, value, columns, attention.scale)
        merged = merge(merged, part, convert_to_fp32)
        if arriving is not None:
            flat = arriving()
    assert merged is not None
    return merged[0].to(attention.query.dtype)


def _unpacked(flat: torch.Tensor, attention: Attention, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = [(*t.shape[:2], count, t.shape[3]) for t in (attention.key, attention.value)]
    key, value = torch.split(flat, [math.prod(shape) for shape in shapes])
    return key.view(shapes[0]), value.view(shapes[1])


def merge(
    merged: tuple[torch.Tensor, torch.Tensor] | None, part: tuple[torch.Tensor, torch.Tensor], convert_to_fp32: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two attentions of the same queries to different keys, as one to all of these keys."""
    output, lse = (part[0].float(), part[1].float()) if convert_to_fp32 else part
    if merged is None:
        return output, lse
    total = torch.logaddexp(merged[1], lse)
    # A query that sees none of the keys so far has no weight anywhere: -inf less -inf must give 0.
    weights = [torch.exp(part_lse - total).nan_to_num(0.0).unsqueeze(-1) for part_lse in (merged[1], lse)]
    return merged[0] * weights[0].to(output.dtype) + output * weights[1].to(output.dtype), total


def attend_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the log-sum-exp of its scores, (B, H, Q)."""
    if key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if mask is None and query.shape[-1] == value.shape[-1] and query.device.type in ("cpu", "cuda"):
        return _by_kernel(query, key, value, scale)
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    rows = torch.split(query, ROWS_AT_ONCE, dim=2)
    masks = [mask] * len(rows) if mask is None or mask.shape[2] == 1 else torch.split(mask, ROWS_AT_ONCE, dim=2)
    parts = [_by_hand(row * factor, key, value, part) for row, part in zip(rows, masks, strict=True)]
    return torch.cat([part[0] for part in parts], dim=2), torch.cat([part[1] for part in parts], dim=2)


def _by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = query.float() @ key.float().transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return (weights @ value.float()).to(value.dtype), lse


def _by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if query.device.type == "cpu":
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
        return output, lse
    if query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
    else:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, scale=scale
        )
    return output, lse[..., : query.shape[2]]
