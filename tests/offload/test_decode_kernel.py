"""Does the kernel decode what torch's operations do, bit for bit?

Without a GPU, Triton's interpreter runs it, if it is asked for: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from samovar.offload.coding import decode_into, encode

from .test_coding import DTYPES, KINDS, LENGTHS, coded, everything, words_of

__all__ = ["everything"]


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_interpreted_kernel_decodes_the_same(kind: str, dtype: torch.dtype, everything: None) -> None:
    from samovar.offload.decode_kernel import decode

    for length in (32, 1025, 5000):
        words = words_of(kind, length, dtype)
        result = coded(words, dtype)
        end = result.form.coded_weights * 2
        for rows in (128, 256):
            out = torch.full((words.numel() * 2 + 64,), 0x5A, dtype=torch.uint8)
            decode(result.form, result.data, out, rows=rows, asm=False)
            assert torch.equal(out[:end], words.view(torch.uint8)[:end]), (length, rows)
            assert (out[end:] == 0x5A).all(), "what is behind it is untouched"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_codes_and_decodes_the_same(kind: str, dtype: torch.dtype, everything: None) -> None:
    from samovar.offload.decode_kernel import decode

    device = torch.device("cuda", 0)
    for length in (*LENGTHS, 3_000_001):
        words = words_of(kind, length, dtype)
        here = coded(words, dtype)
        there = encode(words, dtype, device=device)
        assert there is not None
        assert there.form == here.form
        assert torch.equal(there.data.cpu(), here.data), length
        out = torch.full((words.numel() * 2 + 64,), 0x5A, dtype=torch.uint8, device=device)
        decode_into(there.form, there.data, out[:-64])
        assert torch.equal(out[:-64].cpu(), words.view(torch.uint8)), (length, there.form)
        for asm in (False, True):
            out.fill_(0x5A)
            decode(there.form, there.data, out, asm=asm)
            end = there.form.coded_weights * 2
            assert torch.equal(out[:end].cpu(), words.view(torch.uint8)[:end]), (length, asm)
            assert (out[end:] == 0x5A).all(), "what is behind it is untouched"
