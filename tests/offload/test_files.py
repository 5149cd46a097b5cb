"""Weights in model files: found by their mapping, read as they are in memory, refused when the file has changed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.core.errors import ModelError
from samovar.offload import files
from samovar.offload.files import Files, ModelFile, Source, Unpinned
from samovar.offload.weights import spans_of

PAGES = 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"weight": torch.arange(PAGES * 1024, dtype=torch.float32)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def found(weight: torch.Tensor) -> Source:
    (span,) = spans_of([weight])
    return Files().find(span)


def read(source: Source, start: int = 0, num_bytes: int | None = None) -> torch.Tensor:
    target = torch.empty(source.num_bytes if num_bytes is None else num_bytes, dtype=torch.uint8)
    with ThreadPoolExecutor(2) as threads:
        Unpinned(source.num_bytes, ((0, source),)).read(start, target, threads)
    return target


def test_a_weight_is_found_in_its_file_and_what_is_in_memory_alone_is_not(path: Path) -> None:
    weight = load_file(path)["weight"]
    source = found(weight)
    assert source.file is not None
    assert source.file.path == str(path)
    assert path.read_bytes()[source.offset :][: source.num_bytes] == weight.numpy().tobytes()
    assert found(weight.clone()).file is None


def test_what_was_written_counts_and_not_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SLICE", 5000)
    weight = load_file(path)["weight"]
    source = found(weight)
    weight.data[7] = -1.0  # Not counted by torch.
    assert torch.equal(read(source).view(torch.float32), weight)
    assert torch.equal(read(source, 12, 8000).view(torch.float32), weight[3:2003])
    assert torch.equal(load_file(path)["weight"], torch.arange(PAGES * 1024.0)), "the file is as it was"


@pytest.mark.parametrize("damage", ["changed", "truncated"])
def test_a_file_that_has_changed_is_refused(path: Path, damage: str) -> None:
    source = found(load_file(path)["weight"])
    if damage == "truncated":
        os.truncate(path, 4096)
    else:
        path.write_bytes(bytes(path.stat().st_size))
        os.utime(path, ns=(0, 0))
    with pytest.raises(ModelError, match=rf"model.safetensors was {damage} while its weights were in use"):
        read(source)


def test_pages_that_go_between_two_looks_are_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To touch them would kill the process, so the kernel is asked."""
    source = found(load_file(path)["weight"])
    monkeypatch.setattr(ModelFile, "check", lambda self: None)
    monkeypatch.setattr(files.ctypes, "memmove", lambda *_: pytest.skip("the kernel may not be asked here"))
    os.truncate(path, 4096)
    with pytest.raises(ModelError, match=r"could not be read from .*model.safetensors"):
        read(source)
