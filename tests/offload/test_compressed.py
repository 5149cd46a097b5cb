"""Weights that cross the bus compressed: the same bits as without, also after every kind of change, within the memory
that is counted.

Tiny models have tiny weights, so these tests compress what is too small to be worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipelines import PIPELINES
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload, coding
from samovar.offload.pinned import new_chunk

from .test_never_lost import EDITS


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "TILE", 32)
    monkeypatch.setattr("samovar.offload.layout.MIN_PIECE", 2**9)


def offload(pipe: Any, *, lazy: bool = True, **config: Any) -> Offloaded:
    config = {"mode": "layerwise", "compress": "lossless", **config}
    return apply_offload(pipe, OffloadConfig(**config), stage=HostStage(lazy=lazy))


def tiny(name: str = "flux", dtype: torch.dtype = torch.bfloat16) -> Any:
    pipe = PIPELINES[name].build(0)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(dtype)
    return pipe


def image(pipe: Any, name: str = "flux", **settings: Any) -> torch.Tensor:
    return PIPELINES[name].run(pipe, steps=2, output_type="pt", **settings)


def compressed_weights(offloaded: Offloaded) -> dict[str, torch.nn.Parameter]:
    """The matrices of the transformer that cross the bus compressed."""
    found = {
        id(tensor)
        for group in offloaded._components["transformer"]._groups
        for wire in group._held.wires
        if wire.form is not None
        for tensor in wire.piece.spans[0][0].tensors
    }
    named = offloaded._pipeline.transformer.named_parameters()
    return {name: weight for name, weight in named if id(weight) in found and "norm" not in name}


@pytest.mark.parametrize("name", PIPELINES)
def test_whole_pipelines_give_the_same_bits(name: str) -> None:
    pipe = tiny(name)
    expected = image(pipe, name)
    for lazy in (False, True):
        offloaded = offload(pipe, lazy=lazy)
        for _ in range(2):
            assert torch.equal(image(pipe, name), expected)
        stats = offloaded.stats()
        assert 0 < stats.coded_bytes <= stats.sent_bytes
        assert 0.69 < stats.coded_bytes / stats.decoded_bytes < 0.95
        offloaded.detach()
        assert (offloaded.stage.stats.held_bytes, offloaded.stage.registered) == (0, {})  # type: ignore[attr-defined]
    assert torch.equal(image(pipe, name), expected)


def test_half_precision_crosses_as_it_is() -> None:
    pipe = tiny(dtype=torch.float16)
    expected = image(pipe)
    with offload(pipe) as offloaded:
        assert torch.equal(image(pipe), expected)
        assert offloaded.stats().coded_bytes == 0 < offloaded.stats().sent_bytes


def test_weights_stay_where_they_were() -> None:
    pipe = tiny()
    before = {name: tensor.data_ptr() for name, tensor in pipe.transformer.named_parameters()}
    with offload(pipe) as offloaded:
        image(pipe)
        found = compressed_weights(offloaded)
        assert len(found) > 5
        assert all(weight.data_ptr() == before[name] for name, weight in found.items())


def negate_a_part(module: torch.nn.Module) -> None:
    """An edit through `data` so small that what is compared at each step may see nothing."""
    for weight in module.parameters():
        weight.data.flatten()[weight.numel() // 2 :][: -(-weight.numel() // 64)].neg_()


def cast(module: torch.nn.Module) -> None:
    """To what is not compressed, and back."""
    module.float().bfloat16()


@pytest.mark.parametrize("edit", [*EDITS.values(), cast, negate_a_part])
def test_changes_between_runs_and_in_a_run_are_sent(edit: Callable[[torch.nn.Module], None]) -> None:
    pipe, bare = tiny(), tiny()
    offloaded = offload(pipe)
    first = image(pipe)

    def change(pipe: Any, *_: Any) -> dict[str, Any]:
        for block in pipe.transformer.transformer_blocks:
            edit(block.attn.to_q)
        return {}

    for settings in ({}, {"callback_on_step_end": change})[: 1 if edit is negate_a_part else 2]:
        for each in () if settings else (pipe, bare):
            change(each)
        expected = image(bare, **settings)
        assert edit is cast or not torch.equal(first, expected)
        assert torch.equal(image(pipe, **settings), expected)
    assert compressed_weights(offloaded)
    offloaded.detach()
    assert torch.equal(image(pipe), image(bare))


def test_what_has_not_changed_is_not_compressed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny()
    stage = HostStage(lazy=True)
    calls: list[int] = []
    encode = stage.encode
    monkeypatch.setattr(stage, "encode", lambda words: (calls.append(words.numel()), encode(words))[1])
    offloaded = apply_offload(pipe, OffloadConfig("layerwise", compress="lossless"), stage=stage)
    image(pipe)
    count = len(calls)
    offloaded.replan()
    image(pipe)
    assert len(calls) == count
    pinned = []
    for _ in range(4):
        EDITS["permute"](pipe.transformer.transformer_blocks[1].attn.to_q)
        image(pipe)
        pinned.append((stage.stats.pinned_bytes, len(stage.registered)))
    assert count < len(calls) < count + 10
    assert pinned[1:] == pinned[:-1], "old copies are unpinned"


def test_a_piece_that_has_grown_finds_room() -> None:
    pipe, bare = tiny(), tiny()
    offloaded = offload(pipe)
    image(pipe)
    name = max(compressed_weights(offloaded).items(), key=lambda item: item[1].numel())[0]
    for each in (pipe, bare):
        weight = each.transformer.get_parameter(name)
        scales = 2.0 ** (torch.arange(weight.shape[1]) % 24 - 12)
        weight.data.mul_(scales.to(weight.dtype))  # More exponents, more bytes.
    assert torch.equal(image(pipe), image(bare))
    offloaded.detach()
    assert offloaded.stage.stats.held_bytes == 0


def test_compression_can_be_taken_off_and_put_on() -> None:
    pipe = tiny()
    expected = image(pipe)
    offloaded = offload(pipe)
    for compress, is_coded in (("none", False), ("lossless", True), ("auto", False)):
        offloaded.replan(compress=compress)
        before = offloaded.stats().coded_bytes
        assert torch.equal(image(pipe), expected)
        assert (offloaded.stats().coded_bytes > before) == is_coded, compress


# ------------------------------------------------------------------------------------------------- the staging area


@pytest.mark.parametrize("room", [1, 3])
@pytest.mark.parametrize("lazy", [False, True])
def test_copies_into_the_area_wait_for_what_is_in_it(lazy: bool, room: int) -> None:
    stage = HostStage(lazy=lazy, bus_bytes_s=1000.0)
    words = [(torch.randn(1024) * (1 + index)).to(torch.bfloat16) for index in range(9)]
    coded_words = [coding.encode(each) for each in words]
    buffer = stage.allocate(9 * 2048 + 100)
    sizes = [each.data.numel() for each in coded_words if each]
    stage.open_area(room * max(sizes))
    assert stage.stats.held_bytes >= 9 * 2048 + 2 * room * max(sizes)
    raw = torch.arange(100, dtype=torch.uint8)
    for index, each in enumerate(coded_words):
        assert each is not None
        stage.send(buffer, index * 2048, each.data, each.form)
        each.data.zero_()  # It has been copied: nothing but the area has it.
    stage.send(buffer, 9 * 2048, raw)
    stage.compute_waits(stage.mark_copied())
    for index, each in enumerate(words):
        assert torch.equal(buffer.flat[index * 2048 :][:2048], each.view(torch.uint8)), index
    assert torch.equal(buffer.flat[9 * 2048 :], raw)
    assert stage.timeline.computed_s == pytest.approx((sum(sizes) + 100) / 1000), "what crosses the bus takes time"
    stage.close_area()
    stage.free(buffer)
    assert stage.stats.held_bytes == 0


def test_no_room_for_the_area_leaves_everything_off() -> None:
    pipe = tiny()
    stage = HostStage(capacity=2**10)
    with apply_offload(pipe, OffloadConfig("layerwise", compress="lossless"), stage=stage):
        with pytest.raises(torch.OutOfMemoryError):
            image(pipe)
        assert stage.stats.held_bytes == 0
    assert not stage.registered


# ---------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flux", "qwen-image", "wan"])
def test_a_gpu_gives_the_same_bits(name: str) -> None:
    pipe = tiny(name).to("cuda")
    expected = image(pipe, name)
    pipe.to("cpu")
    offloaded = apply_offload(pipe, OffloadConfig("layerwise", compress="lossless", device="cuda"))
    for _ in range(3):
        assert torch.equal(image(pipe, name), expected)
    stats = offloaded.stats()
    assert 0 < stats.coded_bytes < stats.decoded_bytes
    offloaded.detach()
    assert offloaded.stage.stats.held_bytes == 0
    assert torch.equal(image(pipe.to("cuda"), name), expected)


@pytest.mark.gpu
def test_a_gpu_never_reads_what_is_not_there_yet() -> None:
    """Coded and raw pieces of all sizes pass through a small area and a small ring, while slow work uses them."""
    from samovar.offload.cuda import CudaStage

    stage = CudaStage(torch.device("cuda"))
    assert stage.decodes_fast
    generator = torch.Generator().manual_seed(0)
    pieces = []
    for index in range(24):
        count = int(torch.randint(1, 2**11, (1,), generator=generator)) * 1024
        words = (torch.randn(count, generator=generator) * 0.02).to(torch.bfloat16)
        each = stage.encode(words.view(torch.int16)) if index % 3 else None
        data = words.view(torch.uint8) if each is None else each.data.cpu()
        chunk = new_chunk(data.numel())
        chunk[: data.numel()].copy_(data)
        assert stage.register(chunk.data_ptr(), chunk.numel()) is None
        pieces.append((words, chunk, chunk[: data.numel()], each and each.form))
    buffers = [stage.allocate(2**23) for _ in range(2)]
    stage.open_area(max(len(data) for _, _, data, form in pieces if form))
    used = [stage.mark_computed(), stage.mark_computed()]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    expected = [words.cuda().view(torch.uint8) for words, *_ in pieces]
    for turn in range(6):
        for index, (_, _, data, form) in enumerate(pieces):
            buffer = buffers[index % 2]
            stage.copies_wait(used[index % 2])
            stage.send(buffer, 0, data, form)
            stage.compute_waits(stage.mark_copied())
            if (turn + index) % 5 == 0:
                torch.cuda._sleep(3_000_000)
            wrong += (buffer.flat[: expected[index].numel()] != expected[index]).sum()
            used[index % 2] = stage.mark_computed()
    assert wrong.item() == 0
    stage.close_area()
    for buffer in buffers:
        stage.free(buffer)
    stage.synchronize()
    for _, chunk, _, _ in pieces:
        stage.unregister(chunk.data_ptr())
    assert stage.stats.held_bytes == 0
