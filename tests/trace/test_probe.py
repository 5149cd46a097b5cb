"""What a forward shows of a model: what its blocks hand on, which stack leads, or why none can be skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, Block, Plain, at, counted, state_of

from samovar.arch import BlockDeclaration, find_anatomy
from samovar.arch.declarations import DECLARATIONS
from samovar.core.errors import DeclarationError, ModelError, SettingError
from samovar.trace import probe_anatomy
from samovar.trace.gates import Gates


def inputs(step: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    given = dict(zip(("hidden_states", "timestep", "encoder_hidden_states"), (*at(step), COND), strict=True))
    return {name: tensor.to(dtype) for name, tensor in given.items()}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_block_that_cannot_be_gated_is_refused_and_everything_left_alone() -> None:
    model = Plain()
    model.beside = torch.nn.ModuleList([torch.jit.script(torch.nn.Linear(2, 2))])  # Without a gate it runs.
    Gates(model, find_anatomy(model), "gates").detach()
    model.blocks[1] = torch.jit.script(model.blocks[1].ff)
    before = state_of(model)
    with pytest.raises(SettingError, match="cannot be hooked"):
        Gates(model, find_anatomy(Plain()), "gates")
    assert state_of(model) == before


# ------------------------------------------------------------------------------------------------ streams


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
    before = state_of(model)
    (stack,) = probe_anatomy(model, inputs(0)).stacks
    assert (stack.path, tuple(stream.parameter for stream in stack.streams)) == ("blocks", STREAMS[make])
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

    anatomy = probe_anatomy(Aside(), inputs(0), inputs(1))
    assert ([stack.path for stack in anatomy.stacks], anatomy.side) == (["blocks"], ("adapters",))


def test_a_declaration_that_the_blocks_contradict_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = BlockDeclaration(stacks=("blocks",), carried={"blocks": ("x", None)})
    monkeypatch.setitem(DECLARATIONS, "Copying", declared)
    with pytest.raises(DeclarationError, match="carries 2 values through 'blocks', but its blocks return 1"):
        probe_anatomy(Copying(), inputs(0))


# ------------------------------------------------------------------------------------------------ the rehearsal


class Refining(Plain):
    """Refines its text with a token for the time before the sample comes in, and knows some times only."""

    def __init__(self) -> None:
        super().__init__()
        self.refiner = torch.nn.ModuleList(Block(self.width) for _ in range(2))

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        if float(timestep[0]) != 1.0:
            raise ValueError("no such time")
        text = torch.cat([self.embed_c(encoder_hidden_states), self.embed_t(timestep[:, None])])[None]
        for block in self.refiner:
            text = block(text, torch.zeros(1).to(text))
        return self.unembed(self.run(self.embed_x(hidden_states), text.mean(1, keepdim=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_that_sees_the_time_but_not_the_sample_does_not_lead(dtype: torch.dtype) -> None:
    model = Refining().to(dtype)
    with counted(model.modules()) as calls:
        assert probe_anatomy(model, inputs(0, dtype), inputs(1, dtype)).leader == "blocks"
    assert len(calls) == len(set(calls)), "what is tried is tried on its twin"


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


class Tapped(Plain):
    """A value in the middle of the stack is used behind it."""

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        middle = self.blocks[1](self.blocks[0](x, temb), temb)
        return self.blocks[2](middle, temb) + middle


class Deaf(Plain):
    """Its blocks see the conditioning alone; the sample is added behind them."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        temb = self.embed(timestep, encoder_hidden_states)
        return self.unembed(self.run(temb.expand(1, 5, -1), temb)) + hidden_states


class Strict(Plain):
    """Takes the very sample that it was made for, and no other."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        if not torch.equal(hidden_states, at(0)[0]):
            raise ValueError("another sample")
        return super().forward(hidden_states, timestep, encoder_hidden_states)


class Endless(Plain):
    """Its output is no number."""

    def forward(self, **given: Any) -> torch.Tensor:
        return super().forward(**given) * torch.nan


class Once(Plain):
    """Cannot be run outside of its own run."""

    itself: Any = None

    def forward(self, **given: Any) -> torch.Tensor:
        if self.itself not in (None, id(self)):
            raise RuntimeError("not at home")
        return super().forward(**given)


REFUSED: dict[type[Plain], str] = {
    Blockless: r"No block of Blockless ran, in 'blocks'",
    Uneven: r"different numbers of values \(1 by 'blocks.0', 2 by 'blocks.2'\)",
    Opaque: "A block returned dict; expected a tensor, a tuple or a list",
    Tapped: r"a skipped step differs from a computed one by \d",
    Endless: "differs from a computed one by nan",
    Deaf: "the sample reaches none of its blocks directly",
    Strict: r"could not test which blocks depend on the sample \(ValueError: another",
    Once: r"a trial of the model failed \(RuntimeError: not at home\)",
}


@pytest.mark.parametrize("make", REFUSED)
def test_a_model_that_cannot_be_skipped_is_found_out_and_left_alone(make: type[Plain]) -> None:
    model = make()
    vars(model)["itself"] = id(model)
    before = state_of(model)
    with pytest.raises(ModelError, match=REFUSED[make]):
        probe_anatomy(model, inputs(0), inputs(1))
    assert state_of(model) == before


def test_a_model_that_cannot_be_probed_says_why() -> None:
    with pytest.raises(ModelError, match="No stack of blocks was found in Linear"):
        probe_anatomy(torch.nn.Linear(2, 2), {})
    model = Plain()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        probe_anatomy(model, inputs(0) | {"hidden_states": torch.zeros(1, 5, 9)})
    assert state_of(model) == state_of(Plain())
    compiled = torch.compile(model, backend="eager")
    assert probe_anatomy(compiled, inputs(0), inputs(1)) == probe_anatomy(Plain(), inputs(0), inputs(1))
    torch.compiler.reset()
