"""Weight groups: the objects stay, their data is swapped, and what the model holds now is what counts."""

from __future__ import annotations

import pytest
import torch

from samovar.offload import HostStage
from samovar.offload.host import HostMemory
from samovar.offload.weight_groups import WeightGroup
from samovar.offload.weights import tensors_of


class Odd(torch.nn.Module):
    """Tied, transposed, overlapping, empty and scalar tensors of several types."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.arange(12.0)
        self.one = torch.nn.Parameter(memory[:8].view(2, 4).t())
        self.other = torch.nn.Parameter(memory[6:])
        self.tied = self.one
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scale", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("rotary", torch.tensor([1 + 2j]))
        self.big = torch.nn.Parameter(torch.randn(600, 500))


def group_of(module: torch.nn.Module, stage: HostStage) -> WeightGroup:
    return WeightGroup("odd", lambda: tensors_of(module), stage, HostMemory(stage, None))


def content(module: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors_of(module)]


def same(module: torch.nn.Module, before: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(tensor, old) and tensor.stride() == old.stride()
        for tensor, old in zip(tensors_of(module), before, strict=True)
    )


@pytest.mark.parametrize("lazy", [False, True])
def test_in_and_out_again(lazy: bool) -> None:
    module, stage = Odd(), HostStage(lazy=lazy)
    before, objects = content(module), [*map(id, tensors_of(module))]
    group = group_of(module, stage)
    group.prepare()
    assert same(module, before)
    host = [tensor.data_ptr() for tensor in tensors_of(module)]
    group.load()
    stage.compute_waits(stage.mark_copied())
    assert same(module, before)
    assert all(stage.is_here(tensor) for tensor in tensors_of(module))
    assert module.other.data_ptr() == module.one.data_ptr() + 24  # They still overlap.
    assert stage.stats.held_bytes == sum(group.pieces)
    assert 0 <= sum(group.pieces) - stage.stats.sent_bytes < 512
    group.unload()
    assert [tensor.data_ptr() for tensor in tensors_of(module)] == host
    assert [*map(id, tensors_of(module))] == objects
    assert same(module, before)
    assert stage.stats.held_bytes == 0


def test_nothing_is_copied_back_unless_it_changed_and_is_asked_for() -> None:
    module, stage = Odd(), HostStage()
    before = content(module)
    group = group_of(module, stage)
    for keep_changes in (False, True):
        group.prepare()
        group.load()
        module.big.data += 1.0
        module.rotary.data.fill_(float("nan"))
        if keep_changes:
            group.keep_changes()
        group.unload()
        if not keep_changes:
            assert same(module, before)
    assert torch.equal(module.big, before[[id(t) for t in tensors_of(module)].index(id(module.big))] + 1.0)
    assert module.rotary.isnan().all()


def test_changes_on_the_host_are_what_is_sent() -> None:
    module, stage = Odd(), HostStage()
    group = group_of(module, stage)
    group.prepare()
    module.big.data.mul_(2.0)  # In place.
    module.other = torch.nn.Parameter(torch.full((5,), 9.0))  # Replaced.
    module.scale.data = torch.tensor(4.5)  # Other data, of another type.
    module.extra = torch.nn.Linear(3, 3)  # New.
    before = content(module)
    assert not group.is_current()
    group.prepare()
    group.load()
    assert same(module, before)
    assert all(stage.is_here(tensor) for tensor in tensors_of(module))
    group.unload()
    assert same(module, before)


def test_what_others_put_in_its_place_while_it_is_in_counts() -> None:
    module, stage = Odd(), HostStage()
    group = group_of(module, stage)
    group.prepare()
    group.load()
    del module.rotary  # Complex, so that it would warn.
    module.to(torch.float64)  # Replaces the data of what floats.
    before = content(module)
    assert not group.is_current()
    group.unload()
    assert same(module, before)
    group.prepare()
    group.load()
    assert same(module, before)
    assert all(stage.is_here(tensor) for tensor in tensors_of(module))


def test_resident_weights_are_on_the_device_alone() -> None:
    module, stage = Odd(), HostStage()
    before = content(module)
    group = group_of(module, stage)
    group.keeps_host = False
    group.prepare()
    group.load()
    assert all(stage.is_here(tensor) for tensor in tensors_of(module))
    assert (group.sources, stage.stats.pinned_bytes) == ([], 0)
    assert group.is_current()
    module.big.data = module.big.data.clone()  # Somebody moved it off.
    assert not group.is_current()
    module.rotary.data += 1.0
    group.unload()
    index = [id(t) for t in tensors_of(module)].index(id(module.rotary))
    assert torch.equal(module.rotary, before[index] + 1.0)
    assert not any(stage.is_here(tensor) for tensor in tensors_of(module))
    assert stage.stats.held_bytes == 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_nothing_becomes_an_inference_tensor_on_the_way(is_streamed: bool) -> None:
    module, stage = Odd(), HostStage()
    group = group_of(module, stage)
    with torch.inference_mode():
        group.prepare()
        assert not any(tensor.is_inference() for tensor in tensors_of(module))
        if is_streamed:
            group.use_device([sum(group.pieces[:piece]) for piece in range(2)], stage.allocate(sum(group.pieces)))
        else:
            group.load()
        assert all(map(stage.is_here, tensors_of(module)))
        assert not any(tensor.is_inference() for tensor in tensors_of(module))
        group.use_host()
        group.keep_changes()
        group.unload()
    assert not any(tensor.is_inference() for tensor in tensors_of(module))


def test_out_of_memory_leaves_it_off() -> None:
    module, stage = Odd(), HostStage(capacity=1000)
    before = content(module)
    group = group_of(module, stage)
    group.prepare()
    with pytest.raises(torch.OutOfMemoryError):
        group.load()
    assert same(module, before)
    assert stage.stats.held_bytes == 0
