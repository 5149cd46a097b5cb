"""Which blocks stream: as few as the room allows, spread out, and through as small a ring as is as quick."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from samovar.offload import BlockSize, ComponentSize, Timing, read_sizes
from samovar.offload.ring import least_capacity
from samovar.offload.streaming import choose_streaming, least_bytes, pass_seconds, spread

GIB = 2**30


def component(count: int = 20, size: int = 100, rest: int = 50) -> ComponentSize:
    blocks = tuple(BlockSize(f"blocks.{index}", (size // 4,) * 4) for index in range(count))
    return ComponentSize("transformer", "denoiser", "Model", rest, blocks)


def timing(compute_s: float, bus: float = 100.0) -> Timing:
    return Timing(bus, {"transformer": compute_s})


def test_without_room_all_blocks_stream_through_the_least_ring_that_is_as_quick() -> None:
    choice = choose_streaming(component(), None, timing(4.0))
    assert choice is not None
    assert len(choice.streamed) == 20
    assert choice.ring_bytes == 125  # A fifth of a block crosses the bus while one computes, and pieces are quarters.
    assert choice.forward_s == pytest.approx(20.0, rel=0.01)
    assert choice.kept_bytes == 50


def test_within_a_room_as_much_stays_as_fits() -> None:
    for room in range(300, 2000, 50):
        choice = choose_streaming(component(), room, timing(8.0))
        assert choice is not None
        assert choice.num_bytes <= room
        streamed = 100 * len(choice.streamed)
        assert choice.forward_s <= 1.1 * max(8.0, streamed / 100.0)
        assert choice.kept_bytes == 2050 - streamed
        assert room - choice.num_bytes < 300


def test_more_room_is_never_slower() -> None:
    times = [choose_streaming(component(), room, timing(8.0)) for room in range(250, 2000, 10)]
    assert all(time is not None for time in times)
    seconds = [time.forward_s for time in times if time is not None]
    assert all(later <= earlier * 1.006 for earlier, later in itertools.pairwise(seconds))


def test_what_cannot_run_or_gains_nothing_is_none() -> None:
    whole = component()
    assert choose_streaming(whole, least_bytes(whole) - 1, timing(8.0)) is None
    assert choose_streaming(whole, least_bytes(whole), timing(8.0)) is not None
    assert least_bytes(whole) == 50 + least_capacity((25,) * 4)
    assert choose_streaming(component(count=1), None, timing(8.0)) is None
    assert least_bytes(ComponentSize("vae", "vae", "VAE", 70)) == 70


def test_streamed_blocks_are_spread_over_the_time() -> None:
    blocks = [BlockSize(str(index), (10,), 1.0) for index in range(12)]
    picked = spread(blocks, {block.path for block in blocks}, 40)
    places = sorted(map(int, picked))
    assert len(places) == 4
    assert all(2 <= later - earlier <= 4 for earlier, later in itertools.pairwise(places))
    odd = {str(index) for index in range(1, 12, 2)}
    assert spread(blocks, odd, 40) <= odd
    untimed = [replace(block, compute_s=0.0) for block in blocks]
    assert len(spread(untimed, {block.path for block in blocks}, 120)) == 12


def test_flux_at_every_budget_is_as_quick_as_bus_and_computing_allow() -> None:
    (flux,) = read_sizes("FluxTransformer2DModel")
    machine = Timing(51.4 * GIB, {"transformer": 0.174})  # An H200.
    for budget in (1.2, 2, 4, 8, 12, 13, 14, 15, 16, 18, 20, 21.5):
        choice = choose_streaming(flux, int(budget * GIB), machine)
        assert choice is not None
        assert choice.num_bytes <= budget * GIB
        limit = max(0.174, (flux.num_bytes - choice.kept_bytes) / machine.bus_bytes_s)
        assert choice.forward_s <= 1.02 * limit
    within = choose_streaming(flux, 15 * GIB, machine)
    assert within is not None
    assert within.forward_s <= 1.001 * 0.174


def test_time_of_blocks_is_taken_where_it_is_known() -> None:
    timed = Timing(100.0, block_s={f"transformer.blocks.{index}": 1.0 for index in range(20)})
    assert timed.forward_s(component()) == 20.0
    assert Timing(100.0, block_s={"transformer.blocks.0": 1.0}).forward_s(component()) is None


def blocks(count: int, size: int, seconds: float, pieces: int = 4) -> list[BlockSize]:
    return [BlockSize(str(index), (size // pieces,) * pieces, seconds) for index in range(count)]


def test_bound_by_the_bus() -> None:
    stack = blocks(10, 100, 0.4)
    everything = {block.path for block in stack}
    assert pass_seconds(stack, everything, 200, Timing(100.0)) == pytest.approx(10.0)
    # Half a block more than one is enough: that is what crosses the bus while a block computes.
    assert pass_seconds(stack, everything, 150, Timing(100.0)) == pytest.approx(10.0)
    # Without room for the next, copies and computing take turns.
    assert pass_seconds(blocks(10, 100, 0.4, pieces=1), everything, 100, Timing(100.0)) == pytest.approx(14.0)


def test_bound_by_computing() -> None:
    stack = blocks(10, 100, 2.0)
    assert pass_seconds(stack, {block.path for block in stack}, 200, Timing(100.0)) == pytest.approx(20.0)


def test_a_copy_hides_behind_blocks_that_stay() -> None:
    stack = blocks(10, 100, 0.5)
    assert pass_seconds(stack, {"0", "2", "4", "6", "8"}, 150, Timing(100.0)) == pytest.approx(5.0)
    assert pass_seconds(stack, {"0", "1", "2", "3", "4"}, 150, Timing(100.0)) > 6.0


def test_what_comes_before_the_blocks_counts() -> None:
    assert pass_seconds(blocks(2, 100, 1.0), set(), 0, Timing(100.0), rest_s=0.5) == pytest.approx(2.5)
