"""The host copy: pinned once within a limit, read from model files as they are in memory, within a second budget."""

from __future__ import annotations

import gc
import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.core.errors import ModelError, SettingError
from samovar.offload import HostStage, OffloadConfig, WeightUse, files, plan_offload, plan_tiers, read_sizes, uses_of
from samovar.offload.files import Files, ModelFile, Source, Unpinned
from samovar.offload.host_tiers import NUM_BUFFERS, Crossing
from samovar.offload.layout import MIN_PIECE, lay_out, spans_of
from samovar.offload.pinned import HostMemory, host_limit, new_chunk

PAGE, PAGES = mmap.PAGESIZE, 16
GIB = 2**30


# ------------------------------------------------------------------------------------------------ pinned memory


def taken_in(host: HostMemory, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [host.take_in(piece) for piece in lay_out(spans_of(tensors), in_phase=True)]


def test_small_weights_move_together_and_large_ones_to_pages_of_their_own_once() -> None:
    """malloc may put others on either end of any weight, and shared pages must not be pinned."""
    big, small, other = torch.full((MIN_PIECE // 4 + 5,), 1.0), torch.arange(5.0), torch.arange(7.0)
    stage = HostStage()
    host = HostMemory(stage)
    for _ in range(2):
        pieces = taken_in(host, [big, small, other])
        assert {small.data_ptr(), other.data_ptr()} == {pieces[0].data_ptr(), pieces[0].data_ptr() + 512}
        assert [small.untyped_storage().nbytes(), other.untyped_storage().nbytes()] == [20, 28], (
            "what torch.save writes"
        )
        assert pieces[1].data_ptr() == big.data_ptr()
        assert bool((big == 1.0).all())
        assert torch.equal(small, torch.arange(5.0))
    assert stage.stats.copied_bytes == big.nbytes + 2 * 48
    host.pin(pieces)
    host.close()
    place = big.data_ptr()
    taken_in(HostMemory(stage), [big])
    assert big.data_ptr() == place, "the next offload finds it where it is"


def test_a_chunk_is_pinned_once_within_the_limit_and_unpinned_before_it_is_freed() -> None:
    stage = HostStage()
    host = HostMemory(stage, limit_bytes=6 * PAGE)
    shared, other = new_chunk(5 * PAGE - 7), new_chunk(PAGE)
    for _ in range(2):
        host.pin([shared[PAGE + 3 :], shared[:7], other])
    assert stage.registered == {shared.data_ptr(): 5 * PAGE, other.data_ptr(): PAGE}
    with pytest.warns(UserWarning, match=r"could not be pinned: host_memory allows 24.00 KiB.*three times"):
        host.pin([new_chunk(20 * PAGE)])
    assert (stage.stats.pinned_bytes, stage.stats.pageable_bytes) == (6 * PAGE, 20 * PAGE)
    host.release([other])
    assert stage.stats.pinned_bytes == 5 * PAGE
    del host, shared
    gc.collect()
    assert not stage.registered


def test_a_failure_to_pin_warns_and_does_no_harm() -> None:
    class Refusing(HostStage):
        def register(self, address: int, num_bytes: int) -> str | None:
            return "the range is registered already"

    host = HostMemory(Refusing())
    with pytest.warns(UserWarning, match="the range is registered already"):
        host.pin([new_chunk(2 * PAGE)])
    assert host._stage.stats.pinned_bytes == 0


def test_the_limit_is_that_of_the_control_group_if_it_is_less(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  8388608 kB\nMemFree: 1 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for text, limit in (("max\n", 8 * GIB), ("1073741824\n", GIB)):
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(text)
        assert host_limit(tmp_path) == limit
    assert host_limit(tmp_path / "nowhere") is None


# ------------------------------------------------------------------------------------------------ model files


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


def test_a_weight_is_read_through_the_mapping_of_its_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SLICE", 5000)
    weight = load_file(path)["weight"]
    source = found(weight)
    assert source.file is not None
    assert source.file.path == str(path)
    assert source.memory.data_ptr() == weight.data_ptr()
    assert found(weight.clone()).file is None, "what is in memory alone"
    weight.data[7] = -1.0  # What was written counts, though torch has not counted it.
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


# ------------------------------------------------------------------------------------------------ the second budget


def groups(count: int, crossing: Crossing = "forward", *, size: int = GIB, anonymous: int = 0) -> list[WeightUse]:
    return [WeightUse((crossing, str(index)), size, crossing, anonymous) for index in range(count)]


def test_without_a_budget_nothing_is_refused_and_most_of_the_host_may_be_pinned() -> None:
    plan = plan_tiers([*groups(3), *groups(2, "run", anonymous=GIB)], None)
    assert set(plan.tiers.values()) == {"pinned"}
    assert (plan.held_bytes, plan.buffer_bytes) == (5 * GIB, 0)
    plan = plan_tiers([*groups(6), *groups(6, "run", anonymous=GIB)], None, host_bytes=10 * GIB)
    assert [plan.bytes_in("pinned", "forward"), plan.bytes_in("pinned", "run")] == [2 * GIB, 6 * GIB]
    plan = plan_tiers(groups(12, anonymous=GIB), None, host_bytes=10 * GIB)
    assert [plan.bytes_in("pinned"), plan.bytes_in("pageable")] == [8 * GIB, 4 * GIB], "what is in memory stays there"


def test_what_is_sent_most_often_is_pinned_first() -> None:
    plan = plan_tiers([*groups(4, "run"), *groups(4, "once"), *groups(4)], 6 * GIB)
    assert plan.bytes_in("pinned", "forward") == 4 * GIB
    assert plan.bytes_in("pinned", "run") == GIB, "the buffers take a part of the sixth"
    assert plan.bytes_in("disk", "once") == 4 * GIB
    assert plan.held_bytes == 5 * GIB + NUM_BUFFERS * plan.buffer_bytes <= 6 * GIB


@pytest.mark.parametrize("host_memory", [None, 4 * GIB, GIB])
def test_what_is_sent_ahead_of_many_runs_is_not_pinned(host_memory: int | None) -> None:
    (ahead,) = groups(1, "ahead")
    assert plan_tiers([*groups(2), ahead], host_memory).tier(ahead.key) == "disk"


def test_what_no_file_holds_must_fit_and_so_must_the_buffers() -> None:
    some = [*groups(2, anonymous=GIB), *groups(4, "run")]
    with pytest.raises(SettingError, match=r"=1.00 GiB is not enough: at least 2.19 GiB.*dtype of its files") as e:
        plan_tiers(some, GIB)
    assert e.value.param == "host_memory"
    held = plan_tiers(some, 3 * GIB)
    assert [held.tier(("forward", "0")), held.tier(("run", "0"))] == ["pinned", "disk"]
    with pytest.raises(SettingError, match=r"at least 12.00 KiB is needed, 0 B for weights.*12.00 KiB for buffers"):
        plan_tiers(groups(2), 1000)


def test_any_mixture_stays_within_the_budget() -> None:
    rng = random.Random(0)
    for _ in range(300):
        some = []
        for index in range(rng.randint(1, 12)):
            size = rng.randint(1, 2**20)
            anonymous = rng.choice([0, size, rng.randint(0, size)])
            some.append(WeightUse(("a", str(index)), size, rng.choice(["forward", "run", "once"]), anonymous))
        budget = rng.randint(2**14, 2**23)
        try:
            plan = plan_tiers(some, budget, host_bytes=rng.choice([None, 2**22]))
        except SettingError:
            assert sum(group.anonymous_bytes for group in some) > budget - 3 * 2**19
            continue
        assert plan.held_bytes <= budget
        assert plan.tiers.keys() == {group.key for group in some}
        assert sum(part.num_bytes for part in plan.parts) == sum(group.num_bytes for group in some)


def test_a_model_of_38_gib_within_16_says_what_the_disk_allows() -> None:
    sizes = read_sizes("QwenImageTransformer2DModel")
    plan = plan_offload(sizes, OffloadConfig(gpu_memory="12GiB", device="cpu"))
    tiers = plan_tiers(uses_of(sizes, plan), 16 * GIB)
    assert tiers.held_bytes <= 16 * GIB
    read = tiers.bytes_in("disk", "forward")
    streamed = [block.num_bytes for block in sizes[0].blocks if block.path in plan.component("transformer").streamed]
    assert read + tiers.bytes_in("pinned", "forward") == sum(streamed)
    assert f"are read from disk in every forward: about {read / 2e9:.3g} s at 2.0 GB/s (assumed)" in str(tiers)
    assert tiers.to_dict()["read_seconds_per_forward"] == pytest.approx(read / 2e9)


def test_what_crosses_compressed_takes_less_pinned_memory_beside_the_weights_themselves() -> None:
    in_files = [WeightUse(("a", str(index)), GIB, "forward", 0, GIB * 3 // 4) for index in range(8)]
    plan = plan_tiers(in_files, 6 * GIB)
    assert (plan.bytes_in("pinned"), plan.held_bytes) == (8 * GIB, 6 * GIB)
    assert "8.00 GiB pinned as 6.00 GiB, compressed, sent in every forward" in str(plan)
    in_memory = [use._replace(anonymous_bytes=GIB) for use in in_files]
    with pytest.raises(SettingError, match=r"at least 8.19 GiB"):
        plan_tiers(in_memory, 8 * GIB)
    plan = plan_tiers(in_memory, 10 * GIB)
    assert (plan.bytes_in("pinned"), len(plan.coded)) == (8 * GIB, 2), "there is room for two compressed copies"
    assert plan.held_bytes <= 10 * GIB
