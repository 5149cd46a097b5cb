"""Weights are never lost or mixed: whoever changes them, when, and wherever they are at that time.

Each edit is made on a bare pipeline too, and every later picture and the weights in the end are the same bits.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from pipelines import PIPELINES
from samovar.hooks import running
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload
from samovar.offload.pinned import HostMemory
from samovar.offload.weight_group import WeightGroup

from .foreseen import count_small_layers
from .holding import CASES, Holder, layerwise

FLUX = PIPELINES["flux"]
STEPS = 4
Edit = Callable[[torch.nn.Module], None]


def offload(pipe: Any, mode: str, *, lazy: bool = False) -> Offloaded:
    stage = HostStage(lazy=lazy)
    if mode == "ahead":
        return apply_offload(pipe, OffloadConfig("layerwise", precompute=True, activations=0), stage=stage)
    if mode != "budget":
        return apply_offload(pipe, OffloadConfig(mode, activations=0), stage=stage)  # type: ignore[arg-type]
    offloaded = apply_offload(pipe, OffloadConfig("layerwise", activations=0), stage=stage)
    plan = offloaded.plan.component("transformer")
    offloaded.replan(mode="auto", gpu_memory=(plan.num_bytes + plan.device_bytes) // 2)
    plan = offloaded.plan.component("transformer")
    assert 0 < len(plan.streamed) < 5
    return offloaded


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    theirs = other.state_dict()
    mine = one.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@torch.no_grad()
def in_place(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(1.25)


def through_data(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(1.25)


def set_data(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 1.25


def load(module: torch.nn.Module) -> None:
    module.load_state_dict({name: tensor * 1.25 for name, tensor in module.state_dict().items()})


def assign(module: torch.nn.Module) -> None:
    module.load_state_dict({name: tensor * 1.25 for name, tensor in module.state_dict().items()}, assign=True)


def permute(module: torch.nn.Module) -> None:
    """A change that no plain sum shows."""
    for parameter in module.parameters():
        parameter.data.copy_(parameter.data.flip(0))


EDITS: dict[str, Edit] = {edit.__name__: edit for edit in (in_place, through_data, set_data, load, assign, permute)}
MODES = ["model", "layerwise", "budget", "ahead"]
"""The last with layers that see time alone computed ahead."""


@pytest.fixture(autouse=True)
def _small_layers_count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "ahead" in request.node.name:
        count_small_layers(monkeypatch)


@torch.no_grad()
def call_by_hand(pipe: Any, part: str) -> None:
    """So that the component is on the device, and stays there until another one is called."""
    if part == "transformer":
        ids = torch.zeros(24, 3), torch.zeros(8, 3)
        pipe.transformer(
            hidden_states=torch.zeros(1, 24, 4), encoder_hidden_states=torch.zeros(1, 8, 12), timestep=torch.ones(1),
            pooled_projections=torch.zeros(1, 8), img_ids=ids[0], txt_ids=ids[1], return_dict=False,
        )  # fmt: skip
    else:
        pipe.encode_prompt("a cat", None, device="cpu", max_sequence_length=8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("part", ["transformer", pytest.param("text_encoder_2", marks=pytest.mark.slow)])
def test_what_is_changed_on_the_device_outside_of_a_run_is_kept(mode: str, edit: str, part: str) -> None:
    bare, pipe = FLUX.build(0), FLUX.build(0)
    old = FLUX.run(bare, 2)
    EDITS[edit](getattr(bare, part))
    expected = FLUX.run(bare, 2)
    assert not torch.equal(old, expected)
    offloaded = offload(pipe, mode)
    assert torch.equal(FLUX.run(pipe, 2), old)
    call_by_hand(pipe, part)
    assert offloaded._components[part].held_bytes, "it has a copy on the device"
    assert not any(map(offloaded.stage.is_here, getattr(pipe, part).parameters())), "and the truth is on the host"
    EDITS[edit](getattr(pipe, part))
    assert same_state(getattr(pipe, part), getattr(bare, part))
    for _ in range(2):
        assert torch.equal(FLUX.run(pipe, 2), expected)
        assert same_state(getattr(pipe, part), getattr(bare, part))
    offloaded.detach()
    assert same_state(getattr(pipe, part), getattr(bare, part))
    assert torch.equal(FLUX.run(pipe, 2), expected)


@pytest.mark.parametrize("is_counted", [False, True])
def test_signs_that_are_flipped_together_on_the_device_are_kept(is_counted: bool) -> None:
    """An even number of highest bits cancels out in a plain sum."""

    def negate_a_column(pipe: Any) -> None:
        weight = pipe.transformer.context_embedder.weight
        with torch.no_grad():
            (weight if is_counted else weight.data)[:, 3].neg_()

    bare, pipe = FLUX.build(0), FLUX.build(0)
    negate_a_column(bare)
    offloaded = offload(pipe, "model")
    call_by_hand(pipe, "transformer")
    negate_a_column(pipe)
    assert torch.equal(FLUX.run(pipe, 2), FLUX.run(bare, 2))
    offloaded.detach()
    assert same_state(pipe.transformer, bare.transformer)


def editing(edit: str, at: int) -> Callable[..., Any]:
    """A callback that makes an edit after one step."""

    def change(pipe: Any, step: int, timestep: Any, kwargs: Any) -> Any:
        if step == at:
            EDITS[edit](pipe.transformer)
        return kwargs

    return change


@functools.cache
def bare_run(edit: str, at: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    bare = FLUX.build(0)
    first = FLUX.run(bare, STEPS, callback_on_step_end=editing(edit, at))
    return bare, first, FLUX.run(bare, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edit", EDITS)
def test_what_a_callback_changes_is_seen_from_the_next_step_on(mode: str, edit: str) -> None:
    for at in (0, 2):
        bare, first, second = bare_run(edit, at)
        pipe = FLUX.build(0)
        offloaded = offload(pipe, mode, lazy=at > 0)
        assert torch.equal(FLUX.run(pipe, STEPS, callback_on_step_end=editing(edit, at)), first), f"step {at}"
        assert same_state(pipe.transformer, bare.transformer)
        assert torch.equal(FLUX.run(pipe, 2), second)
        offloaded.detach()
        assert same_state(pipe.transformer, bare.transformer)


@pytest.mark.parametrize("mode", MODES)
def test_adapters_that_come_and_go_during_a_run(mode: str) -> None:
    from peft import LoraConfig

    def change(pipe: Any, step: int, timestep: Any, kwargs: Any) -> Any:
        if step == 0:
            torch.manual_seed(1)
            targets = ["to_q", "to_k", "x_embedder", "proj_out"]
            pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), "a")
        elif step == 2:
            pipe.transformer.fuse_lora()
        elif step == 3:
            pipe.transformer.unfuse_lora()
        elif step == 4:
            pipe.transformer.delete_adapters("a")
        return kwargs

    bare, pipe = FLUX.build(0), FLUX.build(0)
    expected = FLUX.run(bare, 6, callback_on_step_end=change), FLUX.run(bare, 2)
    offloaded = offload(pipe, mode, lazy=True)
    assert torch.equal(FLUX.run(pipe, 6, callback_on_step_end=change), expected[0])
    assert torch.equal(FLUX.run(pipe, 2), expected[1])
    offloaded.detach()
    assert same_state(pipe.transformer, bare.transformer)


def test_a_hook_inside_a_pass_changes_a_block_that_was_sent_already() -> None:
    case = CASES["FluxTransformer2DModel"]
    outputs = []
    for is_offloaded in (False, True):
        model = case.build()
        holder = Holder(transformer=model)
        offloaded = layerwise(holder) if is_offloaded else None
        last = model.single_transformer_blocks[-1]
        before = model.single_transformer_blocks[-2]
        before.register_forward_hook(lambda *_, last=last: in_place(last))
        with running(holder):
            outputs.append([case.run(model, step) for step in range(3)])
        if offloaded is not None:
            offloaded.detach()
    assert zoo.equal(outputs[0], outputs[1])


class Counting(torch.nn.Module):
    """A block that keeps statistics of its calls in every way."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.norm(self.attn(hidden_states))
        self.calls += 1
        self.mean.lerp_(hidden_states.mean(0), 0.1)
        self.total = self.total + hidden_states.sum()  # Another tensor.
        self.seen.data = torch.cat([self.seen, hidden_states[:1, 0]])  # Other data, of another shape.
        return hidden_states


class Kept(Counting):
    """The same as no block."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * y.sum()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Kept(8)
        self.blocks = torch.nn.ModuleList(Counting() for _ in range(3))

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        hidden_states = self.first(hidden_states, timestep)
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("lazy", [False, True])
def test_buffers_that_a_forward_updates_are_kept(lazy: bool, context: Any) -> None:
    bare, model = Model(), Model()
    x, t = torch.randn(4, 8), torch.ones(1)
    holder = Holder(transformer=model, text_encoder=torch.nn.Linear(2, 2))
    offloaded = layerwise(holder, lazy=lazy)
    assert offloaded.plan.component("transformer").streamed == {f"blocks.{index}" for index in range(3)}
    with context():
        for run in range(2):
            with running(holder):
                for _ in range(3):
                    assert torch.equal(model(x, t), bare(x, t))
            holder.text_encoder(torch.ones(1, 2))
            assert same_state(model, bare), run
            assert torch.equal(model(x, t), bare(x, t))  # Outside of a run.
    offloaded.detach()
    assert same_state(model, bare)
    assert int(model.blocks[1].calls) == 8


def test_what_does_not_change_is_not_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a device waited for: that takes a copy to the host."""
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    holder = Holder(transformer=model)
    offloaded = layerwise(holder)
    hosts = {tensor.data_ptr() for block in model.transformer_blocks for tensor in block.parameters()}
    written = []
    copy_ = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, *a, **k: (written.append(self.data_ptr()), copy_(self, *a, **k))[1]
    )
    with running(holder):
        case.run(model, 0)
    monkeypatch.undo()
    assert written
    assert not hosts & set(written)
    offloaded.detach()


@pytest.mark.parametrize("mode", ["model", "layerwise"])
@pytest.mark.parametrize("where", ["attach", "lora", "run", "detach"])
def test_no_parameter_becomes_an_inference_tensor(mode: str, where: str) -> None:
    from peft import LoraConfig

    pipe = FLUX.build(0)
    with torch.inference_mode(where == "attach"):
        offloaded = offload(pipe, mode)
    if where == "lora":
        FLUX.run(pipe, 1)
        pipe.transformer.add_adapter(LoraConfig(r=1, target_modules=["to_q", "proj_out"]))
    with torch.inference_mode():
        FLUX.run(pipe, 2)
        call_by_hand(pipe, "transformer")
        in_place(pipe.transformer)
        FLUX.run(pipe, 2)
    with torch.inference_mode(where == "detach"):
        offloaded.detach()
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert not any(tensor.is_inference() for part in modules for tensor in (*part.parameters(), *part.buffers()))
    pipe.transformer.requires_grad_(True)
    optimizer = torch.optim.SGD(pipe.transformer.parameters(), lr=0.1)
    before = state(pipe.transformer)
    with torch.enable_grad():
        pipe.transformer(
            hidden_states=torch.ones(1, 24, 4), encoder_hidden_states=torch.ones(1, 8, 12), timestep=torch.ones(1),
            pooled_projections=torch.ones(1, 8), img_ids=torch.zeros(24, 3), txt_ids=torch.zeros(8, 3),
            return_dict=False,
        )[0].sum().backward()  # fmt: skip
    optimizer.step()
    assert any(not torch.equal(before[name], tensor) for name, tensor in pipe.transformer.state_dict().items())


def saved_bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


@pytest.mark.parametrize("mode", MODES)
def test_saving_a_lora_or_a_bias_saves_just_that(mode: str) -> None:
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe = FLUX.build(0)
    pipe.transformer.add_adapter(LoraConfig(r=1, target_modules=["to_q", "x_embedder"]))

    def sizes() -> list[int]:
        transformer = pipe.transformer
        biases = (
            transformer.proj_out.bias,
            transformer.transformer_blocks[0].attn.to_k.bias,
            pipe.vae.encoder.conv_in.bias,
        )
        return [saved_bytes(value) for value in (get_peft_model_state_dict(pipe.transformer), *biases)]

    bare = sizes()
    offloaded = offload(pipe, mode)
    assert sizes() == bare
    FLUX.run(pipe, 2)
    assert sizes() == bare
    call_by_hand(pipe, "transformer")
    assert sizes() == bare
    offloaded.detach()
    assert sizes()[:-1] == bare[:-1]
    assert sizes()[-1] <= bare[-1] + 128  # Its place in a cache line was restored.


class Aliased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Linear(8, 8)
        self.attn = torch.nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.mlp(torch.tanh(self.attn(hidden_states)))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.complex64, torch.float32)])
def test_what_overlaps_still_does_whatever_its_type(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    module = torch.nn.Module()
    memory = torch.arange(16.0)
    module.register_buffer("one", memory[1:9])
    module.register_buffer("other", memory[2:].view(dtypes[0]))
    stage = HostStage()
    group = WeightGroup(module, stage, HostMemory(stage))
    expected = state(module)
    group.prepare()
    assert module.other.data_ptr() - module.one.data_ptr() == 4
    assert all(torch.equal(expected[name], tensor) for name, tensor in module.named_buffers())
    group.load()
    group.lend_own()
    module.one[1] = -5.0
    group.unload()
    assert module.other.flatten()[0].real == module.one[1] == -5.0
    group.restore()
    module.one[1] = 7.0
    assert module.other.flatten()[0].real == 7.0


@pytest.mark.parametrize("mode", ["model", "layerwise"])
def test_aliases_within_and_across_blocks(mode: Any) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Module()
        model.blocks = torch.nn.ModuleList(Aliased() for _ in range(4))
        flat = torch.randn(24, 8)
        for index in (0, 1):  # Across blocks: rows 4 to 8 are common.
            model.blocks[index].mlp.weight = torch.nn.Parameter(flat[4 * index : 4 * index + 8])
        blocks = model.blocks[2]
        blocks.mlp.weight = torch.nn.Parameter(flat[12:20])
        blocks.attn.weight = torch.nn.Parameter(flat[16:24])
        blocks.register_buffer("all", flat[12:24])

        def forward(hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            for block in model.blocks:
                hidden_states = block(hidden_states)
            return hidden_states

        model.forward = forward
        return model

    def edit(model: Any) -> None:
        with torch.no_grad():
            model.blocks[0].mlp.weight[5] = 0.5
            model.blocks[2].all[5] = -0.5

    bare, model = build(), build()
    x, t = torch.randn(2, 8), torch.ones(1)
    holder = Holder(transformer=model, text_encoder=torch.nn.Linear(2, 2))
    offloaded = apply_offload(holder, OffloadConfig(mode, activations=0), stage=HostStage())
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x, t), bare(x, t))
            edit(model)
            edit(bare)
            assert same_state(model, bare)
            holder.text_encoder(torch.ones(1, 2))
            assert same_state(model, bare)
    offloaded.detach()
    with torch.no_grad():
        model.blocks[1].mlp.weight[0] = 9.0
        model.blocks[2].attn.weight[0] = 9.0
    assert model.blocks[0].mlp.weight[4, 0] == model.blocks[2].mlp.weight[4, 0] == model.blocks[2].all[4, 0] == 9.0


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_in_the_middle_loses_nothing(mode: str) -> None:
    bare, pipe = FLUX.build(0), FLUX.build(0)
    in_place(bare.transformer)
    expected = FLUX.run(bare, 2)
    offloaded = offload(pipe, mode)
    parts = [part for part in pipe.transformer.modules() if isinstance(part, torch.nn.Linear)]
    for part in parts[::5]:

        def fail(module: torch.nn.Module, *_: Any) -> None:
            raise KeyboardInterrupt

        handle = part.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            FLUX.run(pipe, 2)
        handle.remove()
    call_by_hand(pipe, "transformer")
    in_place(pipe.transformer)
    assert torch.equal(FLUX.run(pipe, 2), expected)
    offloaded.detach()
    assert same_state(pipe.transformer, bare.transformer)


def test_taking_the_offload_off_within_a_call_loses_nothing() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    before, expected = state(model), case.run(model, 0)
    for block in (model.transformer_blocks[1], model.single_transformer_blocks[1]):
        offloaded = layerwise(Holder(transformer=model))
        inner = next(part for part in block.modules() if isinstance(part, torch.nn.Linear))
        handle = inner.register_forward_pre_hook(lambda *_, offloaded=offloaded: offloaded.detach())
        assert zoo.equal(case.run(model, 0), expected)
        handle.remove()
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert zoo.equal(case.run(model, 0), expected)


@pytest.mark.parametrize("mode", MODES)
def test_copies_and_files_of_an_offloaded_pipeline_are_whole(mode: str, tmp_path: Path) -> None:
    bare, pipe = FLUX.build(0), FLUX.build(0)
    in_place(bare.transformer)
    offloaded = offload(pipe, mode)
    FLUX.run(pipe, 2)
    call_by_hand(pipe, "transformer")
    in_place(pipe.transformer)
    twin = copy.deepcopy(pipe.transformer)
    pipe.transformer.save_pretrained(tmp_path)
    call_by_hand(pipe, "text_encoder_2")  # The transformer leaves the device, and its memory is overwritten.
    assert same_state(twin, bare.transformer)
    again = type(bare.transformer).from_pretrained(tmp_path)
    assert same_state(again, bare.transformer)
    offloaded.detach()
    assert same_state(twin, bare.transformer)


@pytest.mark.parametrize("mode", MODES)
def test_casts_between_runs(mode: str) -> None:
    bare, pipe = FLUX.build(0), FLUX.build(0)
    offloaded = offload(pipe, mode)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        call_by_hand(pipe, "transformer") if dtype is torch.float64 else None
        in_place(pipe.transformer)
        in_place(bare.transformer)
        pipe.to(dtype)
        bare.to(dtype)
        zoo.as_built(bare)
        assert same_state(pipe.transformer, bare.transformer)
        FLUX.run(pipe, 1)
        assert same_state(pipe.transformer, bare.transformer)
    offloaded.detach()
    assert same_state(pipe.transformer, bare.transformer)
