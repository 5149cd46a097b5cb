"""Through buffers: in order with everything else, each buffer used again only when it was read, and no error lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar.core.errors import ModelError
from samovar.offload import HostStage
from samovar.offload.staging import Buffer
from samovar.offload.truth import Bounced, Truth


class Held(Truth):
    """Bytes that cannot be read before a gate opens."""

    gate: threading.Event

    def read(self, start: int, target: torch.Tensor) -> None:
        assert self.gate.wait(10)
        super().read(start, target)


def bounced(num_bytes: int, value: int, gate: threading.Event | None = None) -> Bounced:
    memory = torch.full((num_bytes,), value, dtype=torch.uint8)
    truth = Truth(memory) if gate is None else Held(memory)
    if gate is not None:
        object.__setattr__(truth, "gate", gate)
    return Bounced(num_bytes, ((0, truth),))


def stage_with_buffers(*, lazy: bool, num_bytes: int = 100, count: int = 2) -> HostStage:
    stage = HostStage(lazy=lazy)
    stage.bounce_through([torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(count)])
    return stage


def values(buffer: Buffer, *places: int) -> list[int]:
    return [int(buffer.flat[place]) for place in places]


@pytest.mark.parametrize("lazy", [False, True])
def test_many_pieces_through_two_buffers(lazy: bool) -> None:
    stage = stage_with_buffers(lazy=lazy)
    buffer = stage.allocate(10_000)
    content = torch.randint(256, (10_000,), dtype=torch.uint8)
    stage.send(buffer, 0, Bounced(10_000, ((0, Truth(content)),)))
    stage.compute_waits(stage.mark_copied())
    assert torch.equal(buffer.flat[:10_000], content)
    assert stage.stats.sent_bytes == 10_000


@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_read_first_does_not_overtake_nor_is_overtaken(lazy: bool) -> None:
    """Copies to one place, every other one from pinned memory: the last one stays."""
    gate, stage = threading.Event(), stage_with_buffers(lazy=lazy)
    buffer = stage.allocate(100)
    marks = []
    pinned = [torch.full((100,), value, dtype=torch.uint8) for value in (2, 4)]
    sources: list[Any] = [bounced(100, 1, gate), pinned[0], bounced(100, 3), pinned[1]]
    for source in sources:
        stage.send(buffer, 0, source)
        marks.append(stage.mark_copied())
    threading.Timer(0.1, gate.set).start()
    stage.compute_waits(marks[0])
    if lazy:
        assert values(buffer, 0, 99) == [1, 1]
    stage.compute_waits(marks[3])
    assert values(buffer, 0, 99) == [4, 4]


def test_a_lazy_device_has_copied_nothing_that_nobody_waited_for() -> None:
    stage = stage_with_buffers(lazy=True, count=4)
    buffer = stage.allocate(100)
    buffer.flat.fill_(9)
    stage.send(buffer, 0, bounced(50, 1))
    first = stage.mark_copied()
    stage.send(buffer, 50, bounced(50, 2))
    second = stage.mark_copied()
    stage.compute_waits(first)
    assert values(buffer, 49, 50) == [1, 9]
    stage.compute_waits(second)
    assert values(buffer, 49, 50) == [1, 2]


def test_the_host_does_not_wait_to_send() -> None:
    gate, stage = threading.Event(), stage_with_buffers(lazy=False)
    buffer = stage.allocate(1000)
    stage.send(buffer, 0, bounced(1000, 1, gate))
    stage.copies_wait(stage.mark_computed())
    mark = stage.mark_copied()
    assert values(buffer, 0) != [1], "nothing was read, and we are here"
    gate.set()
    stage.compute_waits(mark)
    assert values(buffer, 0, 999) == [1, 1]


def test_memory_that_is_freed_is_not_copied_into() -> None:
    """Freed memory belongs to others as soon as `free` returns."""
    gate, stage = threading.Event(), stage_with_buffers(lazy=False)
    buffer = stage.allocate(1000)
    stage.send(buffer, 0, bounced(1000, 1, gate))
    threading.Timer(0.1, gate.set).start()
    stage.free(buffer)
    buffer.flat.fill_(7)
    other = stage.allocate(100)
    stage.send(other, 0, bounced(100, 2))
    stage.compute_waits(stage.mark_copied())
    assert (values(buffer, 0, 500, 999), values(other, 0, 99)) == ([7, 7, 7], [2, 2])


class Broken(Truth):
    def read(self, start: int, target: torch.Tensor) -> None:
        raise ModelError("The file is gone.")


@pytest.mark.parametrize("pause", [lambda stage: None, lambda stage: stage._queue.drain()], ids=["at once", "later"])
def test_an_error_is_raised_before_its_bytes_are_used_also_if_nothing_is_pending(pause: Callable[[Any], None]) -> None:
    stage = stage_with_buffers(lazy=False)
    buffer = stage.allocate(100)
    stage.send(buffer, 0, Bounced(100, ((0, Broken(torch.zeros(100, dtype=torch.uint8))),)))
    pause(stage)
    with pytest.raises(ModelError, match="The file is gone"):
        stage.compute_waits(stage.mark_copied())
    stage.send(buffer, 0, bounced(100, 5))  # It was reported, and the buffers are all there.
    stage.send(buffer, 0, bounced(100, 6))
    stage.compute_waits(stage.mark_copied())
    assert values(buffer, 0) == [6]


def test_an_error_that_concerns_freed_memory_is_nobodys() -> None:
    stage = stage_with_buffers(lazy=False)
    buffer = stage.allocate(100)
    stage.send(buffer, 0, Bounced(100, ((0, Broken(torch.zeros(100, dtype=torch.uint8))),)))
    stage.free(buffer)
    other = stage.allocate(100)
    stage.send(other, 0, bounced(100, 5))
    stage.compute_waits(stage.mark_copied())
    assert values(other, 0) == [5]


def test_a_large_piece_is_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.offload.truth._SLICE", 512)
    stage = stage_with_buffers(lazy=True, num_bytes=3000)
    content = torch.randint(256, (20_000,), dtype=torch.uint8)
    parts = tuple((at, Truth(content[at : at + 999])) for at in range(0, 20_000, 1000))
    buffer = stage.allocate(20_000)
    stage.send(buffer, 0, Bounced(19_999, parts))
    stage.compute_waits(stage.mark_copied())
    for at, truth in parts:
        assert torch.equal(buffer.flat[at : at + 999], truth.memory)
