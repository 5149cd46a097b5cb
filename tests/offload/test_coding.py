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

TILES = (1, 2, 3, 40)


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
    if kind == "bits":
        return bits
    if kind == "normal":
        return normal
    if kind == "outliers":
        return torch.where(torch.rand(count, generator=generator) < 0.2, bits, normal)
    if kind == "all of one":
        return torch.full((count,), -3.0, dtype=torch.bfloat16).view(torch.int16)
    if kind == "negative zero":
        return torch.full((count,), -0.0, dtype=torch.bfloat16).view(torch.int16)
    if kind == "every exponent":  # As often as any other, so most of them escape.
        return ((torch.arange(count) % 256) << 7).to(torch.int16) | (bits & 0x7F)
    if kind == "escapes together":  # A stretch in which every weight escapes, after one in which none does.
        return torch.where(torch.arange(count) > count - count // 8, bits, normal)
    if kind == "every word":
        return torch.arange(count).to(torch.int16)
    assert kind == "nothing finite"
    return bits | (255 << 7)


KINDS = ("bits", "normal", "outliers", "all of one", "negative zero", "every exponent", "escapes together",
         "every word", "nothing finite")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_pattern_comes_back(kind: str) -> None:
    for tiles in (*TILES, 64):
        words = words_of(kind, tiles * TILE)
        result = coded(words)
        assert Form.read(result.data) == result.form
        assert torch.equal(decoded(result), words), (tiles, result.form)


def test_many_parts_are_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of("outliers", 10 * TILE)
    whole = coded(words)
    monkeypatch.setattr(
        coding, "_parts", lambda n, device: ((start, min(start + 2048, n)) for start in range(0, n, 2048))
    )
    assert torch.equal(coded(words).data, whole.data)
    assert torch.equal(decoded(whole), words)


def test_trained_weights_take_as_many_bytes_as_planned() -> None:
    generator = torch.Generator().manual_seed(0)
    words = (torch.randn(2**20, generator=generator) * 0.02).to(torch.bfloat16)
    result = encode(words)
    assert result is not None
    assert result.data.numel() == result.form.num_bytes
    assert result.form.num_bytes * 8 / words.numel() == pytest.approx(11.2, abs=0.05)
    assert result.form.num_bytes / result.form.raw_bytes == pytest.approx(expected_share(words), abs=0.03)
    assert expected_share(words.float()) == expected_share(words.half()) == expected_share(words[:-1]) == 1


def test_what_gains_nothing_is_left_raw() -> None:
    assert encode(words_of("bits", 2**20)) is None
    assert encode(words_of("normal", 2**20)[:-1]) is None, "no whole tiles"
    assert encode(words_of("normal", 0)) is None


def test_inference_mode_and_gradients_do_not_matter() -> None:
    weight = torch.nn.Parameter(torch.randn(TILE).to(torch.bfloat16))
    with torch.inference_mode():
        result = coded(weight)
        assert torch.equal(decoded(result), weight.detach().view(torch.int16))
    assert torch.equal(coded(weight).data, result.data)


# ----------------------------------------------------------------------------------------------------- damaged bytes


def test_truncated_or_foreign_bytes_are_refused() -> None:
    result = coded(words_of("normal", 2**14))
    out = torch.zeros(result.form.raw_bytes, dtype=torch.uint8)
    for bad in (result.data[:-16], result.data[:40], result.data[:0], torch.cat([result.data, result.data[:16]])):
        with pytest.raises(ModelError):
            Form.read(bad)
        with pytest.raises(ModelError):
            decode_into(result.form, bad, out)
    foreign = torch.zeros_like(result.data)
    with pytest.raises(ModelError, match="no coded weights"):
        decode_into(result.form, foreign, out)
    with pytest.raises(ModelError, match="one device"):
        decode_into(result.form, result.data, out[:-2])
    assert not out.any(), "nothing was written"


@pytest.mark.parametrize(("field", "value"), [(1, -1), (1, 0), (1, 7), (1, 2**40), (2, 2**33), (2, -5), (3, 7)])
def test_a_damaged_header_is_refused(field: int, value: int) -> None:
    data = coded(words_of("normal", 2**14)).data.clone()
    data[:32].view(torch.int64)[field] = value
    with pytest.raises(ModelError, match=r"damaged|expected"):
        Form.read(data)


def test_the_coded_bytes_of_another_tensor_are_refused() -> None:
    one, other = coded(words_of("normal", 2**14)), coded(words_of("normal", 2**15))
    with pytest.raises(ModelError):
        decode_into(one.form, other.data, torch.zeros(one.form.raw_bytes, dtype=torch.uint8))


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
    for tiles in (*TILES, 3001):
        for asm in (False, True):
            check_kernel(words_of(kind, tiles * TILE), torch.device("cuda", 0), asm=asm)
