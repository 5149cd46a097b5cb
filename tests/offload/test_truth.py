"""Where the bytes of a weight are: found in the file, read from it, and only if it holds what the memory does."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.core.errors import ModelError
from samovar.offload import truth as truth_module
from samovar.offload.truth import (
    Files,
    ModelFile,
    Truth,
    can_see_writes,
    disk_speed,
    may_be_written,
    private_mappings,
)
from samovar.offload.weights import spans_of

pytestmark = pytest.mark.skipif(not can_see_writes(os.getpid()), reason="the kernel does not show written pages")
PAGE = mmap.PAGESIZE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three weights whose bytes begin anywhere in a page."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{index}": torch.randn(5000 + index, generator=generator) for index in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def truth_of(tensor: torch.Tensor, files: Files | None = None) -> Truth:
    (span,) = spans_of([tensor])
    flat = tensor.detach().view(-1).view(torch.uint8)
    return (files or Files()).find([(span, flat)])[0]


def read(truth: Truth, start: int = 0, count: int | None = None) -> torch.Tensor:
    target = torch.zeros(truth.num_bytes - start if count is None else count, dtype=torch.uint8)
    truth.read(start, target)
    return target


def test_a_weight_is_found_in_its_file_and_read_without_touching_its_pages(file: Path) -> None:
    for name, tensor in load_file(file).items():
        truth = truth_of(tensor)
        assert truth.file is not None
        assert truth.file.path == str(file)
        raw = file.read_bytes()[truth.offset : truth.offset + truth.num_bytes]
        assert bytes(read(truth).numpy()) == raw, name
        assert bytes(read(truth, 1001, 77).numpy()) == raw[1001:1078]
        assert torch.equal(read(truth).view(torch.float32), tensor)


def test_memory_and_shared_mappings_are_in_no_file(file: Path) -> None:
    assert truth_of(torch.randn(5000)).file is None
    assert truth_of(load_file(file)["w0"].clone()).file is None
    shared = torch.from_file(str(file), shared=True, size=5000, dtype=torch.float32)
    assert truth_of(shared).file is None, "whoever writes to it writes to the file"


def test_a_write_to_one_page_is_seen_there_and_read_from_memory(file: Path) -> None:
    tensors = load_file(file)
    truth, other = truth_of(tensors["w1"]), truth_of(tensors["w2"])
    assert (truth.is_clean(), truth.anonymous_bytes) == (True, 0)
    tensors["w1"].data[2500] = 7.0
    assert not truth.is_clean()
    assert truth.anonymous_bytes == truth.num_bytes
    address = tensors["w1"].data_ptr() + 2500 * 4
    assert may_be_written(address, 4)
    assert not may_be_written(address + PAGE, 4)
    assert torch.equal(read(truth).view(torch.float32), tensors["w1"])
    assert other.is_clean()
    assert torch.equal(
        load_file(file)["w1"][2499:2501], torch.stack([tensors["w1"][2499], load_file(file)["w1"][2500]])
    )


def test_mappings_are_read_once_while_nobody_maps_files(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, reads = Files(), []
    monkeypatch.setattr(truth_module, "private_mappings", lambda: [reads.append(1), private_mappings()][1])
    first = load_file(file)
    with files.reading_once():
        opened = truth_of(first["w0"], files).file
        assert opened is not None
        reads.clear()
        with files.reading_once():
            assert truth_of(first["w1"], files).file is opened
        assert truth_of(first["w2"], files).file is opened
        assert not reads, "also when an inner one has ended"
    kept = []
    for _ in range(2):  # Somebody may have mapped files since.
        kept.append(load_file(file)["w0"])
        found = truth_of(kept[-1], files)
        assert found.file is not None
        assert torch.equal(read(found).view(torch.float32), kept[-1])


def test_after_an_error_mappings_are_read_again(file: Path) -> None:
    files = Files()
    with contextlib.suppress(ZeroDivisionError), files.reading_once():
        truth_of(torch.randn(5000), files)
        raise ZeroDivisionError
    assert truth_of(load_file(file)["w0"], files).file is not None


def test_what_is_added_meanwhile_is_found(file: Path) -> None:
    """As a spill file is, which has no name."""
    files = Files()
    with files.reading_once():
        truth_of(torch.randn(5000), files)
        memory = torch.from_file(str(file), shared=False, size=2 * PAGE, dtype=torch.uint8)
        added = ModelFile("a file without a name", os.open(file, os.O_RDONLY))
        files.add(memory, added)
        truth = truth_of(memory, files)
    assert truth.file is added
    assert bytes(read(truth).numpy()) == file.read_bytes()[: 2 * PAGE]


def test_where_the_kernel_does_not_tell_the_mapping_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.offload.truth.can_see_writes", lambda pid: False)
    tensor = load_file(file)["w0"]
    truth = truth_of(tensor)
    tensor.data[3] = 7.0
    assert not truth.is_clean()
    assert truth.anonymous_bytes == 0, "its pages can be had again from the file"
    assert torch.equal(read(truth).view(torch.float32), tensor)


def test_a_file_that_changes_while_it_is_read_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ModelFile.read

    def disturbed(self: ModelFile, target: memoryview, offset: int) -> None:
        original(self, target, offset)
        with file.open("r+b") as opened:
            opened.write(b"x")

    monkeypatch.setattr(ModelFile, "read", disturbed)
    truth = truth_of(load_file(file)["w0"])
    with pytest.raises(ModelError, match=r"model.safetensors was changed while its weights were in use"):
        read(truth)


def test_a_file_that_was_truncated_before_is_refused_and_its_pages_are_not_touched(file: Path) -> None:
    tensors = load_file(file)
    last = max(tensors.values(), key=torch.Tensor.data_ptr)
    os.truncate(file, file.stat().st_size - 2 * PAGE)
    with pytest.raises(ModelError, match="was truncated after its weights were loaded"):
        truth_of(last)


def test_the_speed_of_a_file_is_measured_if_it_is_large_enough(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(1000))
    assert disk_speed(ModelFile(str(tmp_path / "small"))) is None
    (tmp_path / "large").write_bytes(bytes(2**25))
    speed = disk_speed(ModelFile(str(tmp_path / "large")))
    assert speed is not None
    assert speed > 2**20
