"""The whole: on and off without a trace, by any entry point, streaming, with adapters, and refusals by name."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch

import zoo
from pipelines import PIPELINES, tiny_flux_pipeline
from samovar.core.errors import ModelError, SettingError
from samovar.hooks import HookRegistry, ModelHook, running
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload, prepare_offload
from samovar.offload.load_hooks import HOOK
from samovar.offload.measured import with_margin
from samovar.offload.offload import check_compiled
from samovar.trace.activations import activations_of
from samovar.trace.dry_run import RequestSize

from .holding import CASES, Holder, Skip, blocks_of, blocks_on_device, hooked, layerwise

CALL = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 8, "output_type": "pt"}


def draw(pipe: Any) -> torch.Tensor:
    image: torch.Tensor = pipe("a cat", generator=torch.Generator().manual_seed(0), return_dict=False, **CALL)[0]
    return image


def offload(pipe: Any, mode: Any, *, stage: HostStage | None = None, **config: Any) -> Offloaded:
    return apply_offload(pipe, OffloadConfig(mode, **config), stage=stage or HostStage())


def offload_in(mode: str, pipe: Any) -> Offloaded:
    """By model, layerwise, or within a budget in which a part of the denoiser streams."""
    if mode != "budget":
        return offload(pipe, mode)
    planned = prepare_offload(pipe, OffloadConfig("layerwise"), stage=HostStage()).plan.component("transformer")
    return offload(pipe, "auto", activations=0, gpu_memory=(planned.num_bytes + planned.device_bytes) // 2)


modes = pytest.mark.parametrize("mode", ["model", "layerwise", "budget"])


# ------------------------------------------------------------------------------------------------ on and off


@modes
def test_off_again_leaves_no_trace(mode: str) -> None:
    pipe = tiny_flux_pipeline()
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    expected = draw(pipe)  # diffusers leaves its own trace in the first run.
    inside = {id(m): (type(m), set(vars(m))) for part in modules.values() for m in part.modules()}
    weights = {name: copy.deepcopy(part.state_dict()) for name, part in modules.items()}
    objects = [id(p) for part in modules.values() for p in part.parameters()]
    attributes, cls = set(vars(pipe)), type(pipe)
    offloaded = offload_in(mode, pipe)
    assert torch.equal(draw(pipe), expected)
    offloaded.detach()
    offloaded.detach()
    assert inside == {id(m): (type(m), set(vars(m))) for part in modules.values() for m in part.modules()}
    assert objects == [id(p) for part in modules.values() for p in part.parameters()]
    assert (set(vars(pipe)), type(pipe)) == (attributes, cls)
    for name, part in modules.items():
        assert all(torch.equal(value, weights[name][key]) for key, value in part.state_dict().items())
    assert torch.equal(draw(pipe), expected)
    assert (offloaded.stage.stats.held_bytes, offloaded.stage.registered) == (0, {})  # type: ignore[attr-defined]


@pytest.mark.parametrize("tiny", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("mode", ["model", "layerwise"])
def test_whole_pipelines_give_the_same_bits_within_the_planned_peak(tiny: Any, mode: Any) -> None:
    pipe = tiny.build(0)
    expected = tiny.run(pipe, steps=2, output_type="pt")
    stage = HostStage(lazy=mode == "model")
    offloaded = offload(pipe, mode, stage=stage)
    for _ in range(3):
        assert torch.equal(tiny.run(pipe, steps=2, output_type="pt"), expected)
    assert stage.stats.peak_held_bytes <= offloaded.plan.peak_bytes
    offloaded.detach()
    assert torch.equal(tiny.run(pipe, steps=2, output_type="pt"), expected)


def test_what_is_prepared_has_a_plan_and_has_changed_nothing() -> None:
    pipe = tiny_flux_pipeline(0)
    expected = draw(pipe)
    modules = [module for part in (pipe.transformer, pipe.text_encoder, pipe.vae) for module in part.modules()]
    before = [(type(module), frozenset(vars(module))) for module in modules]
    stage = HostStage()
    offloaded = prepare_offload(pipe, OffloadConfig("layerwise", skipped=0.5), stage=stage)
    assert offloaded.plan.component("transformer").placement == "streams"
    assert [(type(module), frozenset(vars(module))) for module in modules] == before
    assert stage.stats.held_bytes == stage.stats.sent_bytes == 0
    offloaded.start()
    assert torch.equal(draw(pipe), expected)
    stats = offloaded.stats()
    assert min(stats.sent_bytes, stats.pinned_bytes, stats.setup_s) > 0
    assert stats.component_loads == {"transformer": 1, "text_encoder": 1, "text_encoder_2": 1, "vae": 1}
    offloaded.detach()
    assert [(type(module), frozenset(vars(module))) for module in modules] == before


def test_out_of_memory_while_applying_undoes_everything() -> None:
    pipe = tiny_flux_pipeline()
    expected, attributes, cls = draw(pipe), set(vars(pipe)), type(pipe)
    for capacity in (0, 40_000, 100_000):
        stage = HostStage(capacity=capacity)
        with pytest.raises(torch.OutOfMemoryError):
            offload(pipe, "auto", stage=stage, gpu_memory="1GiB", activations=0)
        assert stage.stats.held_bytes == 0
        assert (set(vars(pipe)), type(pipe)) == (attributes, cls)
        assert torch.equal(draw(pipe), expected)


def test_all_the_memory_there_is_where_nothing_is_said() -> None:
    pipe = tiny_flux_pipeline()
    expected = draw(pipe)
    with offload(pipe, "auto", activations=0) as offloaded:
        assert not offloaded.plan.offloads_anything
        assert offloaded.stage.is_here(pipe.vae.decoder.conv_in.weight)
    with offload(pipe, "auto", activations=0, stage=HostStage(capacity=200_000)) as offloaded:
        assert offloaded.plan.take_turns
        assert torch.equal(draw(pipe), expected)


def test_a_new_plan_within_a_budget_keeps_what_fits() -> None:
    case = CASES["QwenImageTransformer2DModel"]
    model = type(case.build())(**{**case.config, "num_layers": 8}).eval()
    expected, holder = case.run(model, 0), Holder(transformer=model)
    offloaded = layerwise(holder)
    whole = offloaded.plan.component("transformer").num_bytes
    streamed = []
    for share in (0.5, 0.7, 0.85, 1.0):
        plan = offloaded.replan(mode="auto", gpu_memory=int(share * whole), activations=0, precompute=False)
        streamed.append(len(plan.component("transformer").streamed))
        offloaded.stage.peak_bytes()  # From here on.
        with running(holder):
            for _ in range(2):
                assert zoo.equal(case.run(model, 0), expected)
        assert offloaded.stage.peak_bytes() <= plan.peak_bytes <= share * whole
    assert streamed == sorted(streamed, reverse=True)
    assert 0 < streamed[2] < streamed[0] < 8
    assert streamed[3] == 0
    offloaded.detach()
    assert zoo.equal(case.run(model, 0), expected)


def test_a_lone_model_and_the_device_of_a_pipeline() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    expected = case.run(model, 0)
    with layerwise(model) as offloaded:
        assert zoo.equal(case.run(model, 0), expected)
        assert offloaded.stats().block_loads == len(offloaded.plan.component("transformer").streamed)
    assert "_samovar_hooks" not in vars(model)
    pipe = tiny_flux_pipeline()
    with offload(pipe, "model") as offloaded:
        offloaded.execution_device = torch.device("meta")  # One that no component is on.
        assert pipe.device == pipe._execution_device == torch.device("meta"), "it makes its latents where it computes"
    assert pipe.device == torch.device("cpu")


# ------------------------------------------------------------------------------------------------ refusals


def test_refusals_by_name() -> None:
    from diffusers.hooks import apply_group_offloading

    pipe = tiny_flux_pipeline()
    with (
        offload(pipe, "model"),
        pytest.raises(SettingError, match=r"transformer is offloaded already. Call samovar.detach\(pipe\)"),
    ):
        offload(pipe, "layerwise")
    with pytest.raises(ModelError, match="There is nothing to offload"):
        offload(Holder(), "model")
    with pytest.raises(ModelError, match="No blocks to stream"):
        offload(Holder(transformer=torch.nn.Linear(2, 2)), "layerwise")
    with pytest.raises(SettingError, match="frames=9 means nothing to FluxPipeline"):
        offload(pipe, "auto", gpu_memory="1GiB", frames=9)
    with pytest.raises(SettingError, match="FluxPipeline makes height=16 of height=17"):
        offload(pipe, "auto", gpu_memory="1GiB", height=17)
    assert not any(HOOK in HookRegistry.get_or_create(module) for module in pipe.transformer.modules())
    apply_group_offloading(pipe.text_encoder_2, onload_device=torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(SettingError, match=r"text_encoder_2.* is offloaded by accelerate or diffusers"):
        offload(pipe, "model")


def test_cuda_graphs_are_refused_by_name() -> None:
    block, plain = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    block.compile(mode="reduce-overhead")
    plain.compile()
    with pytest.raises(SettingError, match=r"transformer\.blocks\.0 is compiled with CUDA graphs"):
        check_compiled("transformer.blocks.0", block)
    with pytest.raises(SettingError, match="CUDA graphs"):
        check_compiled("block", torch.compile(torch.nn.Linear(2, 2), mode="reduce-overhead"))
    check_compiled("block", plain)


def test_gradients_are_refused_where_somebody_wants_them() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    bare = model(**case.inputs(0), return_dict=False)[0]
    with layerwise(Holder(transformer=model)):
        output = model(**case.inputs(0), return_dict=False)[0]
        assert torch.equal(output, bare)
        assert not output.requires_grad, "and none are computed where nobody does"
        with pytest.raises(SettingError, match=r"torch\.no_grad\(\)"):
            model.train()(**case.inputs(0))
    assert model.eval()(**case.inputs(0))[0].requires_grad


def test_activations_are_counted_at_the_size_that_is_said() -> None:
    pipe = tiny_flux_pipeline()
    before = draw(pipe)
    offloaded = offload(pipe, "auto", gpu_memory="1GiB", height=16, width=24)
    counted = {part.name: part.activation_bytes for part in offloaded.plan.components}
    assert counted == dict(activations_of(pipe, RequestSize(16, 24)).by_name)
    assert offloaded.plan.notes[0] == "activations are those of 24 x 16 pixels, and 10% and 256 MiB to spare"
    larger = offloaded.replan(height=160, width=240)
    assert larger.component("vae").activation_bytes > counted["vae"]
    given = offloaded.replan(activations={"vae": "1MiB"})
    assert given.component("vae").activation_bytes == 2**20
    assert given.component("transformer").activation_bytes > counted["transformer"]
    assert offloaded.replan(activations="2MiB").notes == ()
    assert torch.equal(draw(pipe), before)
    offloaded.detach()


# ------------------------------------------------------------------------------------------------ taking turns


def held(offloaded: Offloaded) -> set[str]:
    """The components that have something on the device."""
    return {name for name, component in offloaded._components.items() if component.held_bytes}


def test_one_at_a_time_by_any_entry_point() -> None:
    pipe = tiny_flux_pipeline()
    offloaded = offload(pipe, "model", exclude=("vae",), stage=HostStage(lazy=True))
    movers = {name: getattr(pipe, name) for name in ("transformer", "text_encoder", "text_encoder_2")}
    seen = []
    for name, mover in movers.items():
        mover.register_forward_pre_hook(lambda *_, name=name: seen.append((name, *held(offloaded))))
    pipe("a cat", num_inference_steps=2, height=16, width=16, max_sequence_length=8, output_type="latent")
    assert seen == [(name, name) for name in ("text_encoder", "text_encoder_2", "transformer", "transformer")]
    with torch.no_grad():
        pipe.encode_prompt("a cat", None, max_sequence_length=8)
        assert held(offloaded) == {"text_encoder_2"}
        parts = dict(pipe.text_encoder.named_modules())
        next(part for path, part in parts.items() if path.endswith("final_layer_norm"))(torch.zeros(1, 8))
        assert held(offloaded) == {"text_encoder"}
        pipe.transformer.single_transformer_blocks[1].attn.to_q(torch.zeros(1, 16))
        assert held(offloaded) == {"text_encoder"}, "inside a block there are no hooks"
    offloaded.detach()


def test_a_vae_encodes_and_decodes() -> None:
    pipe = tiny_flux_pipeline()
    image = torch.zeros(1, 3, 16, 16)
    with torch.no_grad():
        latents = pipe.vae.encode(image).latent_dist.mode()
        expected = pipe.vae.decode(latents).sample
        pipe.text_encoder = pipe.text_encoder_2 = None
        with offload(pipe, "model") as offloaded:
            assert torch.equal(pipe.vae.encode(image).latent_dist.mode(), latents)
            assert torch.equal(pipe.vae.decode(latents).sample, expected)
            assert held(offloaded) == {"vae"}


def layer(width: int = 8) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width))


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
    with offload(pipe, "model", stage=HostStage(lazy=True)) as offloaded:
        placements = {part.name: part.placement for part in offloaded.plan.components}
        assert placements == dict.fromkeys(("language_model.model", "vit_model", "vae"), "turns") | dict.fromkeys(
            ("time_embedder", "vae2llm"), "resident"
        )
        for _ in range(2):
            assert torch.equal(pipe(x), expected)
        assert all(map(offloaded.stage.is_here, (*pipe.time_embedder.parameters(), *pipe.vae2llm.parameters())))
        assert not offloaded.stage.is_here(pipe.language_model["head"][0].weight), "nobody declared it"
    assert torch.equal(pipe(x), expected)


def test_out_of_memory_on_the_way_in_leaves_everything_off_and_usable() -> None:
    holder = Holder(transformer=layer(), text_encoder=layer(64))
    small, x = holder.transformer, torch.randn(1, 8)
    expected = small(x)
    stage = HostStage(capacity=12_000)
    offloaded = offload(holder, "model", stage=stage)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                holder.text_encoder(torch.randn(1, 64))
            assert stage.stats.held_bytes == 0
            assert torch.equal(small(x), expected)
    offloaded.detach()
    assert HOOK not in HookRegistry.get_or_create(small)


# ------------------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "Lumina2Transformer2DModel"])
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
        assert offloaded.stats().late_blocks == before.late_blocks, "what was under way was used"
        assert zoo.equal(case.run(model, 3), expected[3])
    offloaded.detach()


def test_outside_of_a_run_nothing_is_sent_ahead_of_the_next_call() -> None:
    case = CASES["FluxTransformer2DModel"]
    holder = Holder(transformer=case.build())
    offloaded = layerwise(holder)
    whole = offloaded.plan.component("transformer").streamed_bytes
    for step in range(3):
        before = offloaded.stats().sent_bytes
        case.run(holder.transformer, step)
        assert blocks_on_device(offloaded) == []
        assert not step or whole * 0.9 < offloaded.stats().sent_bytes - before <= whole
    offloaded.detach()


def test_weights_that_blocks_share_stay_and_buffers_travel() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    one, other, last = model.single_transformer_blocks
    other.proj_out.weight = one.proj_out.weight
    last.attn.to_q.weight.data = last.attn.to_k.weight.data  # Overlapping inside one block.
    last.register_buffer("scale", torch.ones(3))
    expected = case.run(model, 0)
    holder = Holder(transformer=model)
    with layerwise(holder) as offloaded, running(holder):
        assert offloaded.stage.is_here(one.proj_out.weight)
        assert zoo.equal(case.run(model, 0), expected)
    assert other.proj_out.weight is one.proj_out.weight
    assert last.attn.to_q.weight.data_ptr() == last.attn.to_k.weight.data_ptr()
    assert zoo.equal(case.run(model, 0), expected)


def test_compiled_blocks_are_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    case = CASES["QwenImageTransformer2DModel"]
    model = case.build()
    holder, counter = Holder(transformer=model), CompileCounter()
    torch._dynamo.reset()
    for block in model.transformer_blocks:
        block.compile(backend=counter)
    with torch.no_grad():
        expected = model(**case.inputs(0), return_dict=False)[0]
        first = counter.frame_count
        with layerwise(holder), running(holder):
            for _ in range(3):
                assert torch.equal(model(**case.inputs(0), return_dict=False)[0], expected)
    assert first > 0
    assert counter.frame_count <= 2 * first, "once more, because of the hooks, and not for each new address"


# ------------------------------------------------------------------------------------------------ measuring


class Work(ModelHook):
    """Takes a second of the device's clock, and some of its memory."""

    def __init__(self, stage: Any, num_bytes: int) -> None:
        self._stage, self._num_bytes = stage, num_bytes

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        buffer = self._stage.allocate(self._num_bytes)
        self._stage.timeline.compute(1.0)
        self._stage.free(buffer)
        return args, kwargs


def test_blocks_are_timed_where_they_compute_and_needs_are_beside_the_weights() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    holder, blocks = Holder(transformer=model), blocks_of(model)
    offloaded = layerwise(holder)
    with offloaded.measure(), running(holder), hooked(blocks, lambda path: Work(offloaded.stage, 1000)):
        for step in range(3):
            case.run(model, step)
    plan = offloaded.replan(mode="auto", gpu_memory=10**9)
    assert offloaded.history.needs["transformer"] == with_margin(1000)
    assert plan.component("transformer").activation_bytes > with_margin(1000), "torch's allocator leaves holes"
    assert plan.component("transformer").resident_s == pytest.approx(len(blocks))
    offloaded.detach()
    pipe = tiny_flux_pipeline()
    with (
        offload(pipe, "model") as offloaded,
        hooked({"": pipe.vae.decoder.conv_in}, lambda _: Work(offloaded.stage, 5000)),
    ):
        with offloaded.measure():
            draw(pipe)
        found = dict(offloaded.history.needs)
    assert found == dict.fromkeys(("text_encoder", "text_encoder_2", "transformer"), with_margin(0)) | {
        "vae": with_margin(5000)
    }
