"""The signal is what the block's own attention gets, bit for bit, and is had without running the block."""

from __future__ import annotations

import gc
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driving import COND, INFINITE, UNGUARDED, Block, Plain, at, case, counted, loop

import zoo
from samovar.cache import apply_teacache_hook
from samovar.hooks import call_context
from samovar.trace.forward import Given
from samovar.trace.signal import ModulatedInput

FIRST_ATTENTION = {
    "AuraFlowTransformer2DModel": "joint_transformer_blocks.0.attn",
    "CogVideoXTransformer3DModel": "transformer_blocks.0.attn1",
    "Cosmos3OmniTransformer": "layers.0.self_attn",
    "ErnieImageTransformer2DModel": "layers.0.self_attention",
    "Flux2Transformer2DModel": "transformer_blocks.0.attn",
    "FluxTransformer2DModel-controlnet": "transformer_blocks.0.attn",
    "FluxTransformer2DModel-equal-lengths": "transformer_blocks.0.attn",
    "HiDreamImageTransformer2DModel": "double_stream_blocks.0.block.attn1",
    "HunyuanVideoTransformer3DModel": "transformer_blocks.0.attn",
    "LTXVideoTransformer3DModel": "transformer_blocks.0.attn1",
    "Lumina2Transformer2DModel": "noise_refiner.0.attn",
    "MochiTransformer3DModel": "transformer_blocks.0.attn1",
    "QwenImageTransformer2DModel-mask": "transformer_blocks.0.attn",
    "RFD4ProteinaTransformer-recycling": "transformer_layers.0.mhba.mha.to_q",
    "SD3Transformer2DModel": "transformer_blocks.0.attn",
    "T5FilmDecoder": "decoders.0.layer.0.attention",
    "WanTransformer3DModel-image-to-video": "blocks.0.attn1",
    "WanVACETransformer3DModel": "blocks.0.attn1",
    "ZImageTransformer2DModel": "noise_refiner.0.attention",
}
"""By zoo case: the module whose input the steps are judged by, as read from the model's source."""

COMPUTING = {**UNGUARDED, "rel_l1_thresh": INFINITE, "first_steps": 99}
"""Every step is computed, and every signal read."""


def attention_inputs(model: torch.nn.Module, path: str, run: Callable[[], Any]) -> list[torch.Tensor]:
    """The tensors that a module is given in its first call within a run."""
    seen: list[list[torch.Tensor]] = []

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        seen.append([value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)])

    handle = model.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)
    run()
    handle.remove()
    return seen[0]


def signals(model: torch.nn.Module, settings: Any, step: Callable[[int], Any], steps: int = 3) -> list[torch.Tensor]:
    """What the steps of a model are judged by."""
    hook, found = apply_teacache_hook(model, settings), []
    for index in range(steps):
        step(index)
        (state,) = hook.state_manager.states().values()
        assert state.signal is not None
        found.append(state.signal.value.clone())
    hook.detach()
    return found


@pytest.mark.parametrize("name", FIRST_ATTENTION)
def test_it_is_what_the_first_attention_gets(name: str) -> None:
    model, path = case(name).build(), FIRST_ATTENTION[name]

    def step(index: int) -> None:
        with call_context(branch="only"):
            case(name).run(model, index)

    found = signals(model, COMPUTING, step)
    for index, signal in enumerate(found):
        real = attention_inputs(model, path, lambda index=index: step(index))
        assert any(zoo.equal(signal, tensor) for tensor in real), f"step {index}"
    assert not zoo.equal(found[0], found[1]), "it moves with the step"


def test_a_decision_runs_no_part_of_the_block() -> None:
    name = "QwenImageTransformer2DModel"
    model = case(name).build()
    hook = apply_teacache_hook(model, {**UNGUARDED, "rel_l1_thresh": INFINITE})
    with counted(model.transformer_blocks.modules()) as calls:
        for index in range(3):
            calls.clear()
            with call_context(branch="only"):
                case(name).run(model, index)
            assert bool(calls) is (index == 0)
    assert hook.stats().branches["only"].mask == "#.."
    assert hook.stats().branches["only"].steps[2].distance


def first_call(block: torch.nn.Module, run: Callable[[], Any]) -> Given:
    """What a block is called with."""
    seen: list[Given] = []
    handle = block.register_forward_pre_hook(lambda *given: seen.append(Given(*given)), with_kwargs=True)
    run()
    handle.remove()
    return seen[0]


def qwen_calls(steps: int) -> tuple[torch.nn.Module, list[tuple[Given, torch.Tensor]]]:
    """The first block of Qwen-Image, and what it is called with at some steps."""
    name = "QwenImageTransformer2DModel"
    model = case(name).build()
    block = model.transformer_blocks[0]
    calls = [first_call(block, lambda step=step: case(name).run(model, step)) for step in range(steps)]
    return block, [(given, given.kwargs["hidden_states"]) for given in calls]


def test_parts_that_lead_elsewhere_are_not_run() -> None:
    block, (one, other, third) = qwen_calls(3)
    reader = ModulatedInput(*one, other=other)
    assert (reader.path, reader.idle) == ("attn", {"txt_mod", "txt_norm1"})
    assert reader.known == ModulatedInput.Known("attn", frozenset({"txt_mod", "txt_norm1"}))
    again = ModulatedInput(*one, known=reader.known)
    block.txt_mod[1].weight.data.fill_(float("nan"))
    given, stream = third
    (real, *_) = attention_inputs(block, "attn", lambda: block(*given.args, **given.kwargs))
    for built in (reader, again):
        assert zoo.equal(built(given, stream), real)


def test_without_another_step_to_compare_with_nothing_is_taken_for_idle() -> None:
    _, (one, other) = qwen_calls(2)
    assert ModulatedInput(*one).idle == frozenset()
    assert ModulatedInput(*one, other=other).idle != frozenset()


class Modulation(torch.nn.Module):
    """Returns its tensors in an object of its own, as original FLUX does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(width, 2 * width)

    def forward(self, temb: torch.Tensor) -> Any:
        shift, scale = self.lin(temb).chunk(2, dim=-1)
        return types.SimpleNamespace(shift=shift, scale=scale)


class Modulated(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mod = Modulation(width)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        mod = self.mod(temb)
        return x + self.attn(self.norm(x) * (1 + mod.scale) + mod.shift)


def test_a_part_that_returns_an_object_with_tensors_is_not_taken_for_idle() -> None:
    block, x = Modulated(8), torch.randn(1, 5, 8)
    calls = [(Given(block, (x, torch.randn(1, 1, 8)), {}), x) for _ in range(3)]
    reader = ModulatedInput(*calls[0], other=calls[1])
    assert reader.idle == frozenset()
    given, stream = calls[2]
    with torch.no_grad():
        (real,) = attention_inputs(block, "attn", lambda: block(*given.args))
    assert zoo.equal(reader(given, stream), real)


class Adding(Block):
    """Writes into its arguments before it attends."""

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        x += temb
        return x.add_(self.attn(self.norm(x)))


def test_reading_writes_into_no_argument_of_the_block() -> None:
    block, x, temb = Adding(8), torch.randn(1, 5, 8), torch.randn(1, 1, 8)
    before = x.clone()
    reader = ModulatedInput(Given(block, (x, temb), {}), x)
    values = [reader(Given(block, (x, temb), {}), x) for _ in range(3)]
    assert torch.equal(x, before)
    assert torch.equal(values[0], values[2])
    with torch.no_grad():
        (real,) = attention_inputs(block, "attn", lambda: block(x.clone(), temb))
    assert torch.equal(values[0], real)


def test_a_reader_knows_when_its_block_has_changed() -> None:
    block, x = Block(8), torch.randn(1, 5, 8)
    reader = ModulatedInput(Given(block, (x, torch.zeros(1, 1, 8)), {}), x)
    assert reader.is_current()
    assert reader.attention is block.attn
    with torch.no_grad():
        block.norm.weight.mul_(2)
    assert not reader.is_current()


def test_what_the_real_attention_was_given_is_compared_bit_for_bit() -> None:
    block, x = Block(8), torch.randn(1, 5, 8)
    given = Given(block, (x, torch.zeros(1, 1, 8)), {})
    reader = ModulatedInput(given, x)
    value = reader(given, x)
    assert reader.agrees_with(value, (value.clone(),), {})
    assert reader.agrees_with(value, (), {"more": [x, value]})
    assert not reader.agrees_with(value, (value + 1e-6,), {})


# ------------------------------------------------------------------------------------------------ weights that change


class Replacing:
    """What somebody may do to a model's weights between two runs."""

    @staticmethod
    def in_place(model: Plain) -> None:
        with torch.no_grad():
            model.blocks[0].norm.weight.mul_(torch.arange(8.0))

    @staticmethod
    def parameter(model: Plain) -> None:
        model.blocks[0].norm.weight = torch.nn.Parameter(torch.arange(8.0))

    @staticmethod
    def module(model: Plain) -> None:
        model.blocks[0].norm = torch.nn.LayerNorm(8, eps=1.0)

    @staticmethod
    def state(model: Plain) -> None:
        model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", ["in_place", "parameter", "module", "state"])
def test_the_next_run_sees_weights_that_were_changed(change: str) -> None:
    changed, fresh = Plain(), Plain()
    getattr(Replacing, change)(fresh)
    hook, expected = (apply_teacache_hook(model, {**UNGUARDED, "rel_l1_thresh": 0.3}) for model in (changed, fresh))
    loop(changed)
    before = hook.stats()
    getattr(Replacing, change)(changed)
    assert all(map(torch.equal, loop(changed), loop(fresh)))
    assert hook.stats().branches["only"] == expected.stats().branches["only"]
    assert hook.stats().branches["only"] != before.branches["only"], "the change shows in the distances"


def test_adapters_are_part_of_it_whenever_they_are_loaded() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["norm1.linear", "to_q"], init_lora_weights=False)
    name = "FluxTransformer2DModel"

    def adapted(model: torch.nn.Module) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model.add_adapter(config)
        return model

    def run(model: torch.nn.Module) -> None:
        with call_context(branch="only"):
            for index in range(4):
                case(name).run(model, index)

    settings = {**UNGUARDED, "rel_l1_thresh": INFINITE}
    bare, before, after = (case(name).build() for _ in range(3))
    adapted(before)
    hooks = [apply_teacache_hook(model, settings) for model in (bare, before, after)]
    for model in (bare, before, after):
        run(model)
    hooks[2].reset_state(after)
    run(adapted(after))
    steps = [hook.stats().branches["only"].steps for hook in hooks]
    assert steps[1] == steps[2]
    assert [step.distance for step in steps[0]] != [step.distance for step in steps[1]]


def test_compiled_blocks_are_judged_alike() -> None:
    plain, compiled = Plain(), Plain()
    hooks = [apply_teacache_hook(model, {**UNGUARDED, "rel_l1_thresh": 0.3}) for model in (plain, compiled)]
    for block in compiled.blocks:
        block.compile(backend="eager")
    for one, other in zip(loop(plain), loop(compiled), strict=True):
        torch.testing.assert_close(one, other)
    assert hooks[0].stats().branches["only"] == hooks[1].stats().branches["only"]
    torch.compiler.reset()


def test_no_shadow_outlives_its_run() -> None:
    """It may have copies of weights."""
    model = Plain()
    hook = apply_teacache_hook(model, COMPUTING)
    gc.freeze()  # From here on only what is new is looked at.
    loop(model)
    hook.end_run(model, None)
    gc.collect()
    shadows = [found for found in gc.get_objects() if type(found) is Block]
    gc.unfreeze()
    assert shadows == []


# ------------------------------------------------------------------------------------------------ without a shadow


class Unmodulated(Plain):
    """Its attention gets just what the block gets."""

    class Block(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return self.norm(x + self.attn(x)) * (1 + temb)

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)


class Untwinned(Plain):
    """A shadow of its blocks does not run: they ask for something that only they are."""

    class Block(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.number = id(self)

        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            if self.number != id(self):
                raise RuntimeError("not the one that was made")
            return super().forward(x, temb)

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)


@pytest.mark.parametrize("make", [Unmodulated, Untwinned])
def test_without_it_the_input_of_the_block_is_the_signal(make: type[Plain]) -> None:
    model = make()

    def step(index: int) -> None:
        with call_context(branch="only"), torch.no_grad():
            model(*at(index), COND)

    found = signals(model, COMPUTING, step)
    for index, signal in enumerate(found):
        with torch.no_grad():
            assert zoo.equal(signal, model.embed_x(at(index)[0]))


def rewired(model: Plain) -> Plain:
    """A model into whose first attention somebody's hook writes, which the shadow does not have."""
    model.blocks[0].attn.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    return model


def test_a_shadow_that_is_wrong_is_found_out_and_stays_so(caplog: pytest.LogCaptureFixture) -> None:
    model = rewired(Plain())
    hook = apply_teacache_hook(model, COMPUTING)
    for _ in range(3):
        with caplog.at_level(logging.WARNING):
            loop(model, steps=4)
        (state,) = hook.state_manager.states().values()
        assert state.signal is not None
        with torch.no_grad():
            assert zoo.equal(state.signal.value, model.embed_x(at(3, name="x")[0]))
        hook.end_run(model, None)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is said once"
    assert hook.stats().signal.startswith("the input of blocks.0,")


def test_an_error_while_it_is_checked_leaves_nothing_on_the_block() -> None:
    model = Plain()
    hook = apply_teacache_hook(model, COMPUTING)
    before = [dict(module._forward_pre_hooks) for module in model.modules()]

    def fail(*_: Any) -> None:
        raise ValueError("out of memory, say")

    with call_context(branch="only"), torch.no_grad():
        model(*at(0), COND)
        handle = model.blocks[0].norm.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="out of memory"):
            model(*at(1), COND)
        handle.remove()
        assert [dict(module._forward_pre_hooks) for module in model.modules()] == before
        model(*at(2), COND)
    assert hook.stats().signal.startswith("the input of blocks.0.attn")


def test_it_is_checked_against_its_own_forward_and_no_other_thread(caplog: pytest.LogCaptureFixture) -> None:
    model = Plain()
    hook = apply_teacache_hook(model, COMPUTING)
    inside, done = threading.Event(), threading.Event()

    @torch.no_grad()
    def steps(request: str, count: int) -> None:
        with call_context(request=request, branch="only"):
            for index in range(count):
                model(*at(index, name=request), COND)

    def pause(*_: Any) -> None:
        if threading.current_thread() is first:
            inside.set()
            done.wait(10)

    def begin() -> None:
        steps("one", 1)
        handle = model.blocks[0].norm.register_forward_pre_hook(pause)
        with call_context(request="one", branch="only"), torch.no_grad():
            model(*at(1, name="one"), COND)
        handle.remove()

    first = threading.Thread(target=begin)
    with caplog.at_level(logging.WARNING):
        first.start()
        assert inside.wait(10)
        steps("two", 2)
        done.set()
        first.join()
    assert not caplog.records
    assert hook.stats("one").signal.startswith("the input of blocks.0.attn")
