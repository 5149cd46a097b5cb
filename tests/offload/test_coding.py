"""Do coded weights come back bit for bit, whatever they are?"""

from __future__ import annotations

import contextlib

import pytest
import torch

from samovar.core.errors import ModelError
from samovar.offload import coding
from samovar.offload.coding import Coded, Form, decode_into, encode, expected_ratio

DTYPES = (torch.bfloat16, torch.float16)
LENGTHS = (1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2047, 2049, 40_000)
EXPONENT = {torch.bfloat16: (7, 256), torch.float16: (10, 32)}
"""By dtype, the position of the exponent, and how many there are."""


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code also what gains nothing."""
    monkeypatch.setattr(coding, "LEAST_BYTES", 0)
    monkeypatch.setattr(coding, "MOST_SHARE", float("inf"))


def coded(words: torch.Tensor, dtype: torch.dtype) -> Coded:
    result = encode(words, dtype)
    assert result is not None
    return result


def decoded(given: Coded) -> torch.Tensor:
    out = torch.full((given.form.raw_bytes,), 0x5A, dtype=torch.uint8)
    decode_into(given.form, given.data, out)
    return out.view(torch.int16)


def words_of(kind: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Words as int16, so that no operation touches a NaN."""
    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=torch.int16)
    normal = (torch.randn(count, generator=generator) * 0.02).to(dtype).view(torch.int16)
    shift, exponents = EXPONENT[dtype]
    if kind == "bits":
        return bits
    if kind == "normal":
        return normal
    if kind == "outliers":
        return torch.where(torch.rand(count, generator=generator) < 0.2, bits, normal)
    if kind == "all of one":
        return torch.full((count,), -3.0, dtype=dtype).view(torch.int16)
    if kind == "negative zero":
        return torch.full((count,), -0.0, dtype=dtype).view(torch.int16)
    if kind == "every exponent":  # As often as any other, so most of them escape.
        return ((torch.arange(count) % exponents) << shift).to(torch.int16) | (bits & 0x7F)
    if kind == "escapes together":  # A stretch in which every weight escapes, after one in which none does.
        return torch.where(torch.arange(count) > count - count // 8, bits, normal)
    assert kind == "nothing finite"
    return bits | ((exponents - 1) << shift)


KINDS = ("bits", "normal", "outliers", "all of one", "negative zero", "every exponent", "escapes together",
         "nothing finite")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_comes_back(kind: str, dtype: torch.dtype, everything: None) -> None:
    for length in LENGTHS:
        words = words_of(kind, length, dtype)
        result = coded(words, dtype)
        assert Form.read(result.data) == result.form
        assert torch.equal(decoded(result), words), (length, result.form)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_words_come_back_with_codes_of_every_length(
    bits: int, dtype: torch.dtype, everything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = coding._best_form

    def fixed(num_weights: int, dtype: torch.dtype, counts: torch.Tensor) -> tuple[Form, torch.Tensor]:
        _, table = best(num_weights, dtype, counts)
        others = [value for value in range(counts.numel()) if value not in table.tolist()]
        table = torch.tensor([*table.tolist(), *others][: 2**bits - 1], dtype=torch.uint8)
        return Form(num_weights, dtype, bits, int(counts.sum() - counts[table.long()].sum())), table

    monkeypatch.setattr(coding, "_best_form", fixed)
    words = torch.arange(-(2**15), 2**15).to(torch.int16)
    words = torch.cat([words, words.flip(0), words_of("normal", 5000, dtype)])
    result = coded(words, dtype)
    assert result.form.code_bits == bits
    assert torch.equal(decoded(result), words)


def test_many_parts_are_one_tensor(everything: None, monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of("outliers", 10_000, torch.bfloat16)
    whole = coded(words, torch.bfloat16)
    monkeypatch.setattr(
        coding, "_parts", lambda n, device: ((start, min(start + 2048, n)) for start in range(0, n, 2048))
    )
    assert torch.equal(coded(words, torch.bfloat16).data, whole.data)
    assert torch.equal(decoded(whole), words)


def test_sizes_are_those_of_the_code() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2**20, generator=generator) * 0.02
    for dtype, bits in ((torch.bfloat16, 11.2), (torch.float16, 14.2)):
        words = weights.to(dtype)
        result = encode(words)
        assert result is not None
        assert result.form.code_bits == 3
        assert result.data.numel() == result.form.num_bytes
        assert result.form.num_bytes * 8 / words.numel() == pytest.approx(bits, abs=0.05)
        assert result.form.num_bytes / result.form.raw_bytes == pytest.approx(expected_ratio(dtype), abs=0.03)
        assert torch.equal(decoded(result), words.view(torch.int16))
    assert expected_ratio(torch.float32) == 1


def test_what_gains_nothing_is_left_raw() -> None:
    normal = torch.randn(2**20).to(torch.bfloat16)
    assert encode(normal) is not None
    assert encode(words_of("bits", 2**20, torch.bfloat16), torch.bfloat16) is None
    assert encode(normal[: 2**18]) is None, "small"
    assert encode(normal[::2]) is None, "not dense"
    assert encode(normal.view(1024, -1)) is None, "not flat"
    assert encode(normal.float()) is None
    assert encode(normal.float().to(torch.float8_e4m3fn)) is None
    assert encode(normal, torch.float16) is None, "words of another type"
    assert encode(normal[:0]) is None


def test_gaps_are_zero_so_that_equal_weights_have_equal_bytes(
    everything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    for length in (1024, 1025, 1056):
        words = words_of("outliers", length, torch.float16)
        results = []
        for junk in (0, 255):
            monkeypatch.setattr(torch, "empty", lambda *args, junk=junk, **kwargs: empty(*args, **kwargs).fill_(junk))
            results.append(coded(words, torch.float16).data)
        assert torch.equal(*results)


def test_inference_mode_and_gradients_do_not_matter() -> None:
    weight = torch.nn.Parameter(torch.randn(2**20).to(torch.bfloat16))
    with torch.inference_mode():
        result = coded(weight, torch.bfloat16)
        assert torch.equal(decoded(result), weight.detach().view(torch.int16))
    assert torch.equal(coded(weight, torch.bfloat16).data, result.data)


# ----------------------------------------------------------------------------------------------------- damaged bytes


def test_truncated_or_foreign_bytes_are_refused() -> None:
    result = coded(torch.randn(2**20).to(torch.bfloat16), torch.bfloat16)
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


@pytest.mark.parametrize(("field", "value"), [(1, -1), (1, 2**40), (2, 2**33), (2, -5), (3, 7), (3, 3 + 256 * 9)])
def test_a_damaged_header_is_refused(field: int, value: int) -> None:
    result = coded(torch.randn(2**20).to(torch.bfloat16), torch.bfloat16)
    data = result.data.clone()
    data[:32].view(torch.int64)[field] = value
    with pytest.raises(ModelError, match=r"damaged|expected"):
        Form.read(data)


def test_the_coded_bytes_of_another_tensor_are_refused() -> None:
    one = coded(torch.randn(2**20).to(torch.bfloat16), torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    other = coded((torch.randn(2**20, generator=generator)).to(torch.bfloat16), torch.bfloat16)
    assert one.form != other.form
    out = torch.zeros(one.form.raw_bytes, dtype=torch.uint8)
    with pytest.raises(ModelError):
        decode_into(one.form, other.data, out)


def test_a_decoder_is_used_only_if_it_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)  # There is none.
    here = torch.device("cpu")
    coding._check(coding._decode, here)

    def almost(form: Form, data: torch.Tensor, out: torch.Tensor) -> None:
        coding._decode(form, data, out)
        out[70_000] ^= 128

    with pytest.raises(RuntimeError, match="other bits"):
        coding._check(almost, here)
