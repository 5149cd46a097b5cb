"""What a watched forward shows of its blocks: their order, and what they hand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, Block, Plain, at, state_of

from samovar.arch import Anatomy, BlockDeclaration, find_anatomy, register_declaration
from samovar.arch.declarations import DECLARATIONS
from samovar.errors import DeclarationError, ModelError
from samovar.trace.watch import Watcher


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
