"""The host in the part of a device: real copies, spoiled when given back, and waiting that matters."""

from __future__ import annotations

import pytest
import torch

from samovar.offload import HostStage


def filled(count: int, value: int = 7) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def test_lazy_copies_arrive_when_computing_waits_for_them_and_eager_ones_at_once() -> None:
    for lazy in (True, False):
        stage = HostStage(lazy=lazy)
        buffer = stage.allocate(20)
        stage.send(buffer, 0, filled(10))
        mark = stage.mark_copied()
        stage.send(buffer, 10, filled(10))
        assert buffer.flat[0] == (255 if lazy else 7)
        stage.compute_waits(mark)
        assert buffer.flat[9] == 7
        assert buffer.flat[10] == (255 if lazy else 7)
        stage.synchronize()
        assert torch.equal(buffer.flat, filled(20))
        assert stage.stats.sent_bytes == 20


def test_memory_that_is_given_back_is_spoiled_and_counted() -> None:
    stage = HostStage(capacity=100)
    one, other = stage.allocate(60), stage.allocate(40)
    with pytest.raises(torch.OutOfMemoryError, match="1 bytes do not fit: 100 of 100 are taken"):
        stage.allocate(1)
    weight = one.view(torch.zeros(4), 0)
    stage.send(one, 0, filled(16, 0))
    stage.compute_waits(stage.mark_copied())
    assert torch.equal(weight, torch.zeros(4))
    assert stage.is_here(weight)
    stage.free(one)
    assert weight.isnan().all()
    assert not stage.is_here(weight)
    assert stage.is_here(other.flat)
    assert (stage.stats.held_bytes, stage.stats.peak_held_bytes, stage.free_bytes()) == (40, 100, 60)


def test_the_clock_takes_the_time_of_the_bus() -> None:
    stage = HostStage(bus_bytes_s=5.0)
    buffer = stage.allocate(20)
    stage.send(buffer, 0, filled(20))
    stage.compute_waits(stage.mark_copied())
    assert stage.timeline.computed_s == 4.0
    assert stage.measure_bus() == 5.0
    start = stage.mark_time()
    stage.timeline.compute(1.5)
    assert stage.seconds_between(start, stage.mark_time()) == 1.5
