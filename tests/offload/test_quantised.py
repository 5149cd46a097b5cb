"""Quantised models of every library: the bits of the bare model, however they are offloaded, and off again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar import attach, detach
from samovar.hooks import HookRegistry
from samovar.offload import HostStage, OffloadConfig, apply_offload
from samovar.offload.weights import held_by
from samovar.tensors import take_apart

from .holding import Onlooker, blocks_of
from .quantised import KINDS, pipeline_with, plain_flux

CALL = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 8, "output_type": "pt"}
every = pytest.mark.parametrize("kind", KINDS)


def build(kind: str) -> Any:
    return pipeline_with(KINDS[kind](plain_flux()))


def draw(pipe: Any, **settings: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    image: torch.Tensor = pipe("a cat", generator=generator, return_dict=False, **CALL | settings)[0]
    assert image.isfinite().all()
    return image


def budget_for(pipe: Any) -> int:
    """One in which some blocks of the denoiser stream."""
    sizes = apply_offload(pipe, OffloadConfig("layerwise", activations=0), stage=HostStage())
    plan = sizes.plan.component("transformer")
    sizes.detach()
    return (plan.num_bytes + plan.device_bytes) // 2


@every
def test_offloaded_it_gives_the_bits_of_the_bare_model(kind: str) -> None:
    pipe = build(kind)
    expected = draw(pipe)
    assert not torch.equal(expected, draw(pipeline_with(plain_flux())))
    transformer = pipe.transformer
    objects = [id(t) for t in (*transformer.parameters(), *transformer.buffers())]
    before = [part.detach().clone() for part in take_apart(held_by(transformer)).plain]
    for settings in ({"mode": "layerwise"}, {"mode": "model"}, {"gpu_memory": budget_for(pipe), "activations": 0}):
        for lazy in (False, True):
            offloaded = apply_offload(pipe, OffloadConfig(**settings), stage=HostStage(lazy=lazy))
            assert torch.equal(draw(pipe), expected), settings
            assert offloaded.stats().sent_bytes > 0
            offloaded.detach()
    assert torch.equal(draw(pipe), expected)
    assert objects == [id(t) for t in (*transformer.parameters(), *transformer.buffers())]
    after = take_apart(held_by(transformer)).plain
    assert all(torch.equal(bits(one), bits(two)) for one, two in zip(after, before, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@every
def test_the_blocks_compute_with_what_was_sent(kind: str) -> None:
    pipe = build(kind)
    draw(pipe)
    offloaded = apply_offload(pipe, OffloadConfig("layerwise"), stage=HostStage())
    seen: list[bool] = []

    class Look(Onlooker):
        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            seen.extend(map(offloaded.stage.is_here, take_apart(held_by(module)).plain))
            return args, kwargs

    for path, block in blocks_of(pipe.transformer).items():
        HookRegistry.get_or_create(block).register_hook("test", Look(offloaded, path, []))
    draw(pipe)
    assert seen
    assert all(seen)
    assert not any(map(offloaded.stage.is_here, take_apart(held_by(pipe.transformer.transformer_blocks)).plain))
    quantised = sum(part.numel() * part.element_size() for part in take_apart(held_by(pipe.transformer)).plain)
    assert offloaded.plan.component("transformer").num_bytes < 1.6 * quantised  # Many tiny tensors, each aligned.


@every
def test_with_a_cache_too(kind: str) -> None:
    expected = draw(build(kind))
    exact = {"backend": "tea_cache", "rel_l1_thresh": 0.0}
    schedule = {"backend": "tea_cache", "schedule": "#.#."}
    pipe = build(kind)  # Not called yet: some libraries change their layers in the first call.
    for cache, steps in ((exact, 2), (schedule, 4)):
        attach(pipe, cache=cache)
        alone = draw(pipe, num_inference_steps=steps)
        detach(pipe)
        assert torch.equal(alone, expected) or cache is schedule
        attach(pipe, cache=cache, offload={"mode": "layerwise", "device": "cpu"})
        assert torch.equal(draw(pipe, num_inference_steps=steps), alone)
        detach(pipe)
    assert torch.equal(draw(pipe), expected)
