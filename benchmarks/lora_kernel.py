"""Can a product and an addition be one kernel with the bits of two? A candidate for adapters, in Triton.

peft rounds what an adapter adds before it adds it. So does this kernel, which reads and writes each output once, where
two kernels move it four times. Whether the product itself has the bits of torch's is for the benchmark to show.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 64, 128


@triton.jit
def _widen_add(target, inner, wide, rows, columns, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANK)
    left = tl.load(inner + row[:, None] * RANK + rank[None, :], mask=row[:, None] < rows, other=0.0)
    right = tl.load(wide + column[None, :] * RANK + rank[:, None], mask=column[None, :] < columns, other=0.0)
    added = tl.dot(left, right, input_precision="ieee").to(target.dtype.element_ty)
    place = target + row[:, None] * columns + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    old = tl.load(place, mask=inside, other=0.0)
    tl.store(place, (old.to(tl.float32) + added.to(tl.float32)).to(target.dtype.element_ty), mask=inside)


def widen_add_(target: torch.Tensor, inner: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """`target += inner @ wide.T` in place, rounded as if in two steps. Rows lie one after the other; ranks from 16."""
    rows, columns = target.shape
    grid = triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS)
    _widen_add[grid](target, inner, wide, rows, columns, inner.shape[1], _ROWS, _COLUMNS)
    return target
