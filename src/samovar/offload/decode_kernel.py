"""How a GPU decodes weights: one thread decodes eight of them, as bytes of 32-bit words (see `coding`).

A thread reads eight bytes and a byte of each plane, and writes sixteen bytes. It makes the exponents of four weights at
once: each bit of a code becomes a byte of zeros or ones, which chooses between bytes of the table. Escapes are counted
for each thread; a prefix sum over the program's threads says where in the list theirs begin.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from .coding import BITS, FEW, HEADER, TABLE_AT, TILE, Form

__all__ = ["TritonError", "decode"]

assert BITS == 3, "the kernel reads three planes"
_TABLE_AT = tl.constexpr(TABLE_AT)
_HEADER = tl.constexpr(HEADER)
_FEW = tl.constexpr(FEW)
_ROWS = tl.constexpr(TILE // 8)
_WARPS = 2


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
def _exponents(table, b0, b1, b2, ASM: tl.constexpr):
    """The exponents of four weights; that of an escape is 0. b0 to b2 are nibbles of the planes."""
    mask0 = _mask(b0, ASM)
    mask1 = _mask(b1, ASM)
    low = _choose(_two(table, 0, mask0), _two(table, 2, mask0), mask1)
    high = _choose(_two(table, 4, mask0), _two(table, 6, mask0), mask1)
    return _choose(low, high, _mask(b2, ASM))


@triton.jit
def _words(rest, exponents, ASM: tl.constexpr):
    """Four bytes of sign and mantissa, and four exponents, as four 16-bit words."""
    low = (rest & 0x7F7F7F7F) | ((exponents << 7) & 0x80808080)
    high = (rest & 0x80808080) | ((exponents >> 1) & 0x7F7F7F7F)
    if ASM:
        first = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [low, high], tl.uint32, True, 1)
        second = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [low, high], tl.uint32, True, 1)
    else:
        first = (low & 0xFF) | ((low & 0xFF00) << 8) | ((high & 0xFF) << 8) | ((high & 0xFF00) << 16)
        second = ((low >> 16) & 0xFF) | ((low >> 8) & 0xFF0000) | ((high >> 8) & 0xFF00) | (high & 0xFF000000)
    return (second.to(tl.uint64) << 32) | first.to(tl.uint64)


@triton.jit
def _take_escape(escapes, at, left, first, second):
    """Put the exponent of each thread's next escape in its place."""
    lowest = left & (0 - left)
    value = tl.load(escapes + at, mask=left != 0, other=0).to(tl.uint32)
    first += value * (((lowest & 15) * 0x00204081) & 0x01010101)
    second += value * (((lowest >> 4) * 0x00204081) & 0x01010101)
    return at + 1, left ^ lowest, first, second


@triton.jit
def _take_all(escapes, at, left, first, second, is_dense):
    for _ in tl.static_range(_FEW):
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
def _read(planes, step, row, live):
    """A byte of each plane of the code, and where all of them have ones."""
    b0 = tl.load(planes + row, mask=live, other=0).to(tl.uint32)
    b1 = tl.load(planes + step + row, mask=live, other=0).to(tl.uint32)
    b2 = tl.load(planes + step * 2 + row, mask=live, other=0).to(tl.uint32)
    return b0, b1, b2, b0 & b1 & b2


@triton.jit
def _write(out, row, live, rest, first, second, ASM: tl.constexpr):
    """Put eight weights together."""
    words = tl.join(_words(rest.to(tl.uint32), first, ASM), _words((rest >> 32).to(tl.uint32), second, ASM))
    tl.store(out + row[:, None] * 2 + tl.arange(0, 2)[None, :], words, mask=live[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _decode(coded, out, num_rows, ASM: tl.constexpr):
    """A row is eight weights. Each program decodes two tiles: each thread a row of the first (a) and one of the second
    (b), which share a prefix sum. The last program may have one tile only."""
    program = tl.program_id(0)
    row = tl.arange(0, _ROWS)
    row_b = row + _ROWS
    live = row < num_rows - program * (_ROWS * 2)
    live_b = row_b < num_rows - program * (_ROWS * 2)
    start = program.to(tl.int64) * (_ROWS * 2)
    step = num_rows.to(tl.int64)
    all_planes = coded + _HEADER + step * 8
    planes = all_planes + start
    bytes_ = (coded + _HEADER + start * 8).to(tl.pointer_type(tl.uint64))
    a0, a1, a2, left = _read(planes, step, row, live)
    b0, b1, b2, left_b = _read(planes, step, row_b, live_b)
    rest = tl.load(bytes_ + row, mask=live, other=0)
    rest_b = tl.load(bytes_ + row_b, mask=live_b, other=0)
    table = tl.load((coded + _TABLE_AT).to(tl.pointer_type(tl.uint64)))
    num_tiles = num_rows // _ROWS
    all_tiles = all_planes + step * 3
    tiles = all_tiles.to(tl.pointer_type(tl.uint32))
    tile = program * 2
    before = tl.load(tiles + tile)
    before_b = tl.load(tiles + tile + 1)
    after = tl.load(tiles + tl.minimum(tile + 2, num_tiles))

    first = _exponents(table, a0 & 15, a1 & 15, a2 & 15, ASM)
    second = _exponents(table, a0 >> 4, a1 >> 4, a2 >> 4, ASM)
    first_b = _exponents(table, b0 & 15, b1 & 15, b2 & 15, ASM)
    second_b = _exponents(table, b0 >> 4, b1 >> 4, b2 >> 4, ASM)
    if (after >> 1) > (before >> 1):
        escapes = all_tiles + ((num_tiles + 4) // 4).to(tl.int64) * 16
        count = _count(left) + (_count(left_b) << 16)
        count = tl.cumsum(count, 0) - count
        at = (before >> 1).to(tl.int32) + (count & 0xFFFF)
        at_b = (before_b >> 1).to(tl.int32) + (count >> 16)
        first, second = _take_all(escapes, at, left, first, second, (before & 1) != 0)
        first_b, second_b = _take_all(escapes, at_b, left_b, first_b, second_b, (before_b & 1) != 0)

    words = (out + start * 16).to(tl.pointer_type(tl.uint64))
    _write(words, row, live, rest, first, second, ASM)
    _write(words, row_b, live_b, rest_b, first_b, second_b, ASM)


_kernels: dict[tuple[bool, torch.device], Any] = {}
"""Compiled kernels. Triton's own look-up takes 20 microseconds a call."""


def decode(form: Form, coded: torch.Tensor, out: torch.Tensor, *, asm: bool = torch.version.hip is None) -> None:
    """Decode on the current stream, between addresses that are multiples of 16."""
    num_rows = form.num_weights // 8
    grid = (-(-num_rows // (TILE // 4)), 1, 1)
    kernel = _kernels.get((asm, coded.device))
    if kernel is None:
        _kernels[asm, coded.device] = _decode[grid](coded, out, num_rows, asm, num_warps=_WARPS)
    else:
        kernel[grid](coded.data_ptr(), out.data_ptr(), num_rows, asm)
