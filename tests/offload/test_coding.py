"""Coded weights come back bit for bit, whatever they are."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import Any

import pytest
import torch

from samovar.core.errors import ModelError
from samovar.offload import coding
from samovar.offload.coding import TILE, Coded, Form, check_decoder, decode, decode_into, encode, expected_share

KINDS = ("bits", "normal", "outliers", "all of one", "every exponent", "escapes together", "nothing finite")


def coded(words: torch.Tensor, device: torch.device | None = None) -> Coded:
    result = encode(words, device=device, max_share=float("inf"))
    assert result is not None
    return result


def decoded(given: Coded) -> torch.Tensor:
    out = torch.full((given.form.raw_bytes,), 0x5A, dtype=torch.uint8)
    decode_into(given.form, given.data, out)
    return out.view(torch.int16)


def words_of(kind: str, count: int) -> torch.Tensor:
    """Words as int16, so that no operation touches a NaN."""
    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=torch.int16)
    normal = (torch.randn(count, generator=generator) * 0.02).to(torch.bfloat16).view(torch.int16)
    return {
        "bits": bits,
        "normal": normal,
        "outliers": torch.where(torch.rand(count, generator=generator) < 0.2, bits, normal),
        "all of one": torch.full((count,), -0.0, dtype=torch.bfloat16).view(torch.int16),
        # As often as any other, so most of them escape.
        "every exponent": ((torch.arange(count) % 256) << 7).to(torch.int16) | (bits & 0x7F),
        # A stretch in which every weight escapes, after one in which none does.
        "escapes together": torch.where(torch.arange(count) > count - count // 8, bits, normal),
        "nothing finite": bits | (255 << 7),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_pattern_comes_back(kind: str) -> None:
    for tiles in (1, 2, 3, 40):
        words = words_of(kind, tiles * TILE)
        result = coded(words)
        assert torch.equal(decoded(result), words), (tiles, result.form)
        # What a kernel finds its escapes by: how many are before each tile, and whether they are many.
        table = result.data[32:39].short()
        escaped = (words[:, None] >> 7 & 255 != table).all(1).view(tiles, -1)
        is_dense = escaped.view(tiles, -1, 8).sum(2).amax(1) > coding.FEW
        before = result.data[result.form.tiles_at :].view(torch.int32)[: tiles + 1]
        assert torch.equal(before >> 1, torch.nn.functional.pad(escaped.sum(1).cumsum(0), (1, 0)).int())
        assert torch.equal(before[:-1] & 1, is_dense.int())


def test_many_parts_are_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of("outliers", 10 * TILE)
    whole = coded(words)
    monkeypatch.setattr(coding, "_parts", lambda n, device: ((at, min(at + 2048, n)) for at in range(0, n, 2048)))
    assert torch.equal(coded(words).data, whole.data)
    assert torch.equal(decoded(whole), words)


def test_trained_weights_take_as_many_bytes_as_planned_and_what_gains_nothing_is_left_raw() -> None:
    weights = words_of("normal", 2**20).view(torch.bfloat16)
    result = encode(weights)
    assert result is not None
    assert result.data.numel() == result.form.num_bytes == pytest.approx(weights.numel() * 11.2 / 8, rel=0.005)
    assert result.form.num_bytes / result.form.raw_bytes == pytest.approx(expected_share(weights), abs=0.03)
    assert expected_share(weights.float()) == expected_share(weights.half()) == expected_share(weights[:-1]) == 1
    assert encode(weights[:-1]) is encode(weights[:0]) is encode(words_of("bits", 2**20)) is None


def test_inference_mode_and_gradients_do_not_matter() -> None:
    weight = torch.nn.Parameter(torch.randn(TILE).to(torch.bfloat16))
    with torch.inference_mode():
        result = coded(weight)
        assert torch.equal(decoded(result), weight.detach().view(torch.int16))
    assert torch.equal(coded(weight).data, result.data)


def test_bytes_that_are_not_those_of_the_tensor_are_refused() -> None:
    result, other = coded(words_of("normal", 2**14)), coded(words_of("normal", 2**15))
    data, out = result.data, torch.zeros(result.form.raw_bytes, dtype=torch.uint8)
    longer = torch.cat([data, data[:16]])
    for bad, place in ((data[:-16], out), (longer, out), (other.data, out), (data, out[:-2])):
        with pytest.raises(ModelError, match="one device"):
            decode_into(result.form, bad, place)
    assert not out.any(), "nothing was written"


# ---------------------------------------------------------------------------------------------------------- on a GPU


def test_a_decoder_is_used_only_if_it_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)  # There is none.
    here = torch.device("cpu")
    check_decoder(decode, here)

    def almost(form: Form, data: torch.Tensor, out: torch.Tensor) -> None:
        decode(form, data, out)
        out[70_000] ^= 128

    with pytest.raises(RuntimeError, match="other bits"):
        check_decoder(almost, here)


def check_kernel(words: torch.Tensor, device: torch.device, **options: Any) -> None:
    from samovar.offload import decode_kernel

    result = coded(words, device)
    assert torch.equal(result.data.cpu(), coded(words).data)
    out = torch.full((words.numel() * 2 + 64,), 0x5A, dtype=torch.uint8, device=device)
    decode_kernel.decode(result.form, result.data.to(device), out, **options)
    assert torch.equal(out[:-64].cpu(), words.view(torch.uint8)), result.form
    assert (out[-64:] == 0x5A).all(), "what is behind it is untouched"


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1",
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreted_kernel_decodes_the_same(kind: str) -> None:
    for tiles in (1, 2, 5):
        check_kernel(words_of(kind, tiles * TILE), torch.device("cpu"), asm=False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_codes_and_decodes_the_same(kind: str) -> None:
    for tiles in (1, 2, 3, 40, 3001):
        for asm in (False, True):
            check_kernel(words_of(kind, tiles * TILE), torch.device("cuda", 0), asm=asm)
