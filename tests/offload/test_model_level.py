"""Taking turns: who is called comes in, by whatever door, and the others go off."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from holding import Holder

from pipelines import PIPELINES, tiny_flux_pipeline
from samovar.hooks import HookRegistry
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload
from samovar.offload.model_level import HOOK


def layer(width: int = 8) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width))


def taking_turns(pipe: Any, **config: Any) -> Offloaded:
    return apply_offload(pipe, OffloadConfig("model", **config), stage=HostStage(lazy=True))


def is_in(offloaded: Offloaded, module: torch.nn.Module) -> bool:
    here = {offloaded.stage.is_here(tensor) for tensor in module.parameters()}
    assert len(here) == 1
    return here.pop()


@pytest.mark.parametrize("tiny", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("mode", ["model", "layerwise"])
def test_whole_pipelines_give_the_same_bits_within_the_planned_peak(tiny: Any, mode: Any) -> None:
    pipe = tiny.build(0)
    expected = tiny.run(pipe, steps=2, output_type="pt")
    stage = HostStage(lazy=mode == "model")
    offloaded = apply_offload(pipe, OffloadConfig(mode), stage=stage)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, steps=2, output_type="pt"), expected)
    assert stage.stats.most_held_bytes <= offloaded.plan.peak_bytes
    assert all(count >= 2 for count in offloaded.stats().entries.values())
    offloaded.remove()
    assert stage.stats.held_bytes == 0
    assert stage.registered == {}
    assert torch.equal(tiny.run(pipe, steps=2, output_type="pt"), expected)


def test_one_at_a_time_and_nobody_between_runs() -> None:
    pipe = tiny_flux_pipeline()
    offloaded = taking_turns(pipe)
    movers = (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
    seen = []

    def look(module: torch.nn.Module, *_: Any) -> None:
        seen.append([is_in(offloaded, mover) for mover in movers])

    handles = [mover.register_forward_pre_hook(look) for mover in movers]
    pipe("a cat", num_inference_steps=2, height=16, width=16, max_sequence_length=8, output_type="latent")
    assert seen == [[False, True, False], [False, False, True], [True, False, False], [True, False, False]]
    assert not any(is_in(offloaded, mover) for mover in movers)
    assert is_in(offloaded, pipe.vae)
    for handle in handles:
        handle.remove()
    offloaded.remove()


def test_other_doors_than_forward() -> None:
    pipe = tiny_flux_pipeline()
    offloaded = taking_turns(pipe, exclude=("vae",))
    with torch.no_grad():
        pipe.encode_prompt("a cat", None, max_sequence_length=8)
        assert is_in(offloaded, pipe.text_encoder_2)
        parts = dict(pipe.text_encoder.named_modules())
        next(part for path, part in parts.items() if path.endswith("final_layer_norm"))(torch.zeros(1, 8))
        assert is_in(offloaded, pipe.text_encoder)
        assert not is_in(offloaded, pipe.text_encoder_2)
        pipe.transformer.single_transformer_blocks[1].attn.to_q(torch.zeros(1, 16))
    assert is_in(offloaded, pipe.text_encoder)  # Inside a block there are no doors.
    offloaded.release()
    assert not is_in(offloaded, pipe.text_encoder)
    offloaded.remove()


def test_a_vae_that_takes_turns_encodes_and_decodes() -> None:
    pipe = tiny_flux_pipeline()
    picture = torch.zeros(1, 3, 16, 16)
    with torch.no_grad():
        latents = pipe.vae.encode(picture).latent_dist.mode()
        expected = pipe.vae.decode(latents).sample
    pipe.text_encoder = pipe.text_encoder_2 = None
    offloaded = taking_turns(pipe)
    assert offloaded.plan.component("vae").placement == "turns"
    with torch.no_grad():
        assert torch.equal(pipe.vae.encode(picture).latent_dist.mode(), latents)
        assert torch.equal(pipe.vae.decode(latents).sample, expected)
    assert is_in(offloaded, pipe.vae)
    offloaded.remove()


class Bagel(torch.nn.Module):
    """A pipeline that is itself a module, with a nested denoiser beside what must stay."""

    _dit_modules: ClassVar[list[str]] = ["language_model.model"]
    _encoder_modules: ClassVar[list[str]] = ["vit_model"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = ["time_embedder", "vae2llm"]

    def __init__(self) -> None:
        super().__init__()
        self.language_model = torch.nn.ModuleDict({"model": layer(), "head": layer()})
        self.vit_model, self.vae, self.time_embedder, self.vae2llm = layer(), layer(), layer(), layer()

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.time_embedder(self.vit_model(x))
        return self.vae(self.vae2llm(self.language_model["model"](x)))


def test_a_nested_denoiser_with_resident_modules() -> None:
    pipe, x = Bagel(), torch.randn(2, 8)
    expected = pipe(x)
    offloaded = taking_turns(pipe)
    assert offloaded.plan.component("language_model.model").placement == "turns"
    assert torch.equal(pipe(x), expected)
    assert is_in(offloaded, pipe.time_embedder)
    assert is_in(offloaded, pipe.vae2llm)
    assert not offloaded.stage.is_here(pipe.language_model["head"][0].weight)  # Nobody declared it.
    assert not is_in(offloaded, pipe.language_model["model"])
    offloaded.remove()
    assert torch.equal(pipe(x), expected)


def test_other_ways_to_hold_modules() -> None:
    class Omni2:
        def __init__(self) -> None:
            self.transformer, self.mllm, self.vae = layer(), layer(), layer()

    class Wrapping:
        _dit_modules: ClassVar[list[str]] = ["pipe.transformer"]
        _encoder_modules: ClassVar[list[str]] = ["pipe.text_encoder"]
        _vae_modules: ClassVar[list[str]] = ["pipe.vae", "pipe.audio_vae"]

        def __init__(self) -> None:
            modules = {name: layer() for name in ("transformer", "text_encoder", "vae", "audio_vae")}
            self.pipe = Holder(**modules)

    one = taking_turns(Omni2())
    assert {c.name: c.placement for c in one.plan.components} == {
        "transformer": "turns", "mllm": "turns", "vae": "resident",
    }  # fmt: skip
    two = taking_turns(Wrapping())
    assert {c.name: c.placement for c in two.plan.components} == {
        "pipe.transformer": "turns", "pipe.text_encoder": "turns", "pipe.vae": "resident",
        "pipe.audio_vae": "resident",
    }  # fmt: skip
    one.remove()
    two.remove()


def test_out_of_memory_on_the_way_in_leaves_everything_off_and_usable() -> None:
    holder = Holder(transformer=layer(), text_encoder=layer(64))
    small, x = holder.transformer, torch.randn(1, 8)
    expected = small(x)
    stage = HostStage(capacity=12_000)
    offloaded = apply_offload(holder, OffloadConfig("model"), stage=stage)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                holder.text_encoder(torch.randn(1, 64))
            assert stage.stats.held_bytes == 0
            assert torch.equal(small(x), expected)
    offloaded.remove()
    assert HOOK not in HookRegistry.get_or_create(small)
