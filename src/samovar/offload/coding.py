"""bfloat16 weights in about 70 % of their bytes, with the same bits.

The exponents of a weight matrix take few values, often; sign and mantissa are noise. So a word is split in two. The
noise is kept as it is, a byte a weight. An exponent becomes a code of three bits, an index into a table of the tensor's
seven most frequent exponents. The eighth code is an escape: that exponent is found in a list. All codes have one
length, so that a GPU decodes every weight by itself.

    header   64 bytes: the table of exponents, in the middle
    bytes    a byte a weight: sign and mantissa
    planes   three times a bit a weight: the code, lowest bit first
    tiles    for every 1024 weights, and for the end, twice the number of escapes before them; odd, if among them any
             eight weights have more than two escapes, which is rare and takes a kernel longer
    escapes  a byte each, in the order of their weights

Each part begins at a multiple of 16 bytes. This file codes on any device with plain torch operations, and decodes so
where there is no Triton; `decode_kernel` decodes on a GPU. What is no multiple of 1024 weights is not coded.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from subprocess import SubprocessError
from typing import Any, NamedTuple

import torch

from ..core.errors import ModelError

MAX_SHARE = 0.95
"""Coded tensors are at most this share of the raw ones, or are left raw."""
EXPECTED_SHARE = 0.72
"""The share for trained weights, before they are read."""
TILE = 1024
"""Weights for each entry of `tiles`."""
FEW = 2
"""Escapes that eight weights may have in a tile that is not marked."""
BITS = 3
ESCAPE = 2**BITS - 1
HEADER, TABLE_AT = 64, 32
_ALIGNMENT = 16
_MAX_WEIGHTS = 2**30
_MAX_WHOLE_BYTES = 2**28
"""Tensors up to this are brought to the device that codes them at once, larger ones in parts."""
_ONES = 0x0101010101010101
"""A one in every byte."""


class Form(NamedTuple):
    """How a coded tensor is laid out."""

    num_weights: int
    num_escapes: int

    @property
    def raw_bytes(self) -> int:
        return self.num_weights * 2

    @property
    def planes_at(self) -> int:
        return HEADER + self.num_weights

    @property
    def tiles_at(self) -> int:
        return self.planes_at + BITS * self.num_weights // 8

    @property
    def escapes_at(self) -> int:
        return self.tiles_at + _aligned((self.num_weights // TILE + 1) * 4)

    @property
    def num_bytes(self) -> int:
        """Bytes of the coded tensor."""
        return self.escapes_at + _aligned(self.num_escapes)


class Coded(NamedTuple):
    """A coded tensor."""

    form: Form
    data: torch.Tensor
    """Its bytes."""


def expected_share(tensor: torch.Tensor) -> float:
    """Coded bytes a raw byte of a tensor, before it is read."""
    return EXPECTED_SHARE if tensor.dtype is torch.bfloat16 and tensor.numel() % TILE == 0 else 1.0


# ----------------------------------------------------------------------------------------------------------- encoding


def encode(words: torch.Tensor, *, device: torch.device | None = None, max_share: float = MAX_SHARE) -> Coded | None:
    """Code a flat bfloat16 tensor, which may be viewed as int16; None if that gains too little.

    The work is done on `device`, by default where the tensor is, in parts of bounded size.
    """
    words = words.detach().view(torch.int16)
    if not 0 < words.numel() <= _MAX_WEIGHTS or words.numel() % TILE:
        return None
    device = words.device if device is None else device
    if words.numel() * 2 <= _MAX_WHOLE_BYTES:
        words = words.to(device)
    counts = torch.zeros(256, dtype=torch.int64, device=device)
    for start, end in _parts(words.numel(), device):
        counts += torch.bincount(_exponents(words[start:end].to(device)), minlength=256)
    counts, frequent = counts.sort(descending=True, stable=True)
    form = Form(words.numel(), int(counts[ESCAPE:].sum()))
    if form.num_bytes > max_share * form.raw_bytes:
        return None
    data = torch.zeros(form.num_bytes, dtype=torch.uint8, device=words.device)
    table = frequent[:ESCAPE]
    data[TABLE_AT : TABLE_AT + ESCAPE].copy_(table)
    code_of = torch.full((256,), ESCAPE, dtype=torch.uint8, device=device)
    code_of[table] = torch.arange(ESCAPE, dtype=torch.uint8, device=device)
    num_escapes, escapes_at, is_dense = [torch.zeros(1, dtype=torch.int64, device=device)], form.escapes_at, []
    for start, end in _parts(words.numel(), device):
        part = words[start:end].to(device)
        exponents = _exponents(part)
        codes = torch.index_select(code_of, 0, exponents.int())
        is_escaped = codes == ESCAPE
        eights = is_escaped.view(-1, TILE // 8, 8).sum(2)
        num_escapes.append(eights.sum(1))
        is_dense.append((eights > FEW).any(1))
        escapes = exponents[is_escaped]
        data[escapes_at : escapes_at + escapes.numel()].copy_(escapes)
        escapes_at += escapes.numel()
        data[HEADER + start : HEADER + end].copy_(((part >> 8) & 0x80) | (part & 0x7F))
        codes = codes.view(torch.int64)
        for plane in _planes(form, start, end):
            # A product moves the lowest bits of eight bytes into the highest byte.
            data[plane].copy_(((codes & _ONES) * 0x0102040810204080) >> 56)
            codes = codes >> 1
    before = torch.cat(num_escapes).cumsum(0) * 2
    before[:-1] |= torch.cat(is_dense)
    data[form.tiles_at : form.escapes_at].view(torch.int32)[: len(before)].copy_(before)
    return Coded(form, data)


def _exponents(words: torch.Tensor) -> torch.Tensor:
    """The exponent of each word, as a byte."""
    return ((words >> 7) & 255).to(torch.uint8)


def _planes(form: Form, start: int, end: int) -> list[slice]:
    """Where the bits of the codes of some weights are."""
    firsts = [form.planes_at + plane * form.num_weights // 8 for plane in range(BITS)]
    return [slice(first + start // 8, first + end // 8) for first in firsts]


def _parts(num_weights: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges of weights that are coded at once: what a CPU's cache holds, or what keeps a GPU busy."""
    step = TILE * (2**8 if device.type == "cpu" else 2**13)
    return ((start, min(start + step, num_weights)) for start in range(0, num_weights, step))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# ----------------------------------------------------------------------------------------------------------- decoding


def decode_into(form: Form, coded: torch.Tensor, out: torch.Tensor) -> None:
    """Write the weights to `out`, bytes on the same device. Nothing waits for a GPU that has Triton."""
    if coded.device != out.device or (coded.numel(), out.numel()) != (form.num_bytes, form.raw_bytes):
        raise ModelError(
            f"{form.num_bytes} coded bytes become {form.raw_bytes} bytes of weights on one device; {coded.numel()} on "
            f"{coded.device} and {out.numel()} on {out.device} were given. Code the tensor again."
        )
    kernel = fast_decoder(coded.device) if (coded.data_ptr() | out.data_ptr()) % _ALIGNMENT == 0 else None
    (kernel or decode)(form, coded, out)


@functools.cache
def fast_decoder(device: torch.device) -> Any:
    """The Triton kernel if it works on that device, else None."""
    if device.type != "cuda":
        return None
    try:
        from . import decode_kernel
    except ImportError:
        return None
    try:
        check_decoder(decode_kernel.decode, device)
        return decode_kernel.decode
    except (RuntimeError, OSError, SubprocessError, decode_kernel.TritonError) as error:  # It has to find a C compiler.
        warnings.warn(
            f"Triton does not work here, so weights are decoded with torch's own operations, which is slower: {error}",
            stacklevel=2,
        )
        return None


def check_decoder(decoder: Callable[[Form, torch.Tensor, torch.Tensor], None], device: torch.device) -> None:
    """Raise unless a decoder gives some weights and all words back."""
    weights = torch.randn(2**21, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    words = torch.cat([weights.view(torch.int16), torch.arange(-(2**15), 2**15, dtype=torch.int16)])
    coded = encode(words, max_share=float("inf"))
    assert coded is not None
    with torch.cuda.device(device):
        out = torch.empty(coded.form.raw_bytes, dtype=torch.uint8, device=device)
        decoder(coded.form, coded.data.to(device), out)
    if not torch.equal(out.cpu(), words.view(torch.uint8)):
        raise RuntimeError("its kernel gives other bits")


def decode(form: Form, coded: torch.Tensor, out: torch.Tensor) -> None:
    """Decode with torch operations."""
    table, bits = coded[TABLE_AT:HEADER], torch.arange(8, dtype=torch.uint8, device=coded.device)
    escapes_at = form.escapes_at
    for start, end in _parts(form.num_weights, coded.device):
        planes = [(coded[plane][:, None] >> bits) & 1 for plane in _planes(form, start, end)]
        codes = (planes[0] | planes[1] << 1 | planes[2] << 2).view(-1)
        exponents, is_escaped = table[codes.int()], codes == ESCAPE
        exponents.masked_scatter_(is_escaped, coded[escapes_at:])
        escapes_at += int(is_escaped.sum())
        rest = coded[HEADER + start : HEADER + end]
        halves = out[2 * start : 2 * end].view(-1, 2)
        halves[:, 0] = (rest & 0x7F) | (exponents << 7)
        halves[:, 1] = (rest & 0x80) | (exponents >> 1)
