"""The ring and the devices: bytes are given in order, blocks come before they are called, and waits matter."""

from __future__ import annotations

import random

import pytest
import torch

from samovar.core.errors import SettingError
from samovar.hooks import running
from samovar.offload import HostStage, OffloadConfig, apply_offload
from samovar.offload.cuda import CudaStage
from samovar.offload.device import move_arguments
from samovar.offload.files import Source, Unpinned
from samovar.offload.layout import ALIGNMENT, MIN_PIECE, view_of
from samovar.offload.measured import Timer
from samovar.offload.pinned import new_chunk
from samovar.offload.ring import Ring, RingSpace, Timeline, least_capacity
from samovar.offload.stats import OffloadStats, TimeStats
from samovar.offload.streaming import Timing

from .holding import CASES, Holder


class Block:
    """A block that remembers where its pieces were sent."""

    def __init__(self, name: str, pieces: list[int], log: list[tuple[str, int, int]]) -> None:
        self.name, self.pieces, self._log = name, pieces, log
        self.changes = 0

    def prepare(self) -> int:
        return self.changes

    def send(self, piece: int, memory: object, offset: int) -> None:
        self._log.append((self.name, piece, offset))

    edits = prepare

    def __repr__(self) -> str:
        return self.name


def ring_of(sizes: list[list[int]], capacity: int, *, has_next_pass: bool = True) -> tuple[Ring, list[Block], list]:
    log: list[tuple[str, int, int]] = []
    blocks = [Block("abcdefghij"[index], pieces, log) for index, pieces in enumerate(sizes)]
    return Ring(Timeline(1.0), capacity, blocks, has_next_pass=lambda: has_next_pass), blocks, log


def counts(ring: Ring) -> tuple[int, int, int]:
    stats = ring._queues.stats
    return stats.block_loads, stats.late_blocks, stats.dropped_blocks


def call(ring: Ring, blocks: list[Block]) -> None:
    ring.begin_pass()
    for block in blocks:
        ring.acquire(block)
        ring.release()
    ring.end_pass()


def test_space_is_never_given_twice_and_pieces_do_not_go_round_the_end() -> None:
    random.seed(0)
    space, live = RingSpace(100), []
    for _ in range(3000):
        size = random.randint(1, 40)
        start = space.take(size)
        if start is None:
            space.give_back(1)
            live.pop(0)
            continue
        assert start + size <= 100
        assert all(start + size <= other or end <= start for other, end in live)
        live.append((start, start + size))


def test_a_block_fits_wherever_it_begins() -> None:
    random.seed(1)
    for _ in range(200):
        sizes = [[random.randint(1, 9) for _ in range(random.randint(1, 5))] for _ in range(6)]
        capacity = max(map(least_capacity, sizes))
        ring, blocks, log = ring_of(sizes, capacity)
        for _ in range(4):
            call(ring, blocks)  # An assertion inside fails if a block does not fit.
        pieces = {block.name: block.pieces for block in blocks}
        assert all(offset + pieces[name][piece] <= capacity for name, piece, offset in log)
        assert {(name, piece) for name, piece, _ in log} == {(n, p) for n in pieces for p in range(len(pieces[n]))}


def test_blocks_that_are_left_out_are_dropped_and_the_rest_is_used() -> None:
    ring, (a, b, c, d), _ = ring_of([[1], [1], [1], [1]], 3)
    call(ring, [a, b, c, d])
    ring.begin_pass()
    ring.acquire(c)  # a and b were on their way, and so was c.
    ring.release()
    ring.acquire(d)
    ring.release()
    ring.end_pass()
    assert counts(ring)[1:] == (1, 2)
    assert ring.order == [a, b, c, d]


def test_another_order_is_learned_in_one_pass() -> None:
    ring, (a, b, c), log = ring_of([[1], [1], [1]], 2)
    call(ring, [c, a, b])
    assert ring.order == [c, a, b]
    call(ring, [c, a, b])
    late, sent = counts(ring)[1], len(log)
    call(ring, [c, a, b])
    assert (counts(ring)[1], len(log)) == (late, sent + 3)


def test_a_block_that_runs_twice_in_a_pass_is_loaded_twice() -> None:
    ring, (a, b), _log = ring_of([[1], [1]], 1)
    for _ in range(3):
        call(ring, [a, b, a, b])
    assert ring.order == [a, b, a, b]
    assert counts(ring)[0] == 12


def test_a_block_that_was_not_known_is_loaded_and_learned() -> None:
    ring, (a, b, c), _ = ring_of([[1], [1], [1]], 2)
    call(ring, [a, b])
    assert ring.order == [a, b]
    call(ring, [a, b, c])
    assert ring.order == [a, b, c]


def test_stats_are_one_line_and_name_only_what_there_was() -> None:
    stats = OffloadStats(sent_bytes=2**30, block_loads=9, peak_held_bytes=2**20, setup_s=1.25)
    assert str(stats) == "1.00 GiB sent in 9 block loads; at most 1.00 MiB of weights on the device; 1.2 s to set up"
    stats.late_blocks, stats.coded_bytes, stats.decoded_bytes = 2, 2**29, 2**30
    assert str(stats).startswith("1.00 GiB for 1.50 GiB of weights sent in 9 block loads, 2 of them late;")
    stats.ahead["transformer"] = TimeStats(76, 6 * 2**30, computed_steps=28, found_forwards=27, live_calls=3)
    assert str(stats).endswith(
        "; transformer: 76 layers (6.00 GiB) that see time alone: 28 steps computed ahead, 27 forwards found theirs, 3 "
        "calls computed on the spot"
    )


# ------------------------------------------------------------------------------------------------ a simulated device


def filled(count: int, value: int = 7) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


@pytest.mark.parametrize("lazy", [True, False])
def test_lazy_copies_arrive_when_computing_waits_for_them_and_eager_ones_at_once(lazy: bool) -> None:
    stage = HostStage(lazy=lazy, bus_bytes_s=5.0)
    buffer = stage.allocate(20)
    stage.send(buffer, 0, filled(10))
    mark = stage.mark_copied()
    stage.send(buffer, 10, filled(10))
    assert buffer.flat[0] == (255 if lazy else 7)
    stage.compute_waits(mark)
    assert (buffer.flat[9], buffer.flat[10]) == (7, 255 if lazy else 7)
    assert stage.timeline.computed_s == 2.0, "the clock takes the time of the bus"
    stage.synchronize()
    assert torch.equal(buffer.flat, filled(20))
    assert stage.stats.sent_bytes == 20


def test_memory_that_is_given_back_is_spoiled_and_counted() -> None:
    stage = HostStage(capacity=100)
    one, other = stage.allocate(60), stage.allocate(40)
    with pytest.raises(torch.OutOfMemoryError, match="1 bytes do not fit: 100 of 100 are taken"):
        stage.allocate(1)
    weight = view_of(one.flat, torch.zeros(4), 0)
    stage.send(one, 0, filled(16, 0))
    stage.compute_waits(stage.mark_copied())
    assert torch.equal(weight, torch.zeros(4))
    assert stage.is_here(weight)
    stage.free(one)
    assert weight.isnan().all()
    assert not stage.is_here(weight)
    assert stage.is_here(other.flat)
    assert (stage.stats.held_bytes, stage.stats.peak_held_bytes, stage.free_bytes()) == (40, 100, 60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex64], ids=str)
def test_a_view_has_the_type_shape_and_strides_of_another(dtype: torch.dtype) -> None:
    like = torch.ones(3, 4).to(dtype).t()
    with torch.inference_mode():
        buffer = HostStage().allocate(4 * ALIGNMENT)
    view = view_of(buffer.flat, like, ALIGNMENT)
    assert (view.dtype, view.shape, view.stride()) == (like.dtype, like.shape, like.stride())
    assert view.data_ptr() == buffer.flat.data_ptr() + ALIGNMENT
    assert not view.is_inference()


# ------------------------------------------------------------------------------------------------ a GPU


def test_without_a_gpu_it_is_refused_by_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SettingError, match=r"device='cuda' cannot be used: .*finds no GPU here"):
        CudaStage(torch.device("cuda"))


@pytest.mark.gpu
def test_a_range_is_pinned_in_place_and_an_error_is_not_left_behind() -> None:
    stage = CudaStage(torch.device("cuda"))
    tensor = new_chunk(MIN_PIECE)
    assert stage.register(tensor.data_ptr(), MIN_PIECE) is None
    assert tensor.is_pinned()
    assert stage.register(tensor.data_ptr(), MIN_PIECE) is not None
    torch.zeros(4, device="cuda").add_(1)  # Would raise what CUDA remembers.
    stage.unregister(tensor.data_ptr())
    assert stage.measure_bus() > 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel"])
def test_the_bits_are_those_of_the_resident_model(name: str) -> None:
    case = CASES[name]
    model = case.build()
    holder = Holder(transformer=model)

    def run(step: int) -> torch.Tensor:
        inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.inputs(step).items()}
        with torch.no_grad():
            output = model(**inputs, return_dict=False)[0]
        return output.cpu()

    model.to("cuda")
    expected = [run(step) for step in range(3)]
    model.to("cpu")
    offloaded = apply_offload(holder, OffloadConfig("layerwise", device="cuda"))
    with running(holder):
        assert all(torch.equal(run(step), expected[step]) for step in range(3))
    offloaded.detach()
    assert all(tensor.device.type == "cpu" for tensor in model.parameters())
    model.to("cuda")
    assert torch.equal(run(0), expected[0])


@pytest.mark.gpu
def test_nobody_elses_memory_is_pinned() -> None:
    """Tensors that lie between weights on the heap can be copied while those are offloaded, and after."""

    model = CASES["FluxTransformer2DModel"].build()
    between = []
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        between.append(torch.arange(512))
    encoder = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(8)))
    holder = Holder(transformer=model, text_encoder=encoder)
    for _ in range(2):
        offloaded = apply_offload(holder, OffloadConfig("model", device="cuda"))
        assert all(torch.equal(tensor.to("cuda").cpu(), torch.arange(512)) for tensor in between)
        offloaded.detach()
        assert all(torch.equal(tensor.to("cuda").cpu(), torch.arange(512)) for tensor in between)


@pytest.mark.gpu
def test_what_is_not_pinned_passes_through_buffers_in_order_with_what_is() -> None:
    """Many more bytes than the buffers hold, to and fro between pinned and not, each read back where it belongs."""
    stage = CudaStage(torch.device("cuda"))
    buffers = [new_chunk(2**20) for _ in range(3)]
    for buffer in buffers:
        assert stage.register(buffer.data_ptr(), buffer.numel()) is None
    stage.pass_through(buffers)
    contents = [torch.randint(256, (5 * 2**20 + 7,), dtype=torch.uint8) for _ in range(6)]
    memory = stage.allocate(sum(content.numel() for content in contents))
    offset = 0
    for index, content in enumerate(contents):
        source = content.pin_memory() if index % 2 else Unpinned(content.numel(), ((0, Source(content)),))
        stage.send(memory, offset, source)
        offset += content.numel()
    stage.compute_waits(stage.mark_copied())
    assert torch.equal(memory.flat[:offset].cpu(), torch.cat(contents))
    stage.free(memory)
    stage.pass_through(())
    stage.synchronize()
    for buffer in buffers:
        stage.unregister(buffer.data_ptr())


@pytest.mark.gpu
def test_no_more_is_reserved_than_the_budget() -> None:
    stage = CudaStage(torch.device("cuda"))
    stage.note_others()
    with stage.within(2**27):
        held = torch.empty(2**26, dtype=torch.uint8, device="cuda")
        before = stage.pressure().refusals
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**27, dtype=torch.uint8, device="cuda")
        assert stage.pressure().refusals > before
    del held
    torch.empty(2**27, dtype=torch.uint8, device="cuda")


def test_arguments_that_are_on_the_device_stay_the_callers_own() -> None:
    """The VAEs of Wan and others keep features of earlier frames in a list that they are given, and change it."""
    there, elsewhere = torch.empty(1, device="meta"), torch.ones(1)
    kept = {"cache": [there, None, 1], "index": [0]}
    moved = move_arguments((kept, (there,)), there.device)
    assert moved[0] is kept
    moved = move_arguments([there, [elsewhere], kept], there.device)
    assert moved[0] is there
    assert moved[1][0].is_meta
    assert moved[2] is kept


def test_times_of_blocks_are_those_without_decoding_beside_them() -> None:
    stage = HostStage()
    timer = Timer(stage)
    for _ in range(3):
        timer.begin("")
        for path, seconds in (("blocks.0", 1.0), ("blocks.1", 3.0)):
            timer.begin(path)
            stage.timeline.compute(seconds)
            timer.end(path)
        timer.end("")
    known = Timing(7.0, {"vae": 1.0}, decoding_s=0.5)
    timing = timer.timing("model", known, 1.0)
    assert timing.block_s == pytest.approx({"model.blocks.0": 0.75, "model.blocks.1": 2.25})
    assert (timing.bus_bytes_s, timing.compute_s, timing.decoding_s) == (7.0, {"vae": 1.0}, 0.5)
