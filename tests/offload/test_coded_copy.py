"""Weights that cross the bus coded: the same bits as without, also after every kind of change, within the memory that
is counted.

Tiny models have tiny weights, so these tests code what is too small to be worth it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipelines import PIPELINES
from samovar.core.errors import SettingError
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload, coded_copy, coding, host, sizes, weights

FLUX = PIPELINES["flux"]

LEAST = 2**9


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(coding, "LEAST_BYTES", LEAST)
    monkeypatch.setattr(sizes, "LEAST_BYTES", LEAST)
    monkeypatch.setattr(weights, "LEAST_PIECE", LEAST)
    monkeypatch.setattr(host, "LEAST_PIECE", LEAST)
    monkeypatch.setattr(coded_copy, "LEAST_PIECE", LEAST)
    return


def coded(pipe: Any, *, lazy: bool = True, **config: Any) -> Offloaded:
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


def large_weights(offloaded: Offloaded) -> list[torch.nn.Parameter]:
    """Weights that cross the bus coded."""
    transformer = offloaded._components["transformer"]
    return [
        tensor
        for group in transformer._groups
        for copy in group.copies
        if copy is not None
        for tensor in copy._tensors
        if isinstance(tensor, torch.nn.Parameter)
    ]


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("lazy", [False, True])
def test_whole_pipelines_give_the_same_bits(name: str, lazy: bool) -> None:
    pipe = tiny(name)
    expected = image(pipe, name)
    offloaded = coded(pipe, lazy=lazy)
    for _ in range(2):
        assert torch.equal(image(pipe, name), expected)
    stats = offloaded.stats()
    assert 0 < stats.coded_bytes <= stats.sent_bytes
    assert 0.69 < stats.coded_bytes / stats.decoded_bytes < 0.95
    offloaded.detach()
    assert offloaded.stage.stats.held_bytes == 0
    assert offloaded.stage.registered == {}  # type: ignore[attr-defined]
    assert torch.equal(image(pipe, name), expected)


def test_half_precision_too() -> None:
    pipe = tiny(dtype=torch.float16)
    expected = image(pipe)
    offloaded = coded(pipe)
    assert torch.equal(image(pipe), expected)
    assert offloaded.stats().coded_bytes > 0


def test_weights_stay_where_they_were_and_the_pinned_copy_is_the_coded_one() -> None:
    pipe = tiny()
    transformer = pipe.transformer
    before = {name: tensor.data_ptr() for name, tensor in transformer.named_parameters()}
    state = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    offloaded = coded(pipe)
    ours = {id(weight) for weight in large_weights(offloaded)}
    image(pipe)
    named = dict(transformer.named_parameters())
    assert all(named[name].data_ptr() == place for name, place in before.items() if id(named[name]) in ours)
    assert all(torch.equal(tensor, state[name]) for name, tensor in transformer.state_dict().items())
    group = offloaded._components["transformer"]._groups[1]
    for copy, source in zip(group.copies, group.sources, strict=True):
        is_pinned = source.untyped_storage().data_ptr() in offloaded.stage.registered  # type: ignore[attr-defined]
        assert is_pinned == (copy is None)


def add_in_place(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(weight)


def add_to_data(weight: torch.nn.Parameter) -> None:
    """How peft merges an adapter: torch does not count it."""
    weight.data += weight.data


def set_data(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data + weight.data


def swap_rows(weight: torch.nn.Parameter) -> None:
    """Equal exponents, equal sizes."""
    weight.data.copy_(weight.data.flip(0))


CHANGES = [add_in_place, add_to_data, set_data, swap_rows]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_runs_are_sent(change: Any) -> None:
    pipe, bare = tiny(), tiny()
    offloaded = coded(pipe)
    first = image(pipe)
    names = {id(weight) for weight in large_weights(offloaded)}
    for (name, weight), other in zip(pipe.transformer.named_parameters(), bare.transformer.parameters(), strict=True):
        if id(weight) in names and "norm" not in name:
            change(weight)
            change(other)
    expected = image(bare)
    assert not torch.equal(first, expected)
    for _ in range(2):
        assert torch.equal(image(pipe), expected)
    offloaded.detach()
    assert torch.equal(image(pipe), expected)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_by_a_callback_in_a_run_are_sent(change: Any) -> None:
    def settings(pipe: Any, wanted: list[str]) -> dict[str, Any]:
        def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            for name, weight in pipe.transformer.named_parameters():
                if step == 0 and name in wanted:
                    change(weight)
            return {}

        return {"callback_on_step_end": callback}

    pipe, bare = tiny(), tiny()
    offloaded = coded(pipe)
    ours = {id(weight) for group in offloaded._components["transformer"].blocks.values()
            for copy in group.copies if copy for weight in copy._tensors}  # fmt: skip
    wanted = [name for name, weight in pipe.transformer.named_parameters() if id(weight) in ours and "norm" not in name]
    assert len(wanted) > 5
    expected = image(bare, **settings(bare, wanted))
    assert not torch.equal(expected, image(tiny()))
    assert torch.equal(image(pipe, **settings(pipe, wanted)), expected)


def test_weights_loaded_or_cast_between_runs_are_sent() -> None:
    pipe, bare, other = tiny(), tiny(), PIPELINES["flux"].build(1).transformer.to(torch.bfloat16)
    offloaded = coded(pipe)
    image(pipe)
    for each in (pipe, bare):
        each.transformer.load_state_dict(other.state_dict())
    assert torch.equal(image(pipe), image(bare))
    for each in (pipe, bare):
        each.transformer.float()
        each.text_encoder.float()
        each.text_encoder_2.float()
        each.vae.float()
    assert torch.equal(image(pipe), image(bare))
    assert not large_weights(offloaded)


def test_what_has_not_changed_is_not_coded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny()
    stage = HostStage(lazy=True)
    calls: list[int] = []
    encode = stage.encode
    monkeypatch.setattr(stage, "encode", lambda words, dtype: (calls.append(words.numel()), encode(words, dtype))[1])
    offloaded = apply_offload(pipe, OffloadConfig("layerwise", compress="lossless"), stage=stage)
    image(pipe)
    count = len(calls)
    image(pipe)
    offloaded.replan()
    image(pipe)
    assert len(calls) == count
    weight = large_weights(offloaded)[-1]
    add_to_data(weight)
    pinned, registered = stage.stats.pinned_bytes, len(stage.registered)
    for _ in range(3):
        swap_rows(weight)
        image(pipe)
    assert len(calls) < count + 10
    assert (stage.stats.pinned_bytes, len(stage.registered)) == (pinned, registered), "old copies are unpinned"


def test_a_piece_that_has_grown_finds_room() -> None:
    pipe, bare = tiny(), tiny()
    offloaded = coded(pipe)
    image(pipe)
    largest = max(large_weights(offloaded), key=lambda weight: weight.numel())
    name = next(name for name, weight in pipe.transformer.named_parameters() if weight is largest)
    for each in (pipe, bare):
        weight = each.transformer.get_parameter(name)
        scales = 2.0 ** (torch.arange(weight.shape[1]) % 24 - 12)
        weight.data.mul_(scales.to(weight.dtype))  # More exponents, more bytes.
    assert torch.equal(image(pipe), image(bare))
    offloaded.detach()
    assert offloaded.stage.stats.held_bytes == 0


def test_the_code_can_be_taken_off_and_put_on() -> None:
    pipe = tiny()
    expected = image(pipe)
    offloaded = coded(pipe)
    for compress, is_coded in (("none", False), ("lossless", True), ("auto", False)):
        offloaded.replan(compress=compress)
        before = offloaded.stats()
        assert torch.equal(image(pipe), expected)
        after = offloaded.stats()
        assert (after.coded_bytes > before.coded_bytes) == is_coded, compress
        assert after.sent_bytes > before.sent_bytes


def test_unknown_codes_are_refused_with_the_nearest() -> None:
    with pytest.raises(SettingError, match="lossless") as caught:
        OffloadConfig(compress="losless")  # type: ignore[arg-type]
    assert caught.value.param == "compress"


# ------------------------------------------------------------------------------------------------- the staging area


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("lazy", [False, True])
def test_copies_into_the_area_wait_for_what_is_in_it(lazy: bool, together: int) -> None:
    stage = HostStage(lazy=lazy)
    stage.in_groups = together > 1
    words = [(torch.randn(512) * (1 + index)).to(torch.bfloat16) for index in range(9)]
    coded_words = [coding.encode(each) for each in words]
    buffer = stage.allocate(9 * 1024 + 100)
    largest = max(each.data.numel() for each in coded_words if each)
    stage.open_area(together * largest)
    assert stage.stats.held_bytes >= 9 * 1024 + 2 * together * largest
    raw = torch.arange(100, dtype=torch.uint8)
    for index, each in enumerate(coded_words):
        assert each is not None
        stage.send(buffer, index * 1024, each.data, each.form)
        if (index + 1) % together == 0:
            if together > 1:
                stage.flush()
            for sent in coded_words[: index + 1]:
                sent.data.zero_()  # It has been copied: nothing but the area has it.
    stage.send(buffer, 9 * 1024, raw)
    raw_copy = raw.clone()
    stage.compute_waits(stage.mark_copied())
    for index, each in enumerate(words):
        assert torch.equal(buffer.flat[index * 1024 :][:1024], each.view(torch.uint8)), index
    assert torch.equal(buffer.flat[9 * 1024 :], raw_copy)
    stage.close_area()
    stage.free(buffer)
    assert stage.stats.held_bytes == 0


def test_the_clock_counts_what_crosses_the_bus() -> None:
    stage = HostStage(bus_bytes_s=1000.0)
    each = coding.encode(torch.randn(512).to(torch.bfloat16))
    assert each is not None
    buffer = stage.allocate(1024)
    stage.send(buffer, 0, each.data, each.form)
    stage.compute_waits(stage.mark_copied())
    assert stage.timeline.computed_s == each.data.numel() / 1000
    assert (stage.stats.sent_bytes, stage.stats.decoded_bytes) == (each.data.numel(), 1024)


def test_no_room_for_the_area_leaves_everything_off() -> None:
    pipe = tiny()
    stage = HostStage(capacity=2**10)
    with pytest.raises(torch.OutOfMemoryError):
        apply_offload(pipe.transformer, OffloadConfig("layerwise", compress="lossless"), stage=stage)
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
        count = int(torch.randint(1, 2**21, (1,), generator=generator)) * 2
        words = (torch.randn(count, generator=generator) * 0.02).to(torch.bfloat16)
        each = stage.encode(words.view(torch.int16), torch.bfloat16) if index % 3 else None
        data = words.view(torch.uint8) if each is None else each.data.cpu()
        chunk = host.new_chunk(data.numel())
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
