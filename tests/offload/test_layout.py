"""Memory under tensors: overlap, pieces, places in cache lines, what is shared, and what cannot be moved.

CPU kernels are chosen by where in a cache line a weight begins. A model that was read from a safetensors file has them
at any multiple of eight bytes. Not every processor shows that in its products, so addresses are tested as well as bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from pipelines import tiny_flux_pipeline
from samovar.core.errors import ModelError
from samovar.offload import HostStage, OffloadConfig, apply_offload
from samovar.offload.device import Buffer
from samovar.offload.layout import (
    ALIGNMENT,
    LINE,
    MIN_PIECE,
    Span,
    check_movable,
    lay_out,
    tensors_of,
)
from samovar.offload.pinned import HostMemory
from samovar.offload.weight_group import WeightGroup

from .holding import CASES, Holder

MODES = ["layerwise", "model", "auto"]
"""The last has all the room there is: everything goes to the device and stays."""
FEW = [name for name in ("FluxTransformer2DModel", "HunyuanDiT2DModel", "WanTransformer3DModel") if name in CASES]


def test_small_spans_are_one_piece_and_large_ones_each_their_own() -> None:
    def laid_out(spans: list[tuple[int, int]], *, in_phase: bool) -> list[tuple[int, int, list[int]]]:
        pieces = lay_out([Span(start, size, ()) for start, size in spans], in_phase=in_phase)
        return [(num_bytes, start, [offset for _, offset in spans]) for num_bytes, start, spans in pieces]

    assert laid_out([(24, size) for size in (10, MIN_PIECE, ALIGNMENT + 1, MIN_PIECE + 1, 0)], in_phase=False) == [
        (4 * ALIGNMENT, 0, [0, ALIGNMENT, 3 * ALIGNMENT]),
        (MIN_PIECE, 0, [0]),
        (MIN_PIECE + ALIGNMENT, 0, [0]),
    ]
    assert laid_out([(8, 10), (LINE + 24, MIN_PIECE), (56, ALIGNMENT), (63, MIN_PIECE - 1)], in_phase=True) == [
        (3 * ALIGNMENT + MIN_PIECE + ALIGNMENT, 0, [8, ALIGNMENT + 56, 3 * ALIGNMENT + 63]),
        (MIN_PIECE + ALIGNMENT, 24, [24]),
    ]


class Opaque(torch.Tensor):
    """A tensor that does not say what it is made of."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.zeros(2).as_subclass(cls)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2).as_subclass(Opaque), r"is or holds a .*Opaque"),
        (torch.zeros(2, device="meta"), "is on the meta device"),
        (torch.zeros(2, 2).to_sparse(), "is torch.sparse_coo"),
    ],
)
def test_what_is_not_plain_memory_is_refused_by_name(tensor: torch.Tensor, expected: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_parameter("odd", torch.nn.Parameter(tensor, requires_grad=False))
    with pytest.raises(ModelError, match=rf"transformer\.0\.odd cannot be offloaded: it {expected}"):
        check_movable("transformer", model, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------ groups


class Allocating(HostStage):
    """Puts weights where torch's own allocator would, as a GPU does."""

    keeps_phase = False


def shifted(tensor: torch.Tensor, phase: int) -> torch.Tensor:
    memory = torch.empty(tensor.numel() * tensor.element_size() + 2 * LINE, dtype=torch.uint8)
    start = -memory.data_ptr() % LINE + phase
    return memory[start:][: tensor.numel() * tensor.element_size()].view(tensor.dtype).copy_(tensor)


class Odd(torch.nn.Module):
    """Tied, transposed, overlapping, empty and scalar tensors of several types, at odd places."""

    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Parameter(shifted(torch.arange(5.0), 8))
        self.tied = self.small
        self.large = torch.nn.Parameter(shifted(torch.arange(MIN_PIECE / 4 + 7), 36))
        self.whole = torch.nn.Parameter(shifted(torch.arange(40.0), 12))
        self.part = torch.nn.Parameter(self.whole.data[8:].view(4, 8).t())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scale", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("rotary", torch.tensor([1 + 2j]))


def group_of(module: torch.nn.Module, stage: HostStage) -> WeightGroup:
    return WeightGroup(module, stage, HostMemory(stage))


def phases(module: torch.nn.Module) -> dict[str, int]:
    """By name, where in a cache line each tensor with anything in it begins."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.data_ptr() % LINE for name, tensor in named if tensor.numel()}


def lend(group: WeightGroup, how: str) -> Buffer | None:
    """In memory of its own, or in a ring at odd offsets, which is returned."""
    if how == "own":
        group.load()
        group.lend_own()
        return None
    group.prepare()
    memory = group._stage.allocate(sum(group.pieces) + ALIGNMENT)
    offsets = [ALIGNMENT + sum(group.pieces[:piece]) for piece in range(len(group.pieces))]
    for piece, offset in enumerate(offsets):
        group.send(piece, memory, offset)
    group._stage.compute_waits(group._stage.mark_copied())
    group.lend(offsets, memory)
    return memory


@pytest.mark.parametrize("how", ["own", "ring"])
@pytest.mark.parametrize("stage", [HostStage, Allocating])
@pytest.mark.parametrize("lazy", [False, True])
def test_in_and_out_again(stage: type[HostStage], lazy: bool, how: str) -> None:
    module, device = Odd(), stage(lazy=lazy)
    before, content = phases(module), [tensor.detach().clone() for tensor in tensors_of(module)]
    objects = [*map(id, tensors_of(module))]
    group = group_of(module, device)

    def check() -> None:
        assert [*map(id, tensors_of(module))] == objects
        assert all(map(torch.equal, tensors_of(module), content))
        assert module.part.data_ptr() == module.whole.data_ptr() + 32, "they still overlap"
        assert not any(tensor.is_inference() for tensor in tensors_of(module))

    with torch.inference_mode():
        ring = lend(group, how)
    assert ring is None or device.is_here(ring.flat)
    assert all(device.is_here(tensor) for tensor in tensors_of(module) if tensor.numel())
    check()
    if stage is Allocating:
        assert module.small.data_ptr() % ALIGNMENT == module.large.data_ptr() % ALIGNMENT == 0
    else:
        assert phases(module) == before
    with torch.inference_mode():
        group.give_back()
        group.unload()
    check()
    assert not any(map(device.is_here, tensors_of(module)))
    place = module.large.data_ptr()
    group.restore()
    check()
    assert phases(module) == before
    assert module.large.data_ptr() == place, "large weights need not move again"


@pytest.mark.parametrize("how", ["own", "ring"])
def test_what_a_call_changes_is_kept_and_nothing_else_is_copied(how: str) -> None:
    module, stage = Odd(), HostStage()
    group = group_of(module, stage)
    lend(group, how)
    with torch.no_grad():
        module.large[3] = -1.0
        module.rotary.fill_(float("nan"))
    module.scale.data = torch.tensor(4.5)  # Other data, of another type.
    group.give_back()
    assert (module.large[3], module.scale, bool(module.rotary.isnan().all())) == (-1.0, 4.5, True)
    changes = group.prepare()
    assert not group.is_fresh(), "the copy there is of another time"
    module.small = torch.nn.Parameter(torch.full((5,), 9.0))  # Replaced.
    module.whole.data.mul_(2.0)  # In place, and not counted.
    module.rotary.zero_()
    module.extra = torch.nn.Linear(3, 3)  # New.
    content = [tensor.detach().clone() for tensor in tensors_of(module)]
    assert group.prepare() > changes
    lend(group, how)
    assert all(map(torch.equal, tensors_of(module), content))
    group.unload()
    assert all(map(torch.equal, tensors_of(module), content))


def test_out_of_memory_leaves_it_off() -> None:
    module, stage = Odd(), HostStage(capacity=1000)
    content = [tensor.detach().clone() for tensor in tensors_of(module)]
    with pytest.raises(torch.OutOfMemoryError):
        group_of(module, stage).load()
    assert all(map(torch.equal, tensors_of(module), content))
    assert stage.stats.held_bytes == 0


def test_the_host_has_little_more_than_the_weights() -> None:
    module = Odd()
    group_of(module, HostStage()).prepare()
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(module) if tensor is not module.part)
    chunks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in module.parameters()}
    assert weights - LINE <= sum(chunks.values()) <= weights + 3 * 4096


# ------------------------------------------------------------------------------------------------ models from files


def read(case: zoo.Case, folder: Path) -> torch.nn.Module:
    """A model from a file."""
    model: Any = case.build()
    if not hasattr(model, "save_pretrained"):
        pytest.skip("it cannot be saved")
    model.save_pretrained(folder)
    loaded: torch.nn.Module = type(model).from_pretrained(folder)
    return loaded


def check_bits(case: zoo.Case, folder: Path, mode: Any) -> None:
    model, stage = read(case, folder), HostStage()
    bare, before = case.run(model, 1), phases(model)
    # Somebody must be there to take turns with.
    whole = Holder(transformer=model, text_encoder=torch.nn.Linear(2, 2)) if mode == "model" else model
    offloaded = apply_offload(whole, OffloadConfig(mode), stage=stage)
    found: dict[str, int] = {}
    for path, part in model.named_modules():
        if not any(part.children()):

            def look(part: torch.nn.Module, _: Any, path: str = path) -> None:
                own = (*part.named_parameters(path, recurse=False), *part.named_buffers(path, recurse=False))
                found.update({name: tensor.data_ptr() % LINE for name, tensor in own if stage.is_here(tensor)})

            part.register_forward_pre_hook(look)
    assert zoo.equal(case.run(model, 1), bare)
    assert found
    assert found == {name: before[name] for name in found}
    offloaded.detach()
    assert phases(model) == before
    assert zoo.equal(case.run(model, 1), bare)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FEW)
def test_a_model_from_a_file_has_the_bits_of_the_bare_one(name: str, mode: str, tmp_path: Path) -> None:
    assert len(set(phases(read(CASES[name], tmp_path)).values())) > 1, "a file leaves weights off the start of a line"
    check_bits(CASES[name], tmp_path, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted({case.model for case in CASES.values() if not case.variant} - set(FEW)))
def test_every_model_from_a_file_has_the_bits_of_the_bare_one(name: str, mode: str, tmp_path: Path) -> None:
    check_bits(CASES[name], tmp_path, mode)


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
    assert torch.equal(draw(), bare) or stage is Allocating
    offloaded.detach()
    assert {name: phases(part) for name, part in modules.items()} == before
    assert torch.equal(draw(), bare)
