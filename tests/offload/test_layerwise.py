"""Streaming: every transformer of diffusers has the bits of the resident one, each block is there when it computes and
comes once a step, no more are on the device than planned, and a skipped step moves nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from holding import Holder, Onlooker, Skip, hooked, layerwise

import zoo
from samovar.arch import find_anatomy
from samovar.errors import SettingError
from samovar.hooks import running
from samovar.offload.layerwise import check_compiled

CASES = {case.id: case for case in zoo.load()}
REPEATS = {"RFD4ProteinaTransformer-recycling": 2}
"""How often blocks run in one forward where that is more than once."""


def blocks_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {
        path: block
        for stack in find_anatomy(model).stacks
        for path, block in zip(stack.block_paths, stack.modules(model), strict=True)
    }


def in_flight(offloaded: Any) -> int:
    return len(offloaded.blocks_on_device())


@pytest.mark.parametrize("name", CASES)
def test_every_transformer_streams_with_the_bits_of_the_resident_one(name: str) -> None:
    case = CASES[name]
    model = case.build()
    expected = [case.run(model, step) for step in range(3)]
    blocks, log = blocks_of(model), []
    holder = Holder(transformer=model)
    offloaded = layerwise(holder, lazy=len(name) % 2 == 0)
    plan = offloaded.plan.component("transformer")
    assert plan.streamed == blocks.keys()
    with running(holder), hooked(blocks, lambda path: Onlooker(offloaded, path, log)):
        for step in range(3):
            before, dropped = offloaded.stats(), offloaded.stats().dropped_blocks
            log.clear()
            assert zoo.equal(case.run(model, step), expected[step])
            assert all(is_here for _, is_here, _ in log)
            assert max(count for _, _, count in log) <= plan.blocks_at_once
            assert set(Counter(path for path, _, _ in log).values()) == {REPEATS.get(name, 1)}
            if step == 2:  # The order is known: what is called comes once, on time, and nothing else does.
                after = offloaded.stats()
                assert after.block_loads - before.block_loads == len(log)
                assert (after.late_blocks, after.dropped_blocks) == (before.late_blocks, dropped)
    assert offloaded.stats().most_held_bytes <= offloaded.plan.peak_bytes
    offloaded.remove()
    assert zoo.equal(case.run(model, 0), expected[0])
    assert offloaded.stage.stats.held_bytes == 0


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanTransformer3DModel", "Lumina2Transformer2DModel"])
def test_a_skipped_step_moves_nothing_and_the_next_one_recovers(name: str) -> None:
    case = CASES[name]
    model = case.build()
    expected = [case.run(model, step) for step in range(4)]
    holder, switch = Holder(transformer=model), {"on": False}
    offloaded = layerwise(holder)
    with running(holder), hooked(blocks_of(model), lambda path: Skip(switch)):
        for step in (0, 1):
            assert zoo.equal(case.run(model, step), expected[step])
        before, switch["on"] = offloaded.stats(), True
        for step in (2, 2, 3):
            case.run(model, step)
        assert offloaded.stats() == before
        switch["on"] = False
        assert zoo.equal(case.run(model, 2), expected[2])
        assert offloaded.stats().late_blocks == before.late_blocks  # What was under way was used.
        assert zoo.equal(case.run(model, 3), expected[3])
    offloaded.remove()


def test_outside_of_a_run_nothing_is_sent_ahead_of_the_next_call() -> None:
    case = CASES["FluxTransformer2DModel"]
    holder = Holder(transformer=case.build())
    offloaded = layerwise(holder)
    whole = offloaded.plan.component("transformer").streamed_bytes
    for step in range(2):
        before = offloaded.stats().sent_bytes
        case.run(holder.transformer, step)
        assert offloaded.blocks_on_device() == []
        assert whole * 0.9 < offloaded.stats().sent_bytes - before <= whole
    offloaded.remove()


def test_weights_that_change_between_runs_are_seen() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    holder = Holder(transformer=model)
    offloaded = layerwise(holder)
    with running(holder):
        case.run(model, 0)
        assert in_flight(offloaded) > 0
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    with running(holder):
        changed = case.run(model, 0)
    offloaded.remove()
    assert zoo.equal(changed, case.run(model, 0))


def test_a_block_that_raises_leaves_everything_usable() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    expected = case.run(model, 0)
    holder = Holder(transformer=model)
    offloaded = layerwise(holder)
    block = model.single_transformer_blocks[1]
    handle = block.proj_mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), running(holder):
            case.run(model, 0)
        assert not any(map(offloaded.stage.is_here, block.parameters()))
    handle.remove()
    with running(holder):
        assert zoo.equal(case.run(model, 0), expected)
    offloaded.remove()
    assert zoo.equal(case.run(model, 0), expected)


def test_gradients_are_refused() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    offloaded = layerwise(Holder(transformer=model))
    with pytest.raises(SettingError, match=r"torch\.no_grad\(\)"):
        model(**case.inputs(0))
    offloaded.remove()
    assert model(**case.inputs(0))[0].requires_grad


def test_weights_that_blocks_share_stay_and_buffers_travel() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    one, other, last = model.single_transformer_blocks
    other.proj_out.weight = one.proj_out.weight
    last.attn.to_q.weight.data = last.attn.to_k.weight.data  # Overlapping inside one block.
    last.register_buffer("scale", torch.ones(3))
    expected = case.run(model, 0)
    holder = Holder(transformer=model)
    offloaded = layerwise(holder)
    assert offloaded.stage.is_here(one.proj_out.weight)
    with running(holder):
        assert zoo.equal(case.run(model, 0), expected)
    offloaded.remove()
    assert other.proj_out.weight is one.proj_out.weight
    assert last.attn.to_q.weight.data_ptr() == last.attn.to_k.weight.data_ptr()
    assert zoo.equal(case.run(model, 0), expected)


def test_the_state_dict_of_streamed_blocks_is_the_host_copy() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    holder = Holder(transformer=model)
    offloaded = layerwise(holder)
    with running(holder):
        case.run(model, 0)
        during = model.state_dict()
        assert during.keys() == before.keys()
        assert all(torch.equal(during[name], before[name]) for name in before)
        assert not any(offloaded.stage.is_here(during[name]) for name in before if "transformer_blocks" in name)
    offloaded.remove()


def test_compiled_blocks_are_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    case = CASES["QwenImageTransformer2DModel"]
    model = case.build()
    holder = Holder(transformer=model)
    counter = CompileCounter()
    torch._dynamo.reset()
    for block in model.transformer_blocks:
        block.compile(backend=counter)
    plain = {"return_dict": False}
    with torch.no_grad():
        expected = model(**case.inputs(0), **plain)[0]
        first = counter.frame_count
        offloaded = layerwise(holder)
        with running(holder):
            for _ in range(3):
                assert torch.equal(model(**case.inputs(0), **plain)[0], expected)
        again = counter.frame_count
        offloaded.remove()
    assert first > 0
    assert again <= 2 * first  # Once more, because of the hooks, and not for each new address.


def test_cuda_graphs_are_refused_by_name() -> None:
    block = torch.nn.Linear(2, 2)
    block.compile(mode="reduce-overhead")
    with pytest.raises(SettingError, match=r"transformer\.blocks\.0 is compiled with CUDA graphs"):
        check_compiled("transformer.blocks.0", block)
    with pytest.raises(SettingError, match="CUDA graphs"):
        check_compiled("block", torch.compile(torch.nn.Linear(2, 2), mode="reduce-overhead"))
    plain = torch.nn.Linear(2, 2)
    check_compiled("block", plain)
    plain.compile()
    check_compiled("block", plain)
