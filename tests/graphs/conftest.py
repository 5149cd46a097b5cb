"""On a CPU a list of operations stands for a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from samovar.graphs.recorders import recording_by
from simulated_graphs import SimulatedRecorder


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with recording_by(SimulatedRecorder(), torch.device("cpu")):
        yield
