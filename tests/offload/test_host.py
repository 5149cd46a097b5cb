"""The host copy: in place where that can be, copied where not, pinned once, within a limit, and let go of."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from samovar.offload import HostStage
from samovar.offload.host import HostMemory, host_limit, new_chunk
from samovar.offload.weights import LEAST_PIECE, lay_out, spans_of

PAGE = mmap.PAGESIZE


def adopted(host: HostMemory, tensors: list[torch.Tensor], *, pinned: bool = True) -> list[torch.Tensor]:
    pieces = [host.adopt(piece, "pinned", pinned=pinned) for piece in lay_out(spans_of(tensors), in_phase=True)]
    assert all(isinstance(piece, torch.Tensor) for piece in pieces)
    return pieces  # type: ignore[return-value]


def large(value: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((LEAST_PIECE // 4 + 5,), value))


def with_pages_of_its_own(value: float) -> torch.nn.Parameter:
    num_bytes = LEAST_PIECE + PAGE
    return torch.nn.Parameter(new_chunk(num_bytes).view(torch.float32).fill_(value))


def test_weights_with_pages_of_their_own_stay_and_small_ones_move_together() -> None:
    big, small = with_pages_of_its_own(1.0), torch.nn.Parameter(torch.arange(5.0))
    other = torch.nn.Parameter(torch.arange(7.0))
    before = big.data_ptr()
    host = HostMemory(HostStage(), None)
    pieces = adopted(host, [big, small, other])
    assert big.data_ptr() == before
    assert {small.data_ptr(), other.data_ptr()} == {pieces[0].data_ptr(), pieces[0].data_ptr() + 512}
    assert [small.untyped_storage().nbytes(), other.untyped_storage().nbytes()] == [20, 28]  # What torch.save writes.
    assert torch.equal(small, torch.arange(5.0))
    assert torch.equal(other, torch.arange(7.0))
    assert host._stage.stats.copied_bytes == 12 * 4
    assert pieces[1].data_ptr() == before
    assert bytes(pieces[1].numpy()) == bytes(big.detach().numpy())


@pytest.mark.parametrize("num_bytes", [LEAST_PIECE + 20, 3 * 2**25])
def test_what_may_share_its_pages_is_not_pinned_where_it_lies(num_bytes: int) -> None:
    """Nor is what malloc maps: it may as well come from memory that was freed among others."""
    weight = torch.nn.Parameter(torch.full((num_bytes // 4,), 3.0))
    before = weight.data_ptr()
    host = HostMemory(HostStage(), None)
    adopted(host, [weight])
    assert weight.data_ptr() != before
    assert bool((weight == 3.0).all())
    assert host._stage.stats.copied_bytes == num_bytes
    assert weight.data_ptr() % PAGE == 0


def test_what_is_on_the_host_already_is_not_copied_again() -> None:
    """Not by the same offload, when an adapter has come, and not by the next one."""
    weights, small = [large(1.0), large(2.0)], torch.nn.Parameter(torch.arange(5.0))
    stage = HostStage()
    first = HostMemory(stage, None)
    first.pin(adopted(first, weights))
    copied, places = stage.stats.copied_bytes, [weight.data_ptr() for weight in weights]
    adopted(first, [*weights, small])
    assert stage.stats.copied_bytes == copied + 20
    first.close()
    copied = stage.stats.copied_bytes
    adopted(HostMemory(stage, None), weights)
    assert stage.stats.copied_bytes == copied
    assert [weight.data_ptr() for weight in weights] == places


def test_tensors_that_overlap_still_do_after_they_were_copied() -> None:
    memory = torch.arange(10.0)
    one, other = torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[4:].view(2, 3).t())
    adopted(HostMemory(HostStage(), None), [one, other])
    assert torch.equal(other, torch.tensor([[4.0, 7.0], [5.0, 8.0], [6.0, 9.0]]))
    with torch.no_grad():
        one[5] = -1.0
    assert other[1, 0] == -1.0


def test_a_chunk_is_pinned_once_whoever_shares_it() -> None:
    stage = HostStage()
    host = HostMemory(stage, None)
    shared, other = new_chunk(5 * PAGE - 7), new_chunk(PAGE)
    for _ in range(2):
        host.pin([shared[PAGE + 3 :], shared[:7], other])
    assert stage.registered == {shared.data_ptr(): 5 * PAGE, other.data_ptr(): PAGE}
    assert stage.stats.pinned_bytes == 6 * PAGE
    host.close()
    assert stage.registered == {}


def test_what_may_not_be_pinned_is_used_as_it_is_with_a_warning() -> None:
    stage = HostStage()
    host = HostMemory(stage, limit_bytes=3 * PAGE)
    with pytest.warns(UserWarning, match=r"could not be pinned: host_memory allows 12.00 KiB.*three times"):
        host.pin([new_chunk(PAGE), new_chunk(20 * PAGE)])
    assert (stage.stats.pinned_bytes, stage.stats.pageable_bytes) == (PAGE, 20 * PAGE)


def test_a_failure_to_pin_warns_and_does_no_harm() -> None:
    class Refusing(HostStage):
        def register(self, address: int, num_bytes: int) -> str | None:
            return "the range is registered already"

    host = HostMemory(Refusing(), None)
    with pytest.warns(UserWarning, match="the range is registered already"):
        host.pin([new_chunk(2 * PAGE)])
    assert host._stage.stats.pinned_bytes == 0


def test_memory_is_unpinned_before_it_is_freed() -> None:
    stage = HostStage()
    host = HostMemory(stage, None)
    host.pin([new_chunk(4 * PAGE)])
    assert stage.registered
    del host
    gc.collect()
    assert not stage.registered


def test_the_limit_is_that_of_the_control_group_if_it_is_less(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  8388608 kB\nMemFree: 1 kB\n")
    assert host_limit(tmp_path) == 8 * 2**30
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert host_limit(tmp_path) == 8 * 2**30
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1073741824\n")
    assert host_limit(tmp_path) == 2**30
    assert host_limit(tmp_path / "nowhere") is None
