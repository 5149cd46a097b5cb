"""A list of operations is as blind as a graph: it reads where it read, and does what it did."""

from __future__ import annotations

import pytest
import torch

from samovar.graphs.static_inputs import Unsuitable
from simulated import SimulatedRecorder


def test_a_replay_reads_its_inputs_and_overwrites_its_output() -> None:
    given, weight = torch.ones(3), torch.nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
    factor = 3.0
    recording = SimulatedRecorder().record(lambda: ((given * weight).view(3, 1) * factor).squeeze(1))
    output = recording.output
    assert output.tolist() == [6.0] * 3
    given.fill_(2.0)
    factor = 100.0
    recording.replay()
    assert output.tolist() == [12.0] * 3, "a number of Python's is as it was"
    weight.fill_(4.0)
    recording.replay()
    assert output.tolist() == [24.0] * 3, "what is written into a weight is seen"
    weight.data = torch.zeros(3)
    recording.replay()
    assert output.tolist() == [24.0] * 3, "other memory of it is not"


def test_in_place_operations_are_done_again() -> None:
    given = torch.ones(2)
    recording = SimulatedRecorder().record(lambda: torch.zeros(2).add_(given).mul_(2))
    given.fill_(5.0)
    for _ in range(2):
        recording.replay()
    assert recording.output.tolist() == [10.0] * 2


def test_a_failure_is_told() -> None:
    def fails() -> None:
        raise ValueError("nothing\nmore")

    with pytest.raises(Unsuitable, match=r"capturing it failed \(ValueError: nothing\)$"):
        SimulatedRecorder().record(fails)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SimulatedRecorder().record(interrupted)
