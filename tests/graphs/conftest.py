"""On a CPU a list of operations stands for a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from simulated import SimulatedRecorder, recording_by


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with recording_by(SimulatedRecorder(), torch.device("cpu")):
        yield
