"""Coded weights in a file: found again by the next process, and never used for others, damaged or half-written."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar.core.errors import SettingError
from samovar.offload import HostStage, OffloadConfig, apply_offload
from samovar.offload.coded_file import CodedFile, checksum

from .test_coded_copy import add_to_data, image, small_is_large, tiny

__all__ = ["small_is_large"]


def offload(pipe: Any, folder: Path, counts: list[int]) -> Any:
    """Offload a pipeline, and append how many tensors were coded."""
    stage, number = HostStage(), [0]
    encode = stage.encode

    def counting(words: torch.Tensor, dtype: torch.dtype) -> Any:
        coded = encode(words, dtype)
        number[0] += coded is not None
        return coded

    stage.encode = counting  # type: ignore[method-assign]
    config = OffloadConfig("layerwise", compress="lossless", compress_cache=folder)
    offloaded = apply_offload(pipe, config, stage=stage)
    counts.append(number[0])
    return offloaded


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the coded weights of a pipeline."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offload(tiny(), tmp_path, []).detach()
    yield tmp_path
    assert not [file for file in tmp_path.iterdir() if file.suffix != ".coded"], "no half-written file is left"


def again(folder: Path) -> tuple[int, list[str]]:
    """Use a folder: the same bits whatever is in it. How many tensors were coded, and what was said."""
    pipe, counts = tiny(), []
    expected = image(pipe)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        offloaded = offload(pipe, folder, counts)
    assert torch.equal(image(pipe), expected)
    offloaded.detach()
    return counts[0], [str(warning.message) for warning in caught if ".coded" in str(warning.message)]


def test_the_next_process_codes_nothing(folder: Path) -> None:
    assert [file.name for file in folder.iterdir()] == ["transformer.coded"]
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert again(folder) == (0, [])
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


@pytest.mark.parametrize("length", [0, 10, 20, 100, 5000, -1])
def test_a_file_that_was_cut_off_is_said_and_replaced(folder: Path, length: int) -> None:
    file = folder / "transformer.coded"
    whole = file.read_bytes()
    file.write_bytes(whole[:length])
    coded, said = again(folder)
    assert coded > 5
    assert len(said) == 1
    assert ("cut off" in said[0]) or ("index" in said[0]) or ("no coded weights" in said[0])
    if length > 15:
        assert file.read_bytes() == whole
        assert again(folder) == (0, [])


def test_a_damaged_tensor_is_said_and_coded_again(folder: Path) -> None:
    file = folder / "transformer.coded"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4000] + bytes([whole[-4000] ^ 1]) + whole[-3999:])
    coded, said = again(folder)
    assert coded == 1
    assert "damaged" in said[0]
    assert again(folder) == (0, [])


@pytest.mark.parametrize(
    "index",
    [
        "[" * 100_000,
        "[]",
        '{"a": 3}',
        '{"a": {"at": "x", "bytes": "y", "hash": ""}}',
        '{"a": {"at": 0, "bytes": 1e300, "hash": ""}}',
        '{"a": {"at": -1000000000000000, "bytes": 1000000000000000, "hash": ""}}',
        '{"a": {"at": 0, "bytes": 8}}',
    ],
)
def test_an_index_of_anything_else_is_damaged(tmp_path: Path, index: str) -> None:
    file = tmp_path / "a.coded"
    text = index.encode()
    file.write_bytes((b"samovar coded 2\n" + len(text).to_bytes(8, "little") + text).ljust(2**17 + 2**14, b"\0"))
    with pytest.warns(UserWarning, match=r"a\.coded cannot be used: its index is damaged"):
        CodedFile(file).close()


def test_a_foreign_file_is_said_and_left_alone(folder: Path) -> None:
    file = folder / "transformer.coded"
    file.write_bytes(b"somebody's diary\n" * 100)
    coded, said = again(folder)
    assert coded > 5
    assert "left as it is" in said[0]
    assert file.read_bytes().startswith(b"somebody")


def test_weights_that_changed_are_coded_again(folder: Path) -> None:
    pipe, bare, counts = tiny(), tiny(), []
    for each in (pipe, bare):
        for block in each.transformer.transformer_blocks:
            add_to_data(block.attn.to_q.weight)
    with pytest.warns(UserWarning, match="is not of these weights"):
        offloaded = offload(pipe, folder, counts)
    assert counts[0] == len(pipe.transformer.transformer_blocks)
    assert torch.equal(image(pipe), image(bare))
    offloaded.detach()
    assert again(folder)[0] == counts[0], "the file is of the changed ones now"


def test_a_full_disk_loses_nothing(folder: Path) -> None:
    file = folder / "transformer.coded"
    file.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # Writing more raises, as on a full disk.
    try:
        coded, said = again(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert coded > 5
    assert "could not be written" in said[0]
    assert not file.exists()


def test_what_gains_nothing_is_no_reason_to_write_again(tmp_path: Path) -> None:
    truth = torch.randn(4096).to(torch.bfloat16).view(torch.uint8)
    file = CodedFile(tmp_path / "x.coded")
    assert file.take(truth, torch.bfloat16) is None
    file.close()
    assert not file.path.exists()


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="expected a folder") as caught:
        OffloadConfig(compress_cache=tmp_path / "none")
    assert caught.value.param == "compress_cache"


def test_checksums_see_every_bit_and_position() -> None:
    data = torch.randint(0, 256, (3_000_003,), dtype=torch.uint8)
    whole = int(checksum(data))
    for index in (0, 7, 8, 262_147 * 8, 2_999_999, 3_000_002):
        changed = data.clone()
        changed[index] ^= 1
        assert int(checksum(changed)) != whole
    assert int(checksum(data.roll(8))) != whole
    assert int(checksum(torch.cat([data[:3], data])[3:])) == whole, "wherever it begins"
    assert int(checksum(data[:0])) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_see_signs_that_change_together(dtype: torch.dtype) -> None:
    weight = torch.randn(512, 512).to(dtype)
    whole = int(checksum(weight.view(-1).view(torch.uint8)))
    for lane in range(8):
        for columns in (slice(lane, lane + 1), slice(lane, None, 8)):
            other = weight.clone()
            other[:, columns].neg_()
            assert int(checksum(other.view(-1).view(torch.uint8))) != whole, (lane, columns)


def negate_a_column(transformer: Any) -> None:
    """Flip the highest bit of an even number of words of any width."""
    for block in transformer.transformer_blocks:
        block.attn.to_q.weight.data[:, 3].neg_()


def test_the_file_of_a_model_is_not_taken_for_one_with_other_signs(folder: Path) -> None:
    pipe, bare, counts = tiny(), tiny(), []
    for each in (pipe, bare):
        negate_a_column(each.transformer)
    with pytest.warns(UserWarning, match="is not of these weights"):
        offloaded = offload(pipe, folder, counts)
    assert counts[0] == len(pipe.transformer.transformer_blocks)
    assert torch.equal(image(pipe), image(bare))
    offloaded.detach()
