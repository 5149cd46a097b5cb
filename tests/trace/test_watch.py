"""What a watched forward shows of its blocks: their order, and what they hand on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from driving import COND, Block, Gated, Plain, at, case, counted, state_of

from samovar.arch import Anatomy, BlockDeclaration, find_anatomy, register_declaration
from samovar.arch.declarations import DECLARATIONS
from samovar.core.errors import DeclarationError, ModelError, SettingError
from samovar.hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook
from samovar.trace.watch import Gate, Gates, Watcher, other_modules


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


def watch(model: torch.nn.Module, **settings: Any) -> Watcher:
    """A watcher that has seen one forward."""
    watcher = Watcher(model, find_anatomy(model), **settings)
    with watcher.watching(), torch.no_grad():
        model(*at(0), COND)
    return watcher


def carried(anatomy: Anatomy) -> dict[str, tuple[str | None, ...]]:
    return {stack.path: tuple(stream.parameter for stream in stack.streams) for stack in anatomy.stacks}


def test_blocks_are_seen_in_the_order_in_which_they_run() -> None:
    class Backwards(Plain):
        def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            for index in (2, 0, 1):
                x = self.blocks[index](x, temb)
            return x

    watcher = watch(Backwards())
    assert watcher.blocks == ["blocks.2", "blocks.0", "blocks.1"]
    assert watcher.order == ["blocks"] * 3
    assert carried(watcher.anatomy()) == {"blocks": ("x",)}
    assert [stack.evidence for stack in watcher.anatomy().stacks] == ["probe"]


def test_the_first_call_of_every_block_is_kept_if_that_is_asked_for() -> None:
    class Twice(Plain):
        def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return super().run(super().run(x, temb), temb=temb)

    model = Twice()
    assert watch(model).calls == {}
    watcher = watch(model, keeps_calls=True)
    assert list(watcher.calls) == ["blocks.0", "blocks.1", "blocks.2"]
    with torch.no_grad():
        assert torch.equal(watcher.calls["blocks.0"].arguments["x"], model.embed_x(at(0)[0]))
    assert watcher.calls["blocks.0"].num_positional == 2
    assert torch.equal(watcher.calls["blocks.0"].output, watcher.calls["blocks.1"].arguments["x"])


class TwoStreams(Block):
    """Takes and returns two streams of one shape, in another order than it takes them."""

    def forward(self, temb: torch.Tensor, text: torch.Tensor, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, temb), super().forward(text, temb)


class Dual(Plain):
    def block(self) -> torch.nn.Module:
        return TwoStreams(self.width)

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        text = x.flip(1) * 0.5
        for block in self.blocks:
            x, text = block(temb, text, x)
        return x + text


def test_a_stream_is_known_by_identity_whatever_its_shape() -> None:
    assert carried(watch(Dual()).anatomy()) == {"blocks": ("x", "text")}


def test_a_stream_that_is_made_anew_between_blocks_is_known_by_shape() -> None:
    class Copying(Plain):
        def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, temb) * 0.5
            return x

    assert carried(watch(Copying()).anatomy()) == {"blocks": ("x",)}


def test_tokens_that_are_permuted_between_blocks_are_known_by_the_blocks_own_shapes() -> None:
    class Permuting(Plain):
        def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, temb).transpose(0, 1).contiguous()
            return x.transpose(0, 1)

    assert carried(watch(Permuting()).anatomy()) == {"blocks": ("x",)}


class Filling(Block):
    """Writes into what it is given, and returns that."""

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return x.copy_(super().forward(x, temb))


def test_a_stream_that_blocks_write_into_is_seen_to_change() -> None:
    class InPlace(Plain):
        def block(self) -> torch.nn.Module:
            return Filling(self.width)

    watcher = watch(InPlace())
    assert watcher.changing["blocks"] == {"x"}
    assert carried(watcher.anatomy()) == {"blocks": ("x",)}


def test_a_list_that_runs_between_blocks_or_not_at_all_is_set_aside() -> None:
    class Aside(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.adapters = torch.nn.ModuleList(Block(self.width) for _ in range(2))
            self.spare = torch.nn.ModuleList(Block(self.width) for _ in range(2))

        def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            for block, adapter in zip(self.blocks[:2], self.adapters, strict=True):
                x = block(x, temb) + adapter(temb, temb)
            return self.blocks[2](x, temb)

    anatomy = watch(Aside()).anatomy()
    assert (list(carried(anatomy)), anatomy.side, anatomy.idle) == (["blocks"], ("adapters",), ("spare",))


def test_watching_leaves_no_hooks_even_if_the_forward_raises() -> None:
    model = Plain()
    before = state_of(model)
    watch(model)
    with pytest.raises(ValueError, match="stop"), Watcher(model, find_anatomy(model)).watching():
        raise ValueError("stop")
    assert state_of(model) == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_forward_that_runs_no_block_is_refused() -> None:
    class Blockless(Plain):
        def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(ModelError, match=r"No block of Blockless ran, in 'blocks'"):
        watch(Blockless()).anatomy()


def test_blocks_that_return_different_numbers_of_values_are_refused() -> None:
    class Uneven(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].register_forward_hook(lambda module, args, output: (output, output))

        def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            last: torch.Tensor = super().run(x, temb)[0]
            return last

    with pytest.raises(ModelError, match=r"different numbers of values \(1 by 'blocks.1', 2 by 'blocks.2'\)"):
        watch(Uneven()).anatomy()


def test_a_declaration_that_the_blocks_contradict_is_refused() -> None:
    class Declared(Plain):
        pass

    register_declaration("Declared", BlockDeclaration(stacks=("blocks",), carried={"blocks": ("x", None)}))
    try:
        with pytest.raises(DeclarationError, match="carries 2 values through 'blocks', but its blocks return 1"):
            watch(Declared()).anatomy()
    finally:
        del DECLARATIONS["Declared"]
