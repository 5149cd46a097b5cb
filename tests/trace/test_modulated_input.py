"""The signal is what the block's own attention gets, bit for bit, and is had without running the block."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driving import COND, INFINITE, UNGUARDED, Block, Plain, at, case, counted, loop

import zoo
from samovar.cache import apply_teacache_hook
from samovar.hooks import call_context
from samovar.trace.forward import Given
from samovar.trace.modulated_input import ModulatedInput

FIRST_ATTENTION = {
    "FluxTransformer2DModel": "transformer_blocks.0.attn",
    "HunyuanVideoTransformer3DModel": "transformer_blocks.0.attn",
    "T5FilmDecoder": "decoders.0.layer.0.attention",
    "WanVACETransformer3DModel": "blocks.0.attn1",
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


# ------------------------------------------------------------------------------------------------ weights that change


def test_the_next_run_sees_a_part_that_was_changed() -> None:
    changed, fresh = Plain(), Plain()
    hook, expected = (apply_teacache_hook(model, {**UNGUARDED, "rel_l1_thresh": 0.3}) for model in (changed, fresh))
    loop(changed)
    before = hook.stats()
    for model in (changed, fresh):
        model.blocks[0].norm = torch.nn.LayerNorm(8, eps=1.0)
    assert all(map(torch.equal, loop(changed), loop(fresh)))
    assert hook.stats().branches["only"] == expected.stats().branches["only"]
    assert hook.stats().branches["only"] != before.branches["only"], "the change shows in the distances"


# ------------------------------------------------------------------------------------------------ without a twin


class Unmodulated(Plain):
    """Its attention gets just what the block gets."""

    class Block(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return self.norm(x + self.attn(x)) * (1 + temb)

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)


class Untwinned(Plain):
    """A twin of its blocks does not run: they ask for something that only they are."""

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
    """A model into whose first attention somebody's hook writes, which the twin does not have."""
    model.blocks[0].attn.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    return model


def test_a_twin_that_is_wrong_is_found_out_and_stays_so(caplog: pytest.LogCaptureFixture) -> None:
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
