"""Weights begin where in a cache line they did: on a CPU the bits of a product depend on it.

A model that was read from a safetensors file has them at any multiple of eight bytes. Not every processor shows that in
its products, so the addresses are tested as well as the bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from pipelines import tiny_flux_pipeline
from samovar.offload import HostStage, OffloadConfig, apply_offload
from samovar.offload.host import HostMemory
from samovar.offload.weight_groups import WeightGroup
from samovar.offload.weights import ALIGNMENT, LEAST_PIECE, LINE, tensors_of

from .holding import Holder

CASES = {case.model: case for case in zoo.load() if not case.variant and case.model in zoo.exported_classes()}
FEW = ["FluxTransformer2DModel", "HunyuanDiT2DModel", "Krea2Transformer2DModel", "WanTransformer3DModel"]
FEW = [name for name in FEW if name in CASES]
MODES = ["layerwise", "model", "auto"]
"""The last has all the room there is: everything goes to the device and stays."""


class Allocating(HostStage):
    """Puts weights where torch's own allocator would, as a GPU does."""

    keeps_phase = False


def phases(module: torch.nn.Module) -> dict[str, int]:
    """By name, where in a cache line each tensor with anything in it begins."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.data_ptr() % LINE for name, tensor in named if tensor.numel()}


@contextmanager
def watching(module: torch.nn.Module, stage: HostStage) -> Iterator[dict[str, int]]:
    """The same of what lies on the device, as each part of a module is called."""
    found: dict[str, int] = {}

    def look(path: str, part: torch.nn.Module) -> None:
        own = (*part.named_parameters(path, recurse=False), *part.named_buffers(path, recurse=False))
        found.update({name: tensor.data_ptr() % LINE for name, tensor in own if stage.is_here(tensor)})

    hooks = [
        part.register_forward_pre_hook(lambda part, _, path=path: look(path, part))
        for path, part in module.named_modules()
        if not any(part.children())
    ]
    yield found
    for hook in hooks:
        hook.remove()


def read(case: zoo.Case, folder: Path) -> torch.nn.Module:
    """A model from a file."""
    model: Any = case.build()
    if not hasattr(model, "save_pretrained"):
        pytest.skip("it cannot be saved")
    model.save_pretrained(folder)
    loaded: torch.nn.Module = type(model).from_pretrained(folder)
    return loaded


def check_bits(case: zoo.Case, folder: Path, mode: Any) -> None:
    model = read(case, folder)
    bare, before, stage = case.run(model, 1), phases(model), HostStage()
    # Somebody must be there to take turns with.
    whole = Holder(transformer=model, text_encoder=torch.nn.Linear(2, 2)) if mode == "model" else model
    offloaded = apply_offload(whole, OffloadConfig(mode), stage=stage)
    with watching(model, stage) as found:
        assert zoo.equal(case.run(model, 1), bare)
    assert found
    assert found == {name: before[name] for name in found}
    offloaded.detach()
    assert phases(model) == before
    assert zoo.equal(case.run(model, 1), bare)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FEW)
def test_a_model_from_a_file_has_the_bits_of_the_bare_one(name: str, mode: str, tmp_path: Path) -> None:
    check_bits(CASES[name], tmp_path, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(CASES.keys() - set(FEW)))
def test_every_model_from_a_file_has_the_bits_of_the_bare_one(name: str, mode: str, tmp_path: Path) -> None:
    check_bits(CASES[name], tmp_path, mode)


def test_a_file_leaves_weights_off_the_start_of_a_line(tmp_path: Path) -> None:
    """Or nothing above would be tested."""
    assert len(set(phases(read(CASES["FluxTransformer2DModel"], tmp_path)).values())) > 1


@pytest.mark.parametrize("stage", [HostStage, Allocating])
@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_from_a_folder_is_given_back_as_it_was(tmp_path: Path, mode: Any, stage: type[HostStage]) -> None:
    from diffusers import FluxPipeline

    tiny_flux_pipeline().save_pretrained(tmp_path)
    pipe = FluxPipeline.from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}

    def draw() -> torch.Tensor:
        seed = torch.Generator().manual_seed(0)
        call = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 8, "output_type": "pt"}
        image: torch.Tensor = pipe("a cat", generator=seed, return_dict=False, **call)[0]
        return image

    bare, before = draw(), {name: phases(part) for name, part in modules.items()}
    offloaded = apply_offload(pipe, OffloadConfig(mode), stage=stage())
    image = draw()
    assert stage is Allocating or torch.equal(image, bare)
    offloaded.detach()
    assert {name: phases(part) for name, part in modules.items()} == before
    assert torch.equal(draw(), bare)


# ------------------------------------------------------------------------------------------------ groups


class Shifted(torch.nn.Module):
    """Small and large tensors, and two that overlap, none at the start of a line."""

    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Parameter(shifted(torch.arange(5.0), 8))
        self.large = torch.nn.Parameter(shifted(torch.arange(LEAST_PIECE / 4 + 7), 36))
        self.whole = torch.nn.Parameter(shifted(torch.arange(40.0), 12))
        self.part = torch.nn.Parameter(self.whole.data[8:].view(4, 8).t())
        self.other = torch.nn.Parameter(shifted(torch.arange(LEAST_PIECE / 2).to(torch.bfloat16), 62))
        self.register_buffer("empty", torch.zeros(0, 3))


def shifted(tensor: torch.Tensor, phase: int) -> torch.Tensor:
    memory = torch.empty(tensor.numel() * tensor.element_size() + 2 * LINE, dtype=torch.uint8)
    start = -memory.data_ptr() % LINE + phase
    return memory[start:][: tensor.numel() * tensor.element_size()].view(tensor.dtype).copy_(tensor)


def group_of(module: torch.nn.Module, stage: HostStage) -> WeightGroup:
    return WeightGroup("shifted", lambda: tensors_of(module), stage, HostMemory(stage, None))


@pytest.mark.parametrize("lazy", [False, True])
def test_phases_on_the_host_on_the_device_and_back(lazy: bool) -> None:
    module, stage = Shifted(), HostStage(lazy=lazy)
    before, content = phases(module), [tensor.detach().clone() for tensor in tensors_of(module)]
    group = group_of(module, stage)
    for step in (group.prepare, group.load, group.unload, group.restore):
        step()
        stage.compute_waits(stage.mark_copied())
        assert phases(module) == before
        assert all(map(torch.equal, tensors_of(module), content))
        assert module.part.data_ptr() == module.whole.data_ptr() + 32


def test_in_a_ring_too() -> None:
    module, stage = Shifted(), HostStage()
    before, content = phases(module), [tensor.detach().clone() for tensor in tensors_of(module)]
    group = group_of(module, stage)
    group.prepare()
    memory = stage.allocate(sum(group.pieces) + ALIGNMENT)
    offsets = [ALIGNMENT + sum(group.pieces[:piece]) for piece in range(len(group.pieces))]
    for piece, offset in enumerate(offsets):
        group.send(piece, memory, offset)
    group.use_device(offsets, memory)
    assert phases(module) == before
    assert all(map(torch.equal, tensors_of(module), content))


def test_a_device_that_allocates_has_them_at_its_own_alignment() -> None:
    module, stage = Shifted(), Allocating()
    before, content = phases(module), [tensor.detach().clone() for tensor in tensors_of(module)]
    group = group_of(module, stage)
    group.prepare()
    large = phases(module)["large"]
    group.load()
    assert not any(tensor.data_ptr() % ALIGNMENT for tensor in (module.small, module.large, module.whole, module.other))
    assert all(map(torch.equal, tensors_of(module), content))
    group.unload()
    place = module.large.data_ptr()
    group.restore()
    assert phases(module) == before
    assert (large, module.large.data_ptr()) == (before["large"], place), "large weights need not move again"
    assert all(map(torch.equal, tensors_of(module), content))
    assert module.part.data_ptr() == module.whole.data_ptr() + 32


@pytest.mark.parametrize("stage", [HostStage, Allocating])
def test_resident_weights_come_back_in_phase_and_still_overlap(stage: type[HostStage]) -> None:
    module = Shifted()
    before, content = phases(module), [tensor.detach().clone() for tensor in tensors_of(module)]
    group = group_of(module, stage())
    group.keeps_host = False
    group.prepare()
    group.load()
    group.unload()
    assert phases(module) == before
    assert all(map(torch.equal, tensors_of(module), content))
    assert module.part.data_ptr() == module.whole.data_ptr() + 32


def test_other_weights_since_keep_the_phase_that_they_came_with() -> None:
    module, stage = Shifted(), Allocating()
    group = group_of(module, stage)
    group.prepare()
    group.load()
    module.small.data = shifted(torch.arange(3.0), 20)
    group.keep_changes()
    group.unload()
    group.prepare()
    group.restore()
    assert phases(module)["small"] == 20
    assert torch.equal(module.small, torch.arange(3.0))
    module.small.data = torch.arange(4.0)
    place = module.small.data_ptr()
    group.restore()
    assert module.small.data_ptr() == place, "what is not ours any more is left alone"


def test_the_host_has_little_more_than_the_weights() -> None:
    module, stage = Shifted(), HostStage()
    group = group_of(module, stage)
    group.prepare()
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(module) if tensor is not module.part)
    chunks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in module.parameters()}
    assert weights <= sum(chunks.values()) <= weights + 3 * 4096
