"""How steps are taken by the blocks of a model, whatever it is called or does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from driving import (
    COND,
    INFINITE,
    UNGUARDED,
    Block,
    Plain,
    at,
    case,
    counted,
    differing,
    loop,
    state_of,
    stepped,
)

from samovar.cache import TeaCacheHook, apply_teacache_hook
from samovar.core.errors import ModelError
from samovar.hooks import HookOrder, HookRegistry, ModelHook, call_context

SKIPPING = {**UNGUARDED, "rel_l1_thresh": INFINITE}


def mask(hook: TeaCacheHook) -> str:
    return hook.stats().branches["only"].mask


# ------------------------------------------------------------------------------------------------ other libraries


class Mixer(torch.nn.Module):
    """A block that attends to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = torch.nn.Linear(5, 5), torch.nn.Linear(8, 8)

    def forward(self, stuff: torch.Tensor, ignored: int, *, cond: torch.Tensor) -> tuple[int, torch.Tensor]:
        mixed = self.tokens(stuff.transpose(1, 2)).transpose(1, 2)
        return ignored, stuff + self.channels(mixed * cond).tanh()


class Oddity(torch.nn.Module):
    """Its list of blocks has a name, a place and a form of call of its own, and so do its inputs."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.enter, self.condition, self.leave = (torch.nn.Linear(*shape) for shape in ((4, 8), (4, 8), (8, 4)))
            self.machinery = torch.nn.ModuleDict({"wheels": torch.nn.ModuleList(Mixer() for _ in range(4))})

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        cond = self.condition(text)[:, None]
        x = self.enter(picture)
        for number, wheel in enumerate(self.machinery["wheels"]):
            _, x = wheel(x, number, cond=cond)
        return {"picture": self.leave(x)}


@torch.no_grad()
def turn(model: torch.nn.Module, *steps: int) -> list[torch.Tensor]:
    with call_context(branch="only"), stepped(model) as loop:
        return [loop.call(lambda step=step: model(at(step)[0], COND)["picture"]) for step in steps]


def test_a_model_of_another_library_works_without_a_word_about_it() -> None:
    """Nothing is known of its arguments at first: that the picture is the sample shows at the second step."""
    model = Oddity()
    before, exact = state_of(model), turn(model, 0, 1, 2)
    hook = apply_teacache_hook(model, {"rel_l1_thresh": 0})
    assert differing(turn(model, 0, 1, 2), exact) == []
    hook.detach()
    hook = apply_teacache_hook(model, SKIPPING)
    with counted(model.machinery["wheels"]) as calls:
        outputs = turn(model, 0, 1, 2, 1)
        assert len(calls) == 8, "those of the first two steps"
    assert (mask(hook), hook.stats().problem) == ("##..", None)
    assert differing(outputs[:2], exact[:2]) == []
    torch.testing.assert_close(outputs[3], exact[1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(outputs[2], outputs[3])
    hook.detach()
    assert state_of(model) == before
    assert differing(turn(model, 0, 1, 2), exact) == []


def test_a_model_without_blocks_is_refused_and_left_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    before = state_of(model)
    with pytest.raises(ModelError, match=r"Sequential has no stack of blocks.*register_declaration"):
        apply_teacache_hook(model, SKIPPING)
    assert state_of(model) == before


class Tied(Plain):
    """Runs one of its blocks at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


class Recycling(Plain):
    """Runs all of its blocks three times over."""

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = super().run(x, temb) * 0.5
        return x


@pytest.mark.parametrize("make", [Tied, Recycling])
def test_blocks_that_run_more_than_once(make: type[Plain]) -> None:
    model = make()
    exact = loop(model, steps=3)
    hook = apply_teacache_hook(model, {**SKIPPING, "first_steps": 2})
    with counted(set(model.blocks)) as calls, torch.no_grad(), call_context(branch="only"), stepped(model) as run:
        for step in (0, 1):
            assert torch.equal(run.call(lambda step=step: model(*at(step, 3, "x"), COND)), exact[step])
        calls.clear()
        skipped = run.call(lambda: model(*at(1, 3, "x"), COND))
        torch.testing.assert_close(skipped, exact[1], rtol=1e-5, atol=1e-5)
        assert not calls
    assert mask(hook) == "##."


def test_a_compiled_model_is_cached_outside_of_its_graph() -> None:
    """Our own code is not compiled with it: that takes seconds, and warns of what it finds."""
    plain, compiled = Plain(num_blocks=2), torch.compile(Plain(num_blocks=2), backend="eager")
    hooks = [apply_teacache_hook(model, {**SKIPPING, "max_skips": 1}) for model in (plain, compiled)]
    for one, other in zip(loop(compiled, steps=3), loop(plain, steps=3), strict=True):
        torch.testing.assert_close(one, other)
    torch.compiler.reset()
    assert mask(hooks[0]) == mask(hooks[1]) == "#.#"


class Onlooker(ModelHook):
    """Stands where offload stands."""

    order = HookOrder.OFFLOAD

    def __init__(self) -> None:
        self.seen: list[str] = []

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen.append("pre")
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self.seen.append("post")
        return output


@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_blocks_see_nothing_of_a_skipped_step(first: bool) -> None:
    model = Plain()
    if first:
        apply_teacache_hook(model, SKIPPING)
    onlookers = [Onlooker() for _ in model.blocks]
    for block, onlooker in zip(model.blocks, onlookers, strict=True):
        HookRegistry.get_or_create(block).register_hook("a look", onlooker)
    if not first:
        apply_teacache_hook(model, SKIPPING)
    for step, expected in enumerate((["pre", "post"], [], [])):
        for onlooker in onlookers:
            onlooker.seen.clear()
        with torch.no_grad(), call_context(branch="only"):
            model(*at(step), COND)
        assert [onlooker.seen for onlooker in onlookers] == [expected] * 3


# ------------------------------------------------------------------------------------------------ out of step


class Wayward(Plain):
    """Goes through its blocks in an order of which its inputs say nothing."""

    orders: tuple[tuple[int, ...], ...] = ()
    step = 0

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for index in self.orders[self.step]:
            x = self.blocks[index](x, temb)
        return x


USUAL = (0, 1, 2)
WAYS = {
    "once": (USUAL,) * 5 + ((0, 2, 1),) + (USUAL,) * 6,
    "from then on": (USUAL,) * 5 + ((0, 1),) * 7,
    "more": (USUAL,) * 5 + ((0, 1, 2, 2),) * 7,
    "in turn": (USUAL, (2, 1, 0)) * 6,
    "at times none": (USUAL, USUAL, ()) * 4,
    "none at first": ((),) + (USUAL,) * 11,
}


@pytest.mark.parametrize("schedule", ["############.", "#.#.#.#.#.#.", "#..........."])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_calls_its_blocks_otherwise_is_computed_exactly(way: str, schedule: str) -> None:
    @torch.no_grad()
    def run(model: Wayward) -> list[torch.Tensor]:
        model.orders, outputs = WAYS[way], []
        with call_context(branch="only"):
            for model.step in range(12):
                outputs.append(model(*at(model.step), COND))
        return outputs

    model = Wayward()
    exact = run(Wayward())
    hook = apply_teacache_hook(model, {"schedule": schedule})
    outputs, found = run(model), mask(hook)
    assert [step for step in differing(outputs, exact) if found[step] == "#"] == []
    steps = [step for step in range(1, 12) if WAYS[way][step] != WAYS[way][step - 1]]
    assert {found[step] for step in steps} == {"#"}, "nothing that is stored stands for such a step"


class Restyled(Plain):
    """Calls its blocks with names for what it gives them, or without."""

    by_name = False

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x, temb=temb) if self.by_name else block(x, temb)
        return x


@pytest.mark.parametrize("settings", [{"schedule": "#....."}, SKIPPING], ids=["schedule", "signal"])
@pytest.mark.parametrize("by_name", [True, False])
def test_blocks_that_are_called_in_another_way(by_name: bool, settings: dict[str, Any]) -> None:
    @torch.no_grad()
    def run(model: Restyled) -> list[torch.Tensor]:
        outputs = []
        with call_context(branch="only"), stepped(model, 6) as run:
            for step in range(6):
                model.by_name = by_name is (step < 3)
                outputs.append(run.call(lambda: model(*at(0), COND)))
        return outputs

    model = Restyled()
    apply_teacache_hook(model, settings)
    for one, other in zip(run(model), run(Restyled()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_layers_left_out_in_turn_are_computed() -> None:
    found = case("SD3Transformer2DModel")
    model = found.build()

    @torch.no_grad()
    def run() -> list[Any]:
        with call_context(branch="only"):
            return [
                model(**found.inputs(step), skip_layers=[1] if step % 2 else None, return_dict=False)[0]
                for step in range(6)
            ]

    exact = run()
    hook = apply_teacache_hook(model, SKIPPING)
    assert differing(run(), exact) == []
    assert mask(hook) == "######"


class InDicts(Plain):
    """Its blocks return what no block is known to return."""

    class Block(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> Any:
            return {"x": super().forward(x, temb)}

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, temb)["x"]
        return x


class Uneven(Plain):
    """Its last block returns more than the others."""

    class Last(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> Any:
            return super().forward(x, temb), temb

    def __init__(self) -> None:
        super().__init__()
        last = self.Last(self.width)
        last.load_state_dict(self.blocks[2].state_dict())
        self.blocks[2] = last

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = block(x, temb)
        last: torch.Tensor = self.blocks[2](x, temb)[0]
        return last


class Blockless(Plain):
    """Runs none of its blocks."""

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("make", [InDicts, Uneven, Blockless])
def test_blocks_of_a_form_that_is_not_known_turn_the_cache_off(
    make: type[Plain], caplog: pytest.LogCaptureFixture
) -> None:
    """A picture must not fail because it cannot be had faster."""
    exact = loop(make())
    model = make()
    hook = apply_teacache_hook(model, SKIPPING)
    with caplog.at_level(logging.WARNING):
        assert differing(loop(model), exact) == []
    assert hook.stats().problem is not None
    assert len(caplog.records) == 1
