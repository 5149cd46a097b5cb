"""Quantised models of every library: the bits of the bare model, however they are offloaded, and off again."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from samovar import attach, detach
from samovar.core.errors import ModelError, SettingError
from samovar.core.tensor_parts import num_bytes_of, take_apart
from samovar.hooks import HookRegistry
from samovar.offload import HostStage, OffloadConfig, apply_offload, host_tiers
from samovar.offload.layout import cast_for_calls, held_by

from .holding import Onlooker, blocks_of
from .quantised import KINDS, pipeline_with, plain_flux

CALL = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 8, "output_type": "pt"}
LAYERWISE = {"mode": "layerwise", "device": "cpu"}
FEW = ("torchao-int8", "quanto-int4", "bitsandbytes-nf4", "bitsandbytes-int8", "gguf-q4", "layerwise-casting")
"""One of each way in which a library keeps its tensors; the others are slow tests."""


def all_kinds(few: Sequence[str]) -> Any:
    """Every kind, those that are not among a few as slow tests."""
    kinds = [kind if kind in few else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
    return pytest.mark.parametrize("kind", kinds)


every, briefly = all_kinds(FEW), all_kinds(["torchao-int8", "gguf-q4"])


def build(kind: str) -> Any:
    return pipeline_with(KINDS[kind](plain_flux()))


def draw(pipe: Any, **settings: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    image: torch.Tensor = pipe("a cat", generator=generator, return_dict=False, **CALL | settings)[0]
    assert image.isfinite().all()
    return image


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Look(Onlooker):
    """Sees whether all that a block's weights are made of is on the device while it computes."""

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        plain = take_apart(held_by(module)).plain
        self._log.append((self._path, all(map(self._offloaded.stage.is_here, plain)), len(plain)))
        return args, kwargs


@every
def test_offloaded_it_gives_the_bits_of_the_bare_model(kind: str) -> None:
    pipe = build(kind)
    expected = draw(pipe)
    transformer = pipe.transformer
    held = held_by(transformer)
    objects, before = [*map(id, held)], [part.detach().clone() for part in take_apart(held).plain]
    assert num_bytes_of(held) < 0.75 * num_bytes_of(plain_flux().parameters())
    streamed = apply_offload(pipe, OffloadConfig("layerwise", activations=0), stage=HostStage(lazy=True))
    part, seen = streamed.plan.component("transformer"), []
    assert part.num_bytes < 1.6 * num_bytes_of(held)  # Many tiny tensors, each aligned.
    for path, block in blocks_of(transformer).items():
        HookRegistry.get_or_create(block).register_hook("test", Look(streamed, path, seen))
    assert torch.equal(draw(pipe), expected)
    assert seen
    assert all(is_here for _, is_here, _ in seen)
    assert not any(map(streamed.stage.is_here, take_apart(held_by(transformer.transformer_blocks)).plain))
    streamed.detach()
    for block in blocks_of(transformer).values():
        HookRegistry.get_or_create(block).remove_hook("test")
    budget = (part.num_bytes + part.device_bytes) // 2
    for settings in ({"mode": "model"}, {"gpu_memory": budget, "activations": 0}):
        offloaded = apply_offload(pipe, OffloadConfig(**settings), stage=HostStage())
        assert torch.equal(draw(pipe), expected)
        assert 0 < len(offloaded.plan.component("transformer").streamed) < 4 or "mode" in settings
        offloaded.detach()
    assert torch.equal(draw(pipe), expected)
    assert objects == [*map(id, held_by(transformer))]
    after = take_apart(held_by(transformer)).plain
    assert all(torch.equal(bits(one), bits(two)) for one, two in zip(after, before, strict=True))


@every
def test_with_a_cache_too(kind: str) -> None:
    expected = draw(build(kind))
    pipe = build(kind)  # Not called yet: some libraries change their layers in the first call.
    with attach(pipe, cache={"backend": "tea_cache", "rel_l1_thresh": 0.0}):
        assert torch.equal(draw(pipe), expected)
    schedule = {"backend": "tea_cache", "schedule": "#.#."}
    with attach(pipe, cache=schedule):
        alone = draw(pipe, num_inference_steps=4)
    with attach(pipe, cache=schedule, offload=LAYERWISE) as attached:
        assert torch.equal(draw(pipe, num_inference_steps=4), alone)
        assert attached.stats().offload.block_loads == 2 * 4
    assert torch.equal(draw(pipe), expected)


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")
@briefly
def test_an_adapter_comes_and_goes(kind: str) -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig

    if kind == "layerwise-casting":
        pytest.skip("peft's layers are cast to float8 as well, in which they cannot compute")
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "proj_out"])

    def add(pipe: Any) -> Any:
        torch.manual_seed(0)
        pipe.transformer.add_adapter(config, adapter_name="one")
        return pipe

    pipe = build(kind)
    bare = draw(pipe)
    adapted = draw(add(build(kind)))
    assert not torch.equal(bare, adapted)
    with attach(pipe, offload=LAYERWISE):
        assert torch.equal(draw(pipe), bare)
        assert torch.equal(draw(add(pipe)), adapted)
        pipe.transformer.disable_adapters()
        assert torch.equal(draw(pipe), bare)
        pipe.transformer.enable_adapters()
        assert torch.equal(draw(pipe), adapted)
    assert torch.equal(draw(pipe), adapted)


@briefly
def test_what_is_saved_in_between_is_the_model(kind: str) -> None:
    pipe = build(kind)
    expected = draw(pipe)
    before = copy.copy(pipe.transformer.state_dict())
    saved = {key: [bits(part).clone() for part in take_apart([value]).plain] for key, value in before.items()}
    with attach(pipe, offload=LAYERWISE):
        draw(pipe)
        state = pipe.transformer.state_dict()
        assert state.keys() == saved.keys()
        for key, value in state.items():
            assert all(map(torch.equal, map(bits, take_apart([value]).plain), saved[key])), key
        if kind.startswith(("gguf", "bitsandbytes")):
            return  # torch cannot save the first, and the second is loaded by a quantiser alone.
        file = io.BytesIO()
        torch.save(state, file)
        assert file.tell() < 1.5 * num_bytes_of(state.values()) + 2**17, "whole rings or chunks are saved"
    file.seek(0)
    other = build(kind)
    with attach(other, offload=LAYERWISE):
        draw(other)
        with torch.no_grad():
            for part in take_apart(held_by(other.transformer)).plain:
                part.data = torch.zeros_like(part.data)
        assert not torch.equal(other.transformer.x_embedder.weight, pipe.transformer.x_embedder.weight)
        other.transformer.load_state_dict(torch.load(file, weights_only=False), assign=kind.startswith("torchao"))
        assert torch.equal(draw(other), expected)
    assert torch.equal(draw(other), expected)


@briefly
def test_weights_that_are_not_pinned(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tiers, "PINNABLE", 1e-9)
    pipe = build(kind)
    expected = draw(pipe)
    offloaded = apply_offload(pipe, OffloadConfig("layerwise", exclude="text_encoder_2"), stage=HostStage(lazy=True))
    assert offloaded.tiers.bytes_in("pageable") > 0
    assert torch.equal(draw(pipe), expected)
    offloaded.detach()
    assert torch.equal(draw(pipe), expected)


UNTRACEABLE = ("gguf-q4", "gguf-q8", "quanto-int4")
"""What torch.compile fails on."""


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # What bitsandbytes does there.
@pytest.mark.parametrize(
    "kind", [kind if kind in UNTRACEABLE else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_compiled_blocks(kind: str) -> None:
    pipe = build(kind)
    if kind in UNTRACEABLE:
        with pytest.raises(SettingError, match=r"transformer_blocks\.0 cannot be compiled: torch.compile cannot trace"):
            attach(pipe, compile="aot_eager", offload=LAYERWISE)
        assert torch.equal(draw(pipe), draw(build(kind)))  # Nothing has moved.
        return
    with attach(pipe, compile="aot_eager"):
        expected = draw(pipe)
        with attach(pipe, offload=LAYERWISE):
            assert torch.equal(draw(pipe), expected)
            assert torch.equal(draw(pipe), expected)
        assert torch.equal(draw(pipe), expected)
    torch.compiler.reset()


def test_several_kinds_in_one_block() -> None:
    model = plain_flux()
    block = model.transformer_blocks[0]
    for kind, path in (("torchao-int8", "attn"), ("bitsandbytes-nf4", "ff"), ("quanto-int8", "ff_context")):
        part = torch.nn.ModuleDict({"transformer_blocks": torch.nn.ModuleList([block.get_submodule(path)])})
        KINDS[kind](part)
    kinds = {type(parameter).__name__ for parameter in block.parameters()}
    assert {"Int8Tensor", "Params4bit", "WeightQBytesTensor", "Parameter"} <= kinds
    pipe = pipeline_with(model)
    expected = draw(pipe)
    with attach(pipe, offload=LAYERWISE, cache={"backend": "tea_cache", "rel_l1_thresh": 0.0}):
        assert torch.equal(draw(pipe), expected)
    assert torch.equal(draw(pipe), expected)


def test_changes_of_a_wrapper_are_kept() -> None:
    pipe, other = build("torchao-int8"), build("torchao-int8")
    weight = "transformer_blocks.0.ff.net.2"
    with attach(pipe, offload=LAYERWISE) as attached:
        draw(pipe)
        for model in (pipe.transformer, other.transformer):
            layer = model.get_submodule(weight)
            with torch.no_grad():
                layer.weight.copy_(copy.deepcopy(model.get_submodule("transformer_blocks.1.ff.net.2").weight))
        expected = draw(other)
        assert torch.equal(draw(pipe), expected)
        for model in (pipe.transformer, other.transformer):  # Through the inner tensor, which nobody counts.
            model.get_submodule(weight).weight.scale.data.mul_(2.0)
        changed = draw(other)
        assert torch.equal(draw(pipe), changed)
        for model in (pipe.transformer, other.transformer):  # Another inner tensor.
            inner = model.get_submodule(weight).weight
            inner.qdata = inner.qdata.flip(0).contiguous()
        swapped = draw(other)
        seen: list[Any] = []
        block = pipe.transformer.transformer_blocks[0]
        HookRegistry.get_or_create(block).register_hook("test", Look(attached.offloaded, "", seen))
        assert torch.equal(draw(pipe), swapped)
        assert all(is_here for _, is_here, _ in seen)
        HookRegistry.get_or_create(block).remove_hook("test")
    assert not torch.equal(changed, expected)
    assert not torch.equal(swapped, changed)
    assert torch.equal(draw(pipe), swapped)


def test_the_state_of_a_layer_moves_with_its_weight() -> None:
    pipe = build("bitsandbytes-int8")
    layer = pipe.transformer.transformer_blocks[0].ff.net[2]
    seen: list[bool] = []
    with attach(pipe, offload=LAYERWISE) as attached:
        stage = attached.offloaded.stage

        def look(module: Any, args: Any) -> None:
            held = [
                tensor
                for tensor in (module.weight.CB, module.weight.SCB, module.state.CB, module.state.SCB)
                if tensor is not None
            ]
            seen.append(
                len(held) == 2 and all(map(stage.is_here, held)) and held[0].data_ptr() == module.weight.data_ptr()
            )

        handle = layer.register_forward_pre_hook(look)
        for _ in range(2):
            draw(pipe)
            assert not stage.is_here(layer.state.CB)
            assert not stage.is_here(layer.state.SCB)
            assert layer.state.CB.data_ptr() == layer.weight.data_ptr()
        handle.remove()
    assert seen
    assert all(seen)


def test_a_change_in_a_call_is_kept() -> None:
    pipe = build("torchao-int8")
    layer = pipe.transformer.transformer_blocks[1].ff.net[2]
    done: list[bool] = []

    def edit(module: torch.nn.Module, args: Any) -> None:
        if not done:
            done.append(True)
            with torch.no_grad():
                module.weight.copy_(copy.deepcopy(pipe.transformer.transformer_blocks[1].ff_context.net[2].weight))

    layer.register_forward_pre_hook(edit)
    with attach(pipe, offload=LAYERWISE):
        draw(pipe)
        context = pipe.transformer.transformer_blocks[1].ff_context.net[2]
        assert torch.equal(layer.weight.qdata, context.weight.qdata)
    assert torch.equal(layer.weight.qdata, context.weight.qdata)


def test_casts_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from samovar.offload import weight_group

    pipe = build("layerwise-casting")
    expected = draw(pipe)
    assert cast_for_calls(pipe.transformer.transformer_blocks[0])
    monkeypatch.setattr(weight_group, "bits", None)  # Comparing would mean to wait for the device.
    with attach(pipe, offload=LAYERWISE):
        assert torch.equal(draw(pipe), expected)


def test_what_two_components_share() -> None:
    pipe = build("torchao-int8")
    shared = pipe.transformer.transformer_blocks[0].ff.net[2].weight
    pipe.transformer.transformer_blocks[1].ff.net[2].weight = shared
    expected = draw(pipe)
    with attach(pipe, offload=LAYERWISE) as attached:
        assert "shared weights" in str(attached.offloaded.plan)
        assert torch.equal(draw(pipe), expected)
    assert pipe.transformer.transformer_blocks[0].ff.net[2].weight is shared
    assert torch.equal(draw(pipe), expected)


def test_weights_that_were_packed_for_a_cpu_are_refused_on_a_gpu() -> None:
    from samovar.offload.layout import check_movable

    model = KINDS["bitsandbytes-nf4"](plain_flux())
    check_movable("transformer", model, torch.device("cuda"))
    model.transformer_blocks[0].ff.net[2].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ModelError, match=r"ff\.net\.2\.weight cannot be offloaded: it is a bitsandbytes.*packed for"):
        check_movable("transformer", model, torch.device("cuda"))
    packed = KINDS["torchao-int4-packed"](plain_flux())
    with pytest.raises(ModelError, match=r"is a torchao\..* that is packed for the CPU; quantise it on the GPU"):
        check_movable("transformer", packed, torch.device("cuda"))


def test_what_cannot_be_moved_can_be_left_out() -> None:
    pipe = build("torchao-int8")
    expected = draw(pipe)
    pipe.text_encoder.register_buffer("odd", torch.zeros(2, 2).to_sparse())
    with pytest.raises(ModelError, match=r"text_encoder\.odd cannot be offloaded.*exclude='text_encoder'"):
        attach(pipe, offload=LAYERWISE)
    with attach(pipe, offload=LAYERWISE, exclude="text_encoder"):
        assert torch.equal(draw(pipe), expected)
    detach(pipe)
