"""What a watched forward shows of its blocks: their order, what they hand on, and what they add."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from driving import COND, Block, Plain, at, case, state_of, tensors_in
from gated import Gated, given

import zoo
from samovar.arch import Anatomy, BlockDeclaration, find_anatomy
from samovar.arch.declarations import DECLARATIONS
from samovar.core.errors import DeclarationError, ModelError, SettingError
from samovar.hooks import NOT_BYPASSED
from samovar.trace import probe_anatomy
from samovar.trace.forward import Watcher
from samovar.trace.gates import Gate, Gates


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


@torch.no_grad()
def call(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    output: torch.Tensor = model(*at(step), COND)
    return output


# ------------------------------------------------------------------------------------------------ gates


def test_a_pass_is_asked_on_its_own_thread_and_the_outer_one_again_after_the_inner() -> None:
    gated, noting = Gated(Plain()), Noting()
    with gated.gates.asking(noting):
        thread = threading.Thread(target=lambda: call(gated.model))
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="given up"), gated.gates.asking(Noting()):
            raise ValueError("given up")
        assert gated.gates.running is noting
    assert noting.entered == []
    assert gated.gates.running is None


class Tied(Plain):
    """Runs one of its blocks at two places, and a module beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]
        self.beside = torch.nn.ModuleList([torch.nn.Identity()])


def test_gates_are_at_all_blocks_and_members_of_lists_and_leave_nothing() -> None:
    model = Tied()
    before = state_of(model)
    gated, noting = Gated(model), Noting()
    gated.through(noting, given(*at(0), COND))
    assert noting.entered == [("blocks", 0), ("blocks", 1), ("blocks", 0)]
    assert {gate.path for gate in gated.gates.by_module.values()} == {"blocks", "beside"}
    gated.gates.detach()
    assert state_of(model) == before
    assert gated.gates.by_module == {}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_block_that_cannot_be_gated_is_refused_and_everything_left_alone() -> None:
    model = Tied()
    model.beside[0] = torch.jit.script(torch.nn.Linear(2, 2))  # Without a gate it runs, which does no harm.
    Gates(model, find_anatomy(model), "gates").detach()
    model.blocks[1] = torch.jit.script(model.blocks[1].ff)
    before = state_of(model)
    with pytest.raises(SettingError, match="cannot be hooked"):
        Gates(model, find_anatomy(Plain()), "gates")
    assert state_of(model) == before


# ------------------------------------------------------------------------------------------------ streams


def watch(model: torch.nn.Module, **how: Any) -> Watcher:
    watcher = Watcher(model, find_anatomy(model), **how)
    with watcher.watching():
        call(model)
    return watcher


def carried(anatomy: Anatomy) -> dict[str, tuple[str | None, ...]]:
    return {stack.path: tuple(stream.parameter for stream in stack.streams) for stack in anatomy.stacks}


class Dual(Plain):
    """Two streams of one shape, which its blocks take in another order than they return them."""

    class Block(Block):
        def forward(self, temb: torch.Tensor, text: torch.Tensor, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x, temb), super().forward(text, temb), None

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        text = x.flip(1) * 0.5
        for block in self.blocks:
            x, text, _ = block(temb, text, x)
        return x + text


class Copying(Plain):
    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, temb) * 0.5
        return x


class Permuting(Plain):
    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, temb).transpose(0, 1).contiguous()
        return x.transpose(0, 1)


class Filling(Plain):
    class Block(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return x.copy_(super().forward(x, temb))

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)


STREAMS: dict[type[Plain], tuple[str | None, ...]] = {
    Plain: ("x",), Dual: ("x", "text", None), Copying: ("x",), Permuting: ("x",), Filling: ("x",),
}  # fmt: skip


@pytest.mark.parametrize("make", STREAMS)
def test_a_stream_is_known_by_identity_or_else_by_form(make: type[Plain]) -> None:
    model = make()
    before, anatomy = state_of(model), watch(make()).anatomy()
    assert carried(anatomy) == {"blocks": STREAMS[make]}
    watch(model)
    assert state_of(model) == before


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

    watcher = watch(Aside())
    anatomy = watcher.anatomy()
    assert (list(carried(anatomy)), anatomy.side) == (["blocks"], ("adapters",))
    answered = [(seen.gate.path, seen.segment is None) for seen in watcher.watched().trace.calls]
    assert answered == [("blocks", False), ("adapters", True)] * 2 + [("blocks", False)]


class Blockless(Plain):
    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return x


class Uneven(Plain):
    """Its last block returns more than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_forward_hook(lambda module, args, output: (output, output))

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = super().run(x, temb)[0]
        return last


class Opaque(Plain):
    """Its blocks return a dictionary."""

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            handle = block.register_forward_hook(lambda module, args, output: {"x": output})
            x = block(x, temb)["x"]
            handle.remove()
        return x


UNCLEAR: dict[type[Plain], str] = {
    Blockless: r"No block of Blockless ran, in 'blocks'",
    Uneven: r"different numbers of values \(1 by 'blocks.0', 2 by 'blocks.2'\)",
    Opaque: "A block returned dict; expected a tensor, a tuple or a list",
}


@pytest.mark.parametrize("make", UNCLEAR)
def test_a_forward_that_cannot_be_understood_runs_to_its_end_and_is_refused(make: type[Plain]) -> None:
    model = make()
    exact, watcher = call(model), Watcher(model, find_anatomy(model))
    with watcher.watching():
        assert torch.equal(call(model), exact)
    with pytest.raises(ModelError, match=UNCLEAR[make]):
        watcher.watched()


def test_a_declaration_that_the_blocks_contradict_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = BlockDeclaration(stacks=("blocks",), carried={"blocks": ("x", None)})
    monkeypatch.setitem(DECLARATIONS, "Copying", declared)
    with pytest.raises(DeclarationError, match="carries 2 values through 'blocks', but its blocks return 1"):
        watch(Copying()).anatomy()


# ------------------------------------------------------------------------------------------------ segments

SEGMENTS: dict[str, list[tuple[str, int]]] = {
    "FluxTransformer2DModel": [("transformer_blocks", 2), ("single_transformer_blocks", 2)],
    # The same blocks over and over, and one list whose blocks run with two lengths of the sequence.
    "RFD4ProteinaTransformer-recycling": [("transformer_layers", 1), ("transformer_layers", 1)],
    "MotifVideoTransformer3DModel": [
        ("transformer_blocks", 2), ("single_transformer_blocks", 2), ("single_transformer_blocks", 2)
    ],
    # Stacks that run inside another are no segments.
    "WanVACETransformer3DModel": [("vace_blocks", 2), ("blocks", 1)],
}  # fmt: skip
"""By zoo case: list and number of streams of each segment, in the order in which they run."""


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments(name: str) -> None:
    model = case(name).build()
    exact, gated = case(name).run(model), Gated(model)
    (trace, residuals, first_calls), output = gated.watched(gated.of(case(name)))
    assert zoo.equal(output, exact)
    assert [(segment.stack.path, len(segment.stack.streams)) for segment in trace.segments] == SEGMENTS[name]
    assert len(residuals) == sum(count for _, count in SEGMENTS[name])
    assert set(first_calls) == set(trace.segments)
    for segment in trace.segments:
        own = [call for call in trace.calls if call.segment is segment]
        assert [call.is_first for call in own] == [True] + [False] * (len(own) - 1)
        assert [call.is_last for call in own] == [False] * (len(own) - 1) + [True]
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(trace))
    assert held == 0, "a trace holds nothing of the forward that it was made of"


# ------------------------------------------------------------------------------------------------ the anatomy


def inputs(step: int) -> dict[str, torch.Tensor]:
    sample, time = at(step)
    return {"hidden_states": sample, "timestep": time, "encoder_hidden_states": COND}


def test_a_model_that_cannot_be_probed_says_why() -> None:
    with pytest.raises(ModelError, match="the sample reaches none of its blocks directly"):
        probe_anatomy(Plain(), inputs(0), inputs(0))
    with pytest.raises(ModelError, match="No stack of blocks was found in Linear"):
        probe_anatomy(torch.nn.Linear(2, 2), {})
    model = Plain()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        probe_anatomy(model, inputs(0) | {"hidden_states": torch.zeros(1, 5, 9)})
    assert state_of(model) == state_of(Plain())
    compiled = torch.compile(model, backend="eager")
    assert probe_anatomy(compiled, inputs(0), inputs(1)) == probe_anatomy(Plain(), inputs(0), inputs(1))
    torch.compiler.reset()
