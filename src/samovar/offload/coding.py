"""How do 16-bit weights cross the bus in fewer bytes, and come out bit for bit?

The exponents of a weight matrix take few values, often; sign and mantissa are noise. So a word is split in two. The
noise is kept as it is: a byte a weight, and for fp16 three more bits. An exponent becomes a code of two to four bits,
an index into a table of the tensor's most frequent exponents. The last code is an escape: that exponent is found in a
list. All codes have one length, so that a GPU decodes every weight by itself.

    header   64 bytes: what this is, and the table of exponents
    bytes    a byte a weight: bf16 sign and mantissa; fp16 the lower eight bits of the mantissa
    planes   a bit a weight and plane: the code, lowest bit first; for fp16 then two bits of the mantissa and the sign
    tiles    for every 1024 weights, and for the end, twice the number of escapes before them; odd, if among them any
             eight weights have more than two escapes, which is rare and takes a kernel longer
    escapes  a byte each, in the order of their weights
    tail     the last weights as they are, if their number is no multiple of 32

Each part begins at a multiple of 16 bytes. This file codes on any device with plain torch operations, and decodes so
where there is no Triton; `decode_kernel` decodes on a GPU.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from subprocess import SubprocessError
from typing import Any

import torch

from ..core.errors import ModelError

LEAST_BYTES = 2**20
"""Tensors below this are not worth a decoding of their own."""
MOST_SHARE = 0.95
"""Coded tensors are at most this share of the raw ones, or are left raw."""
TILE = 1024
"""Weights for each entry of `tiles`."""
FEW = 2
"""Escapes that eight weights may have in a tile that is not marked."""
ALIGNED = 16
HEADER = 64
TABLE_AT = 32
"""Where in the header the table is."""
_GROUP = 32
_MAGIC = int.from_bytes(b"smvrcod1", "little")
_DTYPES = (torch.bfloat16, torch.float16)
_MOST_WEIGHTS = 2**30
_WHOLE_BYTES = 2**28
"""Tensors up to this are brought to the device that codes them at once, larger ones in parts."""
_ONES = 0x0101010101010101
"""A one in every byte."""


@dataclass(frozen=True)
class Form:
    """How a coded tensor is laid out."""

    num_weights: int
    dtype: torch.dtype
    code_bits: int
    num_escapes: int

    @cached_property
    def coded_weights(self) -> int:
        """All but the tail."""
        return self.num_weights // _GROUP * _GROUP

    @cached_property
    def raw_bytes(self) -> int:
        return self.num_weights * 2

    @cached_property
    def num_planes(self) -> int:
        return self.code_bits + (3 if self.dtype is torch.float16 else 0)

    @cached_property
    def num_tiles(self) -> int:
        return -(-self.coded_weights // TILE)

    @cached_property
    def plane_bytes(self) -> int:
        return _aligned(self.coded_weights // 8)

    @cached_property
    def planes_at(self) -> int:
        return HEADER + _aligned(self.coded_weights)

    @cached_property
    def tiles_at(self) -> int:
        return self.planes_at + self.num_planes * self.plane_bytes

    @cached_property
    def escapes_at(self) -> int:
        return self.tiles_at + _aligned((self.num_tiles + 1) * 4)

    @cached_property
    def tail_at(self) -> int:
        return self.escapes_at + _aligned(self.num_escapes)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the coded tensor."""
        return self.tail_at + _aligned((self.num_weights - self.coded_weights) * 2)

    def header(self) -> torch.Tensor:
        """The header but for the table."""
        fields = [_MAGIC, self.num_weights, self.num_escapes, self.code_bits + 256 * _DTYPES.index(self.dtype)]
        return torch.tensor(fields, dtype=torch.int64).view(torch.uint8)

    @classmethod
    def read(cls, coded: torch.Tensor) -> Form:
        """The form of coded bytes in host memory. Raises ModelError unless all of them are there."""
        fields = coded[:TABLE_AT].clone().view(torch.int64).tolist() if coded.numel() >= HEADER else [0]
        if fields[0] != _MAGIC:
            raise ModelError(f"These {coded.numel()} bytes are no coded weights. Code the tensor again.")
        _, num_weights, num_escapes, kind = fields
        dtype, code_bits = divmod(kind, 256)
        if dtype not in (0, 1) or code_bits not in (2, 3, 4) or not 0 <= num_escapes <= num_weights <= _MOST_WEIGHTS:
            raise ModelError(f"The header of coded weights is damaged: {fields[1:]}. Code the tensor again.")
        form = cls(num_weights, _DTYPES[dtype], code_bits, num_escapes)
        if form.num_bytes != coded.numel():
            raise ModelError(
                f"Coded weights have {coded.numel()} bytes, and {form.num_bytes} were expected: the rest was cut off. "
                "Code the tensor again."
            )
        return form


@dataclass(frozen=True)
class Coded:
    """A coded tensor."""

    form: Form
    data: torch.Tensor
    """Its bytes."""


def expected_ratio(dtype: torch.dtype) -> float:
    """Coded bytes a raw byte of trained weights, before they are read."""
    return {torch.bfloat16: 0.72, torch.float16: 0.88}.get(dtype, 1.0)


# ----------------------------------------------------------------------------------------------------------- encoding


def encode(
    words: torch.Tensor, dtype: torch.dtype | None = None, *, device: torch.device | None = None
) -> Coded | None:
    """Code a flat tensor, or None if that gains too little. `dtype` says what int16 words are.

    The work is done on `device`, by default where the tensor is, in parts of bounded size.
    """
    dtype = words.dtype if dtype is None else dtype
    if dtype not in _DTYPES or words.dtype not in (dtype, torch.int16) or words.dim() != 1:
        return None
    if not words.is_contiguous() or words.numel() * 2 < LEAST_BYTES or words.numel() > _MOST_WEIGHTS:
        return None
    return _encode(words, dtype, words.device if device is None else device, MOST_SHARE)


def _encode(words: torch.Tensor, dtype: torch.dtype, device: torch.device, most_share: float) -> Coded | None:
    words = words.detach().view(torch.int16)
    if words.numel() * 2 <= _WHOLE_BYTES:
        words = words.to(device)
    counts = torch.zeros(256, dtype=torch.int64, device=device)
    for start, end in _parts(words.numel() // _GROUP * _GROUP, device):
        counts += torch.bincount(_exponents(words[start:end].to(device), dtype), minlength=256)
    form, table = _best_form(words.numel(), dtype, counts.cpu())
    if form.num_bytes > most_share * form.raw_bytes:
        return None
    data = torch.empty(form.num_bytes, dtype=torch.uint8, device=words.device)
    data[:TABLE_AT] = form.header().to(data.device)
    data[TABLE_AT:HEADER] = _padded(table, HEADER - TABLE_AT).to(data.device)
    _write(form, table.to(device), words, data)
    return Coded(form, data)


def _best_form(num_weights: int, dtype: torch.dtype, counts: torch.Tensor) -> tuple[Form, torch.Tensor]:
    """The number of code bits with the fewest bytes, and the exponent of each code but the escape."""
    frequent = counts.argsort(descending=True, stable=True)
    forms = []
    for bits in (2, 3, 4):
        form = Form(num_weights, dtype, bits, int(counts[frequent[2**bits - 1 :]].sum()))
        forms.append((form.num_bytes, form, frequent[: 2**bits - 1].to(torch.uint8)))
    _, form, table = min(forms, key=lambda item: item[0])
    return form, table


def _write(form: Form, table: torch.Tensor, words: torch.Tensor, data: torch.Tensor) -> None:
    """Fill all parts but the header."""
    device = table.device
    escape = 2**form.code_bits - 1
    code_of = torch.full((256,), escape, dtype=torch.uint8, device=device)
    code_of[table.long()] = torch.arange(escape, dtype=torch.uint8, device=device)
    counts, is_dense = [torch.zeros(1, dtype=torch.int64, device=device)], []
    escapes_at = form.escapes_at
    for start, end in _parts(form.coded_weights, device):
        part = words[start:end].to(device)
        exponents = _exponents(part, form.dtype)
        codes = torch.index_select(code_of, 0, exponents.int())
        escaped = codes == escape
        eights = _padded(escaped, _aligned(end - start, TILE)).view(-1, TILE // 8, 8).sum(2)
        counts.append(eights.sum(1))
        is_dense.append((eights > FEW).any(1))
        escapes = exponents[escaped]
        data[escapes_at : escapes_at + escapes.numel()].copy_(escapes)
        escapes_at += escapes.numel()
        if form.dtype is torch.float16:
            data[HEADER + start : HEADER + end].copy_(part)
            codes |= (((part >> 8) & 3) | ((part >> 13) & 4)).to(torch.uint8) << form.code_bits
        else:
            data[HEADER + start : HEADER + end].copy_(((part >> 8) & 0x80) | (part & 0x7F))
        codes = codes.view(torch.int64)
        for plane in range(form.num_planes):
            # A product moves the lowest bits of eight bytes into the highest byte.
            bits = (((codes >> plane) & _ONES) * 0x0102040810204080) >> 56
            at = form.planes_at + plane * form.plane_bytes
            data[at + start // 8 : at + end // 8].copy_(bits)
    before = torch.cat(counts).cumsum(0) * 2
    before[:-1] |= torch.cat(is_dense) if is_dense else False
    tiles = before.int().view(torch.uint8)
    data[form.tiles_at : form.tiles_at + tiles.numel()].copy_(tiles)
    tail = words[form.coded_weights :].view(torch.uint8)
    data[form.tail_at : form.tail_at + tail.numel()].copy_(tail)
    _clear_gaps(form, data)


def _clear_gaps(form: Form, data: torch.Tensor) -> None:
    """Zero what no part covers, so that equal weights have equal bytes."""
    planes = [form.planes_at + plane * form.plane_bytes for plane in range(form.num_planes)]
    data[HEADER + form.coded_weights : form.planes_at] = 0
    for at in planes:
        data[at + form.coded_weights // 8 : at + form.plane_bytes] = 0
    data[form.tiles_at + (form.num_tiles + 1) * 4 : form.escapes_at] = 0
    data[form.escapes_at + form.num_escapes : form.tail_at] = 0
    data[form.tail_at + (form.num_weights - form.coded_weights) * 2 :] = 0


def _exponents(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The exponent of each word, as a byte."""
    return ((words >> 10) & 31).to(torch.uint8) if dtype is torch.float16 else ((words >> 7) & 255).to(torch.uint8)


def _parts(num_weights: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges of weights that are coded at once: what a CPU's cache holds, or what keeps a GPU busy."""
    step = TILE * (2**8 if device.type == "cpu" else 2**13)
    return ((start, min(start + step, num_weights)) for start in range(0, num_weights, step))


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, length - tensor.numel()))


def _aligned(num_bytes: int, to: int = ALIGNED) -> int:
    return -(-num_bytes // to) * to


# ----------------------------------------------------------------------------------------------------------- decoding


def decode_into(form: Form, coded: torch.Tensor, out: torch.Tensor) -> None:
    """Write the weights to `out`, bytes on the same device. Nothing waits for a GPU that has Triton."""
    if coded.device != out.device or coded.numel() != form.num_bytes or out.numel() != form.raw_bytes:
        raise ModelError(
            f"{form.num_bytes} coded bytes become {form.raw_bytes} bytes of weights on one device; {coded.numel()} on "
            f"{coded.device} and {out.numel()} on {out.device} were given. Code the tensor again."
        )
    if coded.device.type == "cpu" and Form.read(coded) != form:
        raise ModelError(f"The coded weights are of another tensor: {Form.read(coded)} instead of {form}.")
    kernel = fast_decoder(coded.device) if (coded.data_ptr() | out.data_ptr()) % ALIGNED == 0 else None
    (kernel or _decode)(form, coded, out)
    if form.num_weights > form.coded_weights:
        tail = coded[form.tail_at :][: out.numel() - form.coded_weights * 2]
        out[form.coded_weights * 2 :].copy_(tail)


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
        _check(decode_kernel.decode, device)
        return decode_kernel.decode
    except (RuntimeError, OSError, SubprocessError, decode_kernel.TritonError) as error:  # It has to find a C compiler.
        warnings.warn(
            f"Triton does not work here, so weights are decoded with torch's own operations, which is slower: {error}",
            stacklevel=2,
        )
        return None


def _check(decode: Callable[[Form, torch.Tensor, torch.Tensor], None], device: torch.device) -> None:
    """Raise unless a decoder gives some weights and all words back."""
    weights = torch.randn(2**21, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    words = torch.cat([weights.view(torch.int16), torch.arange(-(2**15), 2**15, dtype=torch.int16)])
    coded = _encode(words, torch.bfloat16, words.device, float("inf"))
    assert coded is not None
    with torch.cuda.device(device):
        out = torch.empty(coded.form.raw_bytes, dtype=torch.uint8, device=device)
        decode(coded.form, coded.data.to(device), out)
    end = coded.form.coded_weights
    if not torch.equal(out[: 2 * end].cpu(), words[:end].view(torch.uint8)):
        raise RuntimeError("its kernel gives other bits")


def _decode(form: Form, coded: torch.Tensor, out: torch.Tensor) -> None:
    """Decode all but the tail with torch operations, eight weights in each 64-bit integer."""
    table = [value * _ONES for value in coded[TABLE_AT : TABLE_AT + 2**form.code_bits].long()]
    tiles = coded[form.tiles_at : form.escapes_at].clone().view(torch.int32) >> 1
    parts = list(_parts(form.coded_weights, coded.device))
    firsts = tiles[[start // TILE for start, _ in parts]].tolist()
    escapes = coded[form.escapes_at : form.escapes_at + form.num_escapes]
    for (start, end), first in zip(parts, firsts, strict=True):
        masks = []
        for plane in range(form.num_planes):
            at = form.planes_at + plane * form.plane_bytes
            masks.append(_bytes_of_bits(coded[at + start // 8 : at + end // 8]))
        values = table
        for mask in masks[: form.code_bits]:
            values = [a ^ ((a ^ b) & mask) for a, b in zip(values[::2], values[1::2], strict=True)]
        exponents = values[0].view(torch.uint8)
        escaped = functools.reduce(torch.bitwise_and, masks[: form.code_bits]).view(torch.uint8) != 0
        exponents.masked_scatter_(escaped, escapes[first:])
        rest = coded[HEADER + start : HEADER + end]
        halves = out[2 * start : 2 * end].view(-1, 2)
        if form.dtype is torch.float16:
            lower, upper, sign = (mask.view(torch.uint8) for mask in masks[form.code_bits :])
            halves[:, 0] = rest
            halves[:, 1] = (exponents << 2) | (lower & 1) | (upper & 2) | (sign & 0x80)
        else:
            halves[:, 0] = (rest & 0x7F) | (exponents << 7)
            halves[:, 1] = (rest & 0x80) | (exponents >> 1)


def _bytes_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Each bit as a byte of zeros or ones; those of a byte become one 64-bit integer."""
    spread = (bits.long() * _ONES) & (0x8040201008040201 - 2**64)
    return (((spread + 0x7F7F7F7F7F7F7F7F) >> 7) & _ONES) * 255
