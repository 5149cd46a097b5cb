"""Gates at blocks: they ask the pass that runs on their thread, and leave nothing behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from driving import COND, Gated, Plain, at, case, counted, state_of

from samovar.arch import find_anatomy
from samovar.errors import SettingError
from samovar.hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook
from samovar.trace.gates import Gate, Gates, other_modules


class Noting:
    """A pass that notes who asks, and lets everybody run but those for whom it has an answer."""

    def __init__(self, answers: dict[int, Any] | None = None) -> None:
        self.entered: list[tuple[str, int]] = []
        self.left: list[tuple[str, int]] = []
        self._answers = answers or {}

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self.entered.append((gate.path, gate.index))
        return self._answers.get(gate.index, NOT_BYPASSED)

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        self.left.append((gate.path, gate.index))


BLOCKS = [("blocks", 0), ("blocks", 1), ("blocks", 2)]


@torch.no_grad()
def call(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    output: torch.Tensor = model(*at(step), COND)
    return output


def test_every_block_asks_before_it_runs_and_says_when_it_has() -> None:
    gated, noting = Gated(Plain()), Noting()
    exact = call(Plain())
    assert torch.equal(gated.through(noting, gated.inputs(*at(0), COND)), exact)
    assert noting.entered == noting.left == BLOCKS
    assert torch.equal(call(gated.model), exact), "nobody is asked outside of a pass"
    assert noting.entered == BLOCKS


def test_an_answer_stands_in_the_place_of_the_block() -> None:
    gated, answer = Gated(Plain()), torch.ones(1, 5, 8)
    noting = Noting({2: answer})
    with counted(gated.model.blocks) as calls:
        output = gated.through(noting, gated.inputs(*at(0), COND))
    assert calls == list(gated.model.blocks[:2])
    assert noting.left == BLOCKS[:2], "what did not run has not run"
    with torch.no_grad():
        assert torch.equal(output, gated.model.unembed(answer))


def test_a_pass_is_asked_on_its_own_thread_alone() -> None:
    gated, noting = Gated(Plain()), Noting()
    with gated.gates.asking(noting):
        thread = threading.Thread(target=lambda: call(gated.model))
        thread.start()
        thread.join()
        assert gated.gates.running is noting
    assert noting.entered == []


def test_the_pass_outside_is_asked_again_however_the_inner_one_ends() -> None:
    gated, outer = Gated(Plain()), Noting()
    with gated.gates.asking(outer):
        with pytest.raises(ValueError, match="given up"), gated.gates.asking(Noting()):
            raise ValueError("given up")
        assert gated.gates.running is outer
    assert gated.gates.running is None


class Tied(Plain):
    """Runs one of its blocks at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


def test_a_block_that_is_held_twice_has_one_gate() -> None:
    gated, noting = Gated(Tied()), Noting()
    gated.through(noting, gated.inputs(*at(0), COND))
    assert noting.entered == [("blocks", 0), ("blocks", 1), ("blocks", 0)]


class Onlooker(ModelHook):
    """Stands where offload stands."""

    order = HookOrder.OFFLOAD

    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("first", [True, False])
def test_a_gate_stands_outside_of_what_others_put_on_a_block(first: bool) -> None:
    model, onlooker = Plain(), Onlooker()
    gated = Gated(model) if first else None
    HookRegistry.get_or_create(model.blocks[1]).register_hook("a look", onlooker)
    gated = gated or Gated(model)
    gated.through(Noting({1: torch.zeros(1, 5, 8)}), gated.inputs(*at(0), COND))
    assert onlooker.calls == 0
    gated.through(Noting(), gated.inputs(*at(0), COND))
    assert onlooker.calls == 1


def test_gates_that_are_removed_leave_nothing() -> None:
    model = case("FluxTransformer2DModel").build()
    before = state_of(model)
    gated = Gated(model)
    assert state_of(model) != before
    gated.gates.detach()
    assert state_of(model) == before
    assert gated.gates.by_module == {}


scripting = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@scripting
def test_a_block_that_cannot_be_gated_is_refused_and_everything_left_alone() -> None:
    model = Plain()
    model.blocks[2] = torch.jit.script(model.blocks[2])
    before = state_of(model)
    with pytest.raises(SettingError, match="cannot be hooked"):
        Gates(model, find_anatomy(model), "gates")
    assert state_of(model) == before


class Rotary(torch.nn.Module):
    """Something without weights, as rotary embeddings are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()


class Weightless(Plain):
    """Has parts without weights: one of its own, one of torch's, one in a list, and one in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.act = Rotary(), torch.nn.SiLU()
        self.more = torch.nn.ModuleList([Rotary()])
        for block in self.blocks:
            block.rotary = Rotary()


@scripting
def test_other_modules_that_cannot_be_gated_do_no_harm() -> None:
    model = Weightless()
    model.rotary = torch.jit.script(model.rotary)
    gates = Gates(model, find_anatomy(model), "gates")
    assert {gate.path for gate in gates.by_module.values()} == {"blocks", "more"}


def test_other_modules_are_the_members_of_containers_outside_of_blocks() -> None:
    model = Weightless()
    model.blocks[0].inner = torch.nn.ModuleList([Rotary()])
    found = list(other_modules(model, find_anatomy(model)))
    assert found == [("more", model.more[0])]
