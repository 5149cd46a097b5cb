"""The whole: applied and removed without a trace, replanned, with adapters, casts and moves, and refusals by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from pipelines import tiny_flux_pipeline
from samovar.core.errors import ModelError, SettingError
from samovar.hooks import HookRegistry, running
from samovar.offload import HostStage, OffloadConfig, apply_offload, prepare_offload
from samovar.offload.apply import check_compiled
from samovar.offload.moving import HOOK
from samovar.trace.activations import activations_of
from samovar.trace.dry_run import RequestSize

from .holding import CASES, Holder, layerwise

CALL = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 8, "output_type": "pt"}


def draw(pipe: Any) -> torch.Tensor:
    image: torch.Tensor = pipe("a cat", generator=torch.Generator().manual_seed(0), return_dict=False, **CALL)[0]
    return image


def offload(pipe: Any, mode: Any, **config: Any) -> Any:
    return apply_offload(pipe, OffloadConfig(mode, **config), stage=HostStage())


def least(pipe: Any) -> int:
    """A budget in which the denoiser streams in part."""
    planned = offload(pipe, "layerwise", activations=0)
    plan = planned.plan
    planned.detach()
    whole = plan.component("transformer").num_bytes
    return (whole + plan.component("transformer").device_bytes) // 2


MODES: list[dict[str, Any]] = [
    {"mode": "model"},
    {"mode": "layerwise"},
    {"mode": "auto", "activations": 0, "gpu_memory": least},
]


@pytest.fixture(params=MODES, ids=["model", "layerwise", "budget"])
def settings(request: pytest.FixtureRequest) -> Any:
    def fill(pipe: Any) -> dict[str, Any]:
        return {key: value(pipe) if callable(value) else value for key, value in request.param.items()}

    return fill


def test_off_again_leaves_no_trace(settings: Any) -> None:
    pipe = tiny_flux_pipeline()
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    expected = draw(pipe)  # diffusers leaves its own trace in the first run.
    inside = {id(m): (type(m), set(vars(m))) for part in modules.values() for m in part.modules()}
    weights = {name: copy.deepcopy(part.state_dict()) for name, part in modules.items()}
    objects = [id(p) for part in modules.values() for p in part.parameters()]
    attributes, cls = set(vars(pipe)), type(pipe)
    offloaded = offload(pipe, **settings(pipe))
    assert torch.equal(draw(pipe), expected)
    offloaded.detach()
    offloaded.detach()
    assert inside == {id(m): (type(m), set(vars(m))) for part in modules.values() for m in part.modules()}
    assert objects == [id(p) for part in modules.values() for p in part.parameters()]
    assert (set(vars(pipe)), type(pipe)) == (attributes, cls)
    for name, part in modules.items():
        assert all(torch.equal(value, weights[name][key]) for key, value in part.state_dict().items())
    assert torch.equal(draw(pipe), expected)
    assert offloaded.stage.stats.held_bytes == 0


def test_a_budget_keeps_some_blocks_and_streams_the_rest() -> None:
    case = CASES["QwenImageTransformer2DModel"]
    model = type(case.build())(**{**case.config, "num_layers": 8}).eval()
    expected = case.run(model, 0)
    holder = Holder(transformer=model)
    offloaded = layerwise(holder)
    whole = offloaded.plan.component("transformer").num_bytes
    streamed = []
    for share in (0.5, 0.7, 0.85, 1.0):
        plan = offloaded.replan(mode="auto", gpu_memory=int(share * whole), activations=0)
        streamed.append(len(plan.component("transformer").streamed))
        offloaded.stage.peak_bytes()  # From here on.
        with running(holder):
            for _ in range(2):
                assert zoo.equal(case.run(model, 0), expected)
        assert offloaded.stage.peak_bytes() == plan.peak_bytes <= share * whole
    assert streamed == sorted(streamed, reverse=True)
    assert 0 < streamed[2] < streamed[0] < 8
    assert streamed[3] == 0
    offloaded.detach()
    assert zoo.equal(case.run(model, 0), expected)


def test_pieces_of_blocks_go_round_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("weights", "host"):
        monkeypatch.setattr(f"samovar.offload.{module}.LEAST_PIECE", 600)
    for name in ("FluxTransformer2DModel", "SD3Transformer2DModel", "HunyuanVideoTransformer3DModel"):
        case = CASES[name]
        model = case.build()
        expected = [case.run(model, step) for step in range(3)]
        for lazy in (False, True):
            holder = Holder(transformer=model)
            offloaded = layerwise(holder, lazy=lazy)
            plan = offloaded.plan.component("transformer")
            largest = max(size.num_bytes for size in offloaded._sizes[0].blocks)
            assert plan.ring_bytes < 2 * largest
            with running(holder):
                for step in range(3):
                    assert zoo.equal(case.run(model, step), expected[step])
            offloaded.detach()


def test_the_pipeline_makes_its_latents_where_it_computes() -> None:
    pipe = tiny_flux_pipeline()
    offloaded = offload(pipe, "model")
    offloaded.execution_device = torch.device("meta")  # One that no component is on.
    assert pipe.device == pipe._execution_device == torch.device("meta")
    offloaded.detach()
    assert pipe.device == torch.device("cpu")


def lora(pipe: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(0)
    targets = ["to_q", "to_k", "proj_mlp"]
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


def test_adapters_before_and_after(settings: Any) -> None:
    bare = tiny_flux_pipeline()
    plain = draw(bare)
    lora(bare)
    expected = draw(bare)
    assert not torch.equal(plain, expected)
    with_it = tiny_flux_pipeline()
    lora(with_it)
    offloaded = offload(with_it, **settings(with_it))
    assert torch.equal(draw(with_it), expected)
    offloaded.detach()
    pipe = tiny_flux_pipeline()
    offloaded = offload(pipe, **settings(pipe))
    assert torch.equal(draw(pipe), plain)
    lora(pipe)
    assert torch.equal(draw(pipe), expected)
    pipe.transformer.delete_adapters("default")
    assert torch.equal(draw(pipe), plain)
    lora(pipe)
    offloaded.detach()
    assert torch.equal(draw(pipe), expected)


def test_a_fused_adapter_is_kept(settings: Any) -> None:
    bare = tiny_flux_pipeline()
    lora(bare)
    bare.transformer.fuse_lora()
    expected = draw(bare)
    pipe = tiny_flux_pipeline()
    lora(pipe)
    offloaded = offload(pipe, **settings(pipe))
    draw(pipe)
    pipe.transformer.fuse_lora()
    assert torch.equal(draw(pipe), expected)
    offloaded.detach()
    assert torch.equal(draw(pipe), expected)


def test_moves_and_casts_while_offloaded(settings: Any) -> None:
    pipe = tiny_flux_pipeline()
    expected = draw(pipe)
    offloaded = offload(pipe, **settings(pipe))
    pipe.to("cpu")
    assert torch.equal(draw(pipe), expected)
    pipe.to(torch.float64)
    double = draw(pipe)
    assert double.dtype == torch.float64
    pipe.transformer.load_state_dict(
        {key: value.clone() for key, value in pipe.transformer.state_dict().items()}, assign=True
    )
    assert torch.equal(draw(pipe), double)
    offloaded.detach()
    assert torch.equal(draw(pipe), double)


def test_saving_while_offloaded(settings: Any, tmp_path: Path) -> None:
    from diffusers import FluxPipeline

    pipe = tiny_flux_pipeline()
    expected = draw(pipe)
    offloaded = offload(pipe, **settings(pipe))
    draw(pipe)
    pipe.save_pretrained(tmp_path)
    offloaded.detach()
    again = FluxPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    bare = draw(again)  # Not the same bits on every processor: weights from a file begin elsewhere in a cache line.
    mapped = offload(again, **settings(again))  # Its weights may be pages of the files.
    assert torch.equal(draw(again), bare)
    mapped.detach()
    assert torch.equal(draw(zoo.as_built(again)), expected)


def test_out_of_memory_while_applying_undoes_everything() -> None:
    pipe = tiny_flux_pipeline()
    expected, attributes, cls = draw(pipe), set(vars(pipe)), type(pipe)
    for capacity in (0, 40_000, 100_000):
        stage = HostStage(capacity=capacity)
        with pytest.raises(torch.OutOfMemoryError):
            apply_offload(pipe, OffloadConfig("auto", gpu_memory="1GiB", activations=0), stage=stage)
        assert stage.stats.held_bytes == 0
        assert (set(vars(pipe)), type(pipe)) == (attributes, cls)
        assert torch.equal(draw(pipe), expected)


def test_all_the_memory_there_is_where_nothing_is_said() -> None:
    pipe = tiny_flux_pipeline()
    expected = draw(pipe)
    offloaded = apply_offload(pipe, OffloadConfig(activations=0), stage=HostStage())
    assert not offloaded.plan.offloads_anything
    offloaded.detach()
    offloaded = apply_offload(pipe, OffloadConfig(activations=0), stage=HostStage(capacity=200_000))
    assert offloaded.plan.take_turns
    assert torch.equal(draw(pipe), expected)
    offloaded.detach()


def test_a_lone_model() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    expected = case.run(model, 0)
    offloaded = layerwise(model)
    assert zoo.equal(case.run(model, 0), expected)
    assert offloaded.stats().block_loads == len(offloaded.plan.component("transformer").streamed)
    offloaded.detach()
    assert "_samovar_hooks" not in vars(model)


def test_stats_count_what_was_done() -> None:
    pipe = tiny_flux_pipeline()
    offloaded = offload(pipe, "model")
    stats = offloaded.stats()
    assert stats.component_loads == {"transformer": 0, "text_encoder": 0, "text_encoder_2": 0}
    assert stats.pinned_bytes > 0
    assert stats.setup_s > 0
    draw(pipe)
    assert offloaded.stats().component_loads == {"transformer": 1, "text_encoder": 1, "text_encoder_2": 1}
    assert offloaded.stats().sent_bytes > stats.sent_bytes
    offloaded.detach()


def test_refusals_by_name() -> None:
    pipe = tiny_flux_pipeline()
    offloaded = offload(pipe, "model")
    with pytest.raises(SettingError, match=r"transformer is offloaded already. Call samovar.detach\(pipe\)"):
        offload(pipe, "layerwise")
    offloaded.detach()
    with pytest.raises(ModelError, match="There is nothing to offload"):
        offload(Holder(), "model")
    with pytest.raises(ModelError, match="No blocks to stream"):
        offload(Holder(transformer=torch.nn.Linear(2, 2)), "layerwise")


def test_what_others_offload_is_refused() -> None:
    from diffusers.hooks import apply_group_offloading

    pipe = tiny_flux_pipeline()
    apply_group_offloading(pipe.text_encoder_2, onload_device=torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(SettingError, match=r"text_encoder_2.* is offloaded by accelerate or diffusers"):
        offload(pipe, "model")


def test_weights_that_diffusers_casts_layer_by_layer() -> None:
    case = CASES["FluxTransformer2DModel"]
    outputs = []
    for is_offloaded in (False, True):
        model = case.build()
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        holder = Holder(transformer=model)
        offloaded = layerwise(holder) if is_offloaded else None
        with running(holder):
            outputs.append([case.run(model, step) for step in range(2)])
        if offloaded is not None:
            offloaded.detach()
            outputs.append([case.run(model, step) for step in range(2)])
    assert zoo.equal(outputs[0], outputs[1])
    assert zoo.equal(outputs[0], outputs[2])


def test_what_is_prepared_has_a_plan_and_has_changed_nothing() -> None:
    pipe = tiny_flux_pipeline(0)
    expected = draw(pipe)
    modules = [module for part in (pipe.transformer, pipe.text_encoder, pipe.vae) for module in part.modules()]
    before = [(type(module), frozenset(vars(module))) for module in modules]
    stage = HostStage()
    offloaded = prepare_offload(pipe, OffloadConfig("layerwise", skipped=0.5), stage=stage)
    assert offloaded.plan.component("transformer").placement == "streams"
    assert offloaded.plan.skipped == 0.5
    assert [(type(module), frozenset(vars(module))) for module in modules] == before
    assert stage.stats.held_bytes == stage.stats.sent_bytes == 0
    offloaded.start()
    assert torch.equal(draw(pipe), expected)
    assert offloaded.stats().sent_bytes > 0
    offloaded.detach()
    assert [(type(module), frozenset(vars(module))) for module in modules] == before


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


def test_activations_are_counted_at_the_size_that_is_said() -> None:
    pipe = tiny_flux_pipeline()
    before = draw(pipe)
    offloaded = offload(pipe, "auto", gpu_memory="1GiB", height=16, width=24)
    counted = {part.name: part.activation_bytes for part in offloaded.plan.components}
    assert counted == dict(activations_of(pipe, RequestSize(16, 24)).by_name)
    assert offloaded.plan.notes == ("activations are those of 24 x 16 pixels, and 10% and 32 MiB to spare",)
    larger = offloaded.replan(height=160, width=240)
    assert larger.component("vae").activation_bytes > counted["vae"]
    assert "240 x 160" in larger.notes[0]
    given = offloaded.replan(activations={"vae": "1MiB"})
    assert given.component("vae").activation_bytes == 2**20
    assert given.component("transformer").activation_bytes > counted["transformer"]
    assert offloaded.replan(activations="2MiB").notes == ()
    assert torch.equal(draw(pipe), before)
    offloaded.detach()


def test_what_cannot_be_counted_is_measured_and_the_reason_is_said() -> None:
    pipe = tiny_flux_pipeline()

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such luck")

    pipe.vae.decoder.forward = fail
    offloaded = offload(pipe, "auto", gpu_memory="4GiB", height=16, width=24)
    vae = offloaded.plan.component("vae")
    assert (vae.is_measured, vae.beside_bytes, vae.placement) == (False, 0, "turns")
    assert offloaded.plan.component("transformer").activation_bytes < 2**26
    assert "what vae needs beside its weights is not known (RuntimeError: no such luck)" in offloaded.plan.notes[1]
    offloaded.detach()


def test_a_size_that_the_pipeline_does_not_make_is_refused_before_anything_moves() -> None:
    pipe = tiny_flux_pipeline()
    with pytest.raises(SettingError, match="frames=9 means nothing to FluxPipeline"):
        offload(pipe, "auto", gpu_memory="1GiB", frames=9)
    with pytest.raises(SettingError, match="FluxPipeline makes height=16 of height=17"):
        offload(pipe, "auto", gpu_memory="1GiB", height=17)
    assert not any(HOOK in HookRegistry.get_or_create(module) for module in pipe.transformer.modules())


def test_the_denoiser_has_left_when_the_vae_decodes() -> None:
    """Each has the room of the other: the phases of a run come one after the other."""
    bare, pipe, stage = tiny_flux_pipeline(), tiny_flux_pipeline(), HostStage()
    expected = draw(bare)
    offloaded = apply_offload(pipe, OffloadConfig("layerwise", activations=0, precompute=False), stage=stage)
    plans = offloaded.plan.component
    assert (plans("transformer").placement, plans("vae").placement) == ("streams", "resident")
    held: list[int] = []
    released: list[int] = []
    offloaded.stage.release_unused = lambda: released.append(stage.stats.held_bytes)  # type: ignore[method-assign]
    pipe.vae.decoder.register_forward_hook(lambda *_: held.append(stage.stats.held_bytes))
    for _ in range(2):
        assert torch.equal(draw(pipe), expected)
    assert held == [plans("vae").device_bytes] * 2
    assert released.count(held[0]) >= 2, "and torch has given back what it held in reserve"
    offloaded.detach()
    assert torch.equal(draw(pipe), expected)
