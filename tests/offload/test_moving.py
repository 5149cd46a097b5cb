"""Taking turns: the component that is called is loaded, by whatever entry point, and others leave if it needs room.

Streaming: every transformer of diffusers has the bits of the resident one, each block is there when it computes and
comes once a step, no more are on the device than planned, and a skipped step moves nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import zoo
from pipelines import PIPELINES, tiny_flux_pipeline
from samovar.core.errors import SettingError
from samovar.hooks import HookRegistry, running
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload
from samovar.offload.moving import HOOK

from .holding import CASES, Holder, Skip, blocks_of, blocks_on_device, hooked, layerwise


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
    assert stage.stats.peak_held_bytes <= offloaded.plan.peak_bytes
    assert all(count >= 2 for count in offloaded.stats().component_loads.values())
    offloaded.detach()
    assert stage.stats.held_bytes == 0
    assert stage.registered == {}
    assert torch.equal(tiny.run(pipe, steps=2, output_type="pt"), expected)


def test_one_at_a_time() -> None:
    pipe = tiny_flux_pipeline()
    offloaded = taking_turns(pipe)
    movers = (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
    seen = []

    def look(module: torch.nn.Module, *_: Any) -> None:
        seen.append([is_in(offloaded, mover) for mover in movers])

    handles = [mover.register_forward_pre_hook(look) for mover in movers]
    pipe("a cat", num_inference_steps=2, height=16, width=16, max_sequence_length=8, output_type="latent")
    assert seen == [[False, True, False], [False, False, True], [True, False, False], [True, False, False]]
    assert [is_in(offloaded, mover) for mover in (*movers, pipe.vae)] == [True, False, False, True]
    for handle in handles:
        handle.remove()
    offloaded.detach()


def test_other_entry_points_than_forward() -> None:
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
    assert is_in(offloaded, pipe.text_encoder)  # Inside a block there are no hooks.
    offloaded.detach()


def test_a_vae_that_takes_turns_encodes_and_decodes() -> None:
    pipe = tiny_flux_pipeline()
    image = torch.zeros(1, 3, 16, 16)
    with torch.no_grad():
        latents = pipe.vae.encode(image).latent_dist.mode()
        expected = pipe.vae.decode(latents).sample
    pipe.text_encoder = pipe.text_encoder_2 = None
    offloaded = taking_turns(pipe)
    assert offloaded.plan.component("vae").placement == "turns"
    with torch.no_grad():
        assert torch.equal(pipe.vae.encode(image).latent_dist.mode(), latents)
        assert torch.equal(pipe.vae.decode(latents).sample, expected)
    assert is_in(offloaded, pipe.vae)
    offloaded.detach()


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
    offloaded.detach()
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
    one.detach()
    two.detach()


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
    offloaded.detach()
    assert HOOK not in HookRegistry.get_or_create(small)


# ------------------------------------------------------------------------------------------------ streaming


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
    offloaded.detach()


def test_outside_of_a_run_nothing_is_sent_ahead_of_the_next_call() -> None:
    case = CASES["FluxTransformer2DModel"]
    holder = Holder(transformer=case.build())
    offloaded = layerwise(holder)
    whole = offloaded.plan.component("transformer").streamed_bytes
    for step in range(2):
        before = offloaded.stats().sent_bytes
        case.run(holder.transformer, step)
        assert blocks_on_device(offloaded) == []
        assert whole * 0.9 < offloaded.stats().sent_bytes - before <= whole
    offloaded.detach()


def test_weights_that_change_between_runs_are_seen() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    holder = Holder(transformer=model)
    offloaded = layerwise(holder)
    with running(holder):
        case.run(model, 0)
        assert len(blocks_on_device(offloaded)) > 0
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    with running(holder):
        changed = case.run(model, 0)
    offloaded.detach()
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
    offloaded.detach()
    assert zoo.equal(case.run(model, 0), expected)


def test_gradients_are_refused() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    offloaded = layerwise(Holder(transformer=model))
    with pytest.raises(SettingError, match=r"torch\.no_grad\(\)"):
        model(**case.inputs(0))
    offloaded.detach()
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
    offloaded.detach()
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
    offloaded.detach()


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
        offloaded.detach()
    assert first > 0
    assert again <= 2 * first  # Once more, because of the hooks, and not for each new address.
