"""How does a GPU decode weights? One thread decodes eight of them, as bytes of 32-bit words (see `coding`).

A thread reads eight bytes and a byte of each plane, and writes sixteen bytes. It makes the exponents of four weights at
once: each bit of a code becomes a byte of zeros or ones, which chooses between bytes of the table. Escapes are counted
for each thread; a prefix sum over the program's threads says where in the list theirs begin.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from .coding import FEW, HEADER, TABLE_AT, TILE, Form

__all__ = ["TritonError", "decode"]

_TABLE_AT = tl.constexpr(TABLE_AT)
_HEADER = tl.constexpr(HEADER)
_TILE = tl.constexpr(TILE)
_HAS_QUICK_CALLS = os.environ.get("TRITON_INTERPRET") != "1" and tuple(map(int, triton.__version__.split(".")[:2])) >= (
    3,
    3,
)
"""Whether a compiled kernel takes all arguments, those that it was compiled for too."""


@triton.jit
def _mask(nibble, ASM: tl.constexpr):
    """The four bits of a nibble as four bytes of zeros or ones."""
    high = nibble * 0x10204080
    if ASM:  # Repeat the highest bit of each byte.
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0xBA98;", "=r,r", [high], tl.uint32, True, 1)
    return ((high & 0x80808080) >> 7) * 255


@triton.jit
def _choose(a, b, mask):
    """Bytes of b where the mask has ones, else of a."""
    return a ^ ((a ^ b) & mask)


@triton.jit
def _two(table, FIRST: tl.constexpr, mask0):
    a = ((table >> (8 * FIRST)) & 255).to(tl.uint32) * 0x01010101
    b = ((table >> (8 * FIRST + 8)) & 255).to(tl.uint32) * 0x01010101
    return _choose(a, b, mask0)


@triton.jit
def _four(table, FIRST: tl.constexpr, mask0, mask1):
    return _choose(_two(table, FIRST, mask0), _two(table, FIRST + 2, mask0), mask1)


@triton.jit
def _eight(table, mask0, mask1, mask2):
    return _choose(_four(table, 0, mask0, mask1), _four(table, 4, mask0, mask1), mask2)


@triton.jit
def _exponents(table, more, b0, b1, b2, b3, BITS: tl.constexpr, ASM: tl.constexpr):
    """The exponents of four weights; that of an escape is 0. b0 to b3 are nibbles of the planes."""
    mask0 = _mask(b0, ASM)
    mask1 = _mask(b1, ASM)
    if BITS == 2:
        return _four(table, 0, mask0, mask1)
    mask2 = _mask(b2, ASM)
    if BITS == 3:
        return _eight(table, mask0, mask1, mask2)
    return _choose(_eight(table, mask0, mask1, mask2), _eight(more, mask0, mask1, mask2), _mask(b3, ASM))


@triton.jit
def _interleave(low, high, ASM: tl.constexpr):
    """Four low and four high bytes as four 16-bit words."""
    if ASM:
        first = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [low, high], tl.uint32, True, 1)
        second = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [low, high], tl.uint32, True, 1)
    else:
        first = (low & 0xFF) | ((low & 0xFF00) << 8) | ((high & 0xFF) << 8) | ((high & 0xFF00) << 16)
        second = ((low >> 16) & 0xFF) | ((low >> 8) & 0xFF0000) | ((high >> 8) & 0xFF00) | (high & 0xFF000000)
    return (second.to(tl.uint64) << 32) | first.to(tl.uint64)


@triton.jit
def _words_bf16(rest, exponents, ASM: tl.constexpr):
    low = (rest & 0x7F7F7F7F) | ((exponents << 7) & 0x80808080)
    high = (rest & 0x80808080) | ((exponents >> 1) & 0x7F7F7F7F)
    return _interleave(low, high, ASM)


@triton.jit
def _words_fp16(rest, exponents, lower, upper, sign, ASM: tl.constexpr):
    high = (exponents << 2) | (_mask(lower, ASM) & 0x01010101) | (_mask(upper, ASM) & 0x02020202)
    return _interleave(rest, high | (_mask(sign, ASM) & 0x80808080), ASM)


@triton.jit
def _take_escape(escapes, at, left, first, second):
    """Put the exponent of each thread's next escape in its place."""
    lowest = left & (0 - left)
    value = tl.load(escapes + at, mask=left != 0, other=0).to(tl.uint32)
    first += value * (((lowest & 15) * 0x00204081) & 0x01010101)
    second += value * (((lowest >> 4) * 0x00204081) & 0x01010101)
    return at + 1, left ^ lowest, first, second


@triton.jit
def _take_all(escapes, at, left, first, second, is_dense, AHEAD: tl.constexpr):
    for _ in tl.static_range(AHEAD):
        at, left, first, second = _take_escape(escapes, at, left, first, second)
    if is_dense:
        while tl.max(left.to(tl.int32), 0) > 0:
            at, left, first, second = _take_escape(escapes, at, left, first, second)
    return first, second


@triton.jit
def _count(bits):
    """How many of eight bits are ones."""
    pairs = bits - ((bits >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return ((fours + (fours >> 4)) & 0x0F).to(tl.int32)


@triton.jit
def _read(planes, step, row, live, BITS: tl.constexpr):
    """A byte of each plane of the code, and where all of them have ones."""
    b0 = tl.load(planes + row, mask=live, other=0).to(tl.uint32)
    b1 = tl.load(planes + step + row, mask=live, other=0).to(tl.uint32)
    b2 = b0
    b3 = b0
    if BITS > 2:
        b2 = tl.load(planes + step * 2 + row, mask=live, other=0).to(tl.uint32)
    if BITS > 3:
        b3 = tl.load(planes + step * 3 + row, mask=live, other=0).to(tl.uint32)
    return b0, b1, b2, b3, b0 & b1 & b2 & b3


@triton.jit
def _write(
    out, row, live, rest, first, second, planes, step, BITS: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr
):
    """Put eight weights together."""
    low = rest.to(tl.uint32)
    high = (rest >> 32).to(tl.uint32)
    if FP16:
        lower = tl.load(planes + step * BITS + row, mask=live, other=0).to(tl.uint32)
        upper = tl.load(planes + step * (BITS + 1) + row, mask=live, other=0).to(tl.uint32)
        sign = tl.load(planes + step * (BITS + 2) + row, mask=live, other=0).to(tl.uint32)
        words = tl.join(
            _words_fp16(low, first, lower & 15, upper & 15, sign & 15, ASM),
            _words_fp16(high, second, lower >> 4, upper >> 4, sign >> 4, ASM),
        )
    else:
        words = tl.join(_words_bf16(low, first, ASM), _words_bf16(high, second, ASM))
    tl.store(out + row[:, None] * 2 + tl.arange(0, 2)[None, :], words, mask=live[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _decode(
    coded, out, num_rows,
    BITS: tl.constexpr, FP16: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A row is eight weights. Each program decodes 2 * ROWS rows: each thread some of the first half (a) and as many of
    the second (b), which share a prefix sum."""
    program = tl.program_id(0)
    TILES: tl.constexpr = ROWS * 8 // _TILE
    row = tl.arange(0, ROWS)
    row_b = row + ROWS
    live = row < num_rows - program * (ROWS * 2)
    live_b = row_b < num_rows - program * (ROWS * 2)
    start = program.to(tl.int64) * (ROWS * 2)
    step = ((num_rows + 15) // 16).to(tl.int64) * 16  # As in `Form`.
    all_planes = coded + _HEADER + (num_rows // 4).to(tl.int64) * 32
    planes = all_planes + start
    bytes_ = (coded + _HEADER + start * 8).to(tl.pointer_type(tl.uint64))
    a0, a1, a2, a3, left = _read(planes, step, row, live, BITS)
    b0, b1, b2, b3, left_b = _read(planes, step, row_b, live_b, BITS)
    rest = tl.load(bytes_ + row, mask=live, other=0)
    rest_b = tl.load(bytes_ + row_b, mask=live_b, other=0)
    table = tl.load((coded + _TABLE_AT).to(tl.pointer_type(tl.uint64)))
    more = table
    if BITS == 4:
        more = tl.load((coded + _TABLE_AT + 8).to(tl.pointer_type(tl.uint64)))
    num_tiles = (num_rows * 8 + _TILE - 1) // _TILE
    all_tiles = all_planes + step * (BITS + 3 * FP16)
    tiles = all_tiles.to(tl.pointer_type(tl.uint32))
    tile = program * (TILES * 2)
    before = tl.load(tiles + tile)
    before_b = tl.load(tiles + tl.minimum(tile + TILES, num_tiles))
    after = tl.load(tiles + tl.minimum(tile + TILES * 2, num_tiles))

    first = _exponents(table, more, a0 & 15, a1 & 15, a2 & 15, a3 & 15, BITS, ASM)
    second = _exponents(table, more, a0 >> 4, a1 >> 4, a2 >> 4, a3 >> 4, BITS, ASM)
    first_b = _exponents(table, more, b0 & 15, b1 & 15, b2 & 15, b3 & 15, BITS, ASM)
    second_b = _exponents(table, more, b0 >> 4, b1 >> 4, b2 >> 4, b3 >> 4, BITS, ASM)
    if (after >> 1) > (before >> 1):
        escapes = all_tiles + ((num_tiles + 4) // 4).to(tl.int64) * 16
        count = _count(left) + (_count(left_b) << 16)
        count = tl.cumsum(count, 0) - count
        at = (before >> 1).to(tl.int32) + (count & 0xFFFF)
        at_b = (before_b >> 1).to(tl.int32) + (count >> 16)
        is_dense = (before & 1) != 0
        is_dense_b = (before_b & 1) != 0
        for other in tl.static_range(1, TILES):
            is_dense |= (tl.load(tiles + tl.minimum(tile + other, num_tiles)) & 1) != 0
            is_dense_b |= (tl.load(tiles + tl.minimum(tile + TILES + other, num_tiles)) & 1) != 0
        first, second = _take_all(escapes, at, left, first, second, is_dense, AHEAD)
        first_b, second_b = _take_all(escapes, at_b, left_b, first_b, second_b, is_dense_b, AHEAD)

    words = (out + start * 16).to(tl.pointer_type(tl.uint64))
    _write(words, row, live, rest, first, second, planes, step, BITS, FP16, ASM)
    _write(words, row_b, live_b, rest_b, first_b, second_b, planes, step, BITS, FP16, ASM)


_kernels: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by all that they were compiled for. Triton's own look-up takes 20 microseconds a call."""


def decode(
    form: Form,
    coded: torch.Tensor,
    out: torch.Tensor,
    *,
    rows: int = 128,
    warps: int = 2,
    asm: bool = torch.version.hip is None,
) -> None:
    """Decode all but the tail on the current stream, between addresses that are multiples of 16.

    `rows` is a multiple of 128, since a tile is not divided.
    """
    num_rows = form.coded_weights // 8
    if not num_rows:
        return
    grid = (-(-num_rows // (2 * rows)), 1, 1)
    settings = (form.code_bits, form.dtype is torch.float16, rows, FEW, asm)
    key = (*settings, warps, coded.device)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _decode[grid](coded, out, num_rows, *settings, num_warps=warps)
        if _HAS_QUICK_CALLS:
            _kernels[key] = kernel
    else:
        kernel[grid](coded.data_ptr(), out.data_ptr(), num_rows, *settings)
