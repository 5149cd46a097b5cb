"""Which recorder a device has, and that a failed capture on a GPU leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from samovar.graphs import recorders
from samovar.graphs.static_inputs import Unsuitable
from simulated import SimulatedRecorder, recording_by

CPU = torch.device("cpu")


def test_a_cpu_has_none_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(recorders._recorders, CPU)
    assert recorders.recorder_for(CPU) is None
    assert recorders.recorder_for(torch.device("meta")) is None
    with recording_by(one := SimulatedRecorder(), CPU):
        with recording_by(other := SimulatedRecorder(), CPU):
            assert recorders.recorder_for(CPU) is other
        assert recorders.recorder_for(CPU) is one
    assert recorders.recorder_for(CPU) is None


@pytest.mark.gpu
def test_a_failed_capture_leaves_a_working_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = recorders.recorder_for(device)
    assert recorder is not None
    given = torch.ones(4, device=device)
    torch.manual_seed(3)
    expected = torch.randn(4, device=device)
    for fails in (lambda: given.sum().item(), lambda: 1 / 0, lambda: torch.empty(2**50, device=device)):
        with pytest.raises(Unsuitable, match="capturing it failed"):
            recorder.record(fails)
        torch.manual_seed(3)
        assert torch.equal(torch.randn(4, device=device), expected)
        recording = recorder.record(lambda: given * 2)
        recording.replay()
        assert recording.output.tolist() == [2.0] * 4


@pytest.mark.gpu
def test_inputs_are_not_overwritten_while_another_stream_reads_them() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = recorders.recorder_for(device)
    assert recorder is not None
    given = torch.ones(2048, 2048, device=device)
    expected = given @ given @ given
    recording = recorder.record(lambda: given @ given @ given)
    for _ in range(5):
        given.fill_(1.0)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            recorder.take_turn()
            for _ in range(20):
                recording.replay()
            output = recording.output.clone()
        with torch.cuda.stream(torch.cuda.Stream()):
            recorder.take_turn()
            given.fill_(0.0)
        torch.cuda.synchronize()
        assert torch.equal(output, expected)


@pytest.mark.gpu
def test_graphs_share_memory_and_streams_wait() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = recorders.recorder_for(device)
    assert recorder is not None
    given = torch.ones(1024, 1024, device=device)
    assert (given @ given).sum() > 0  # cuBLAS cannot begin in a capture; a forward has run before it is recorded.
    made = [recorder.record(lambda n=n: (given @ given) * n + given) for n in range(4)]  # type: ignore[misc]
    for number, recording in enumerate(made):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            recording.replay()
            output = recording.output.clone()
        stream.synchronize()
        assert torch.equal(output, (given @ given) * number + given)
