"""Weights that are in no file get one: the same bytes, in phase, private, and nothing is left over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from samovar.core.errors import SettingError
from samovar.offload.host import flat_bytes
from samovar.offload.spill import spill
from samovar.offload.weights import Span, spans_of


def spans(*tensors: torch.Tensor) -> list[tuple[Span, torch.Tensor]]:
    return [(span, flat_bytes(span)) for span in spans_of(tensors)]


def test_the_same_bytes_are_mapped_in_phase_and_writes_stay_private(tmp_path: Path) -> None:
    memory = torch.arange(10_000, dtype=torch.float32)
    pairs = spans(memory[3:5000], memory[5001:], torch.zeros(0), torch.tensor([float("nan"), -0.0]))
    descriptor, copies = spill(pairs, tmp_path)
    for (span, before), copy in zip(pairs, copies, strict=True):
        assert torch.equal(copy, before)
        assert copy.data_ptr() % 64 == span.phase or not span.num_bytes
        assert copy.data_ptr() != before.data_ptr() or not span.num_bytes
    large = max(copies, key=torch.Tensor.numel)
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    large.fill_(7)
    assert os.pread(descriptor, len(content), 0) == content
    assert not list(tmp_path.iterdir())
    os.close(descriptor)


def test_a_folder_that_takes_nothing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"39.06 KiB of weights could not be written to spill_folder='.*gone'") as e:
        spill(spans(torch.zeros(10_000)), tmp_path / "gone")
    assert e.value.param == "spill_folder"
