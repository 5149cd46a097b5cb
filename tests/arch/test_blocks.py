"""Stacks by structure: what counts as one, what a block carries, how its output is read and rebuilt."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from samovar.arch import find_anatomy
from samovar.arch.blocks import BlockStack, Stream, output_values
from samovar.errors import ModelError


class Attention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor, temb: Any = None) -> Any:
        if temb is None:
            return None
        return context, self.attn(hidden_states), hidden_states


class Feed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)


def model_of(**lists: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, module in lists.items():
        model.add_module(name, module)
    return model


def paths(model: torch.nn.Module) -> list[str]:
    return [stack.path for stack in find_anatomy(model).stacks]


def test_what_counts_as_a_stack() -> None:
    two = lambda cls: torch.nn.ModuleList([cls(), cls()])  # noqa: E731
    assert paths(model_of(blocks=two(Block))) == ["blocks"]
    assert paths(model_of(blocks=two(Attention))) == ["blocks"], "the class name tells as well"
    assert paths(model_of(blocks=two(Feed))) == []
    assert paths(model_of(blocks=torch.nn.ModuleList([Block(), Feed()]))) == [], "all must attend"
    assert paths(model_of(blocks=torch.nn.ModuleList([Block()]))) == []
    assert paths(model_of(deep=model_of(layers=two(Block)))) == ["deep.layers"]
    assert paths(model_of(modes=torch.nn.ModuleDict({"image": two(Block), "text": two(Block)}))) == [
        "modes.image",
        "modes.text",
    ]
    assert paths(model_of(twins=torch.nn.ModuleList([model_of(layers=two(Block)), model_of(layers=two(Block))]))) == [
        "twins.0.layers",
        "twins.1.layers",
    ]
    assert find_anatomy(model_of(linear=torch.nn.Linear(2, 2))).leader is None


def test_diffusers_metadata_lets_a_single_block_be_a_stack() -> None:
    model = model_of(blocks=torch.nn.ModuleList([Block()]))
    model._no_split_modules = ["Block"]
    assert paths(model) == ["blocks"]


def test_a_stack_is_described() -> None:
    model = model_of(blocks=torch.nn.ModuleList([Block(), Block()]))
    stack = find_anatomy(model).stacks[0]
    assert len(stack) == 2
    assert stack.block_paths == ("blocks.0", "blocks.1")
    assert stack.modules(model) == tuple(model.blocks)
    assert stack.block_classes == ("Block",)
    assert stack.parameters == ("hidden_states", "context", "temb")
    assert stack.streams == (Stream("context"), Stream(None), Stream("hidden_states"))
    assert stack.carried == ("context", "hidden_states")
    assert stack.num_bytes == 2 * (16 + 4) * 4
    assert stack.evidence == "structure"
    assert find_anatomy(model).stack("blocks") == stack


def test_a_block_without_source_or_with_a_computed_result_is_left_to_the_probe() -> None:
    class Computed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attn(x)

    sourceless: dict[str, Any] = {"Block": Block}
    exec("class Made(Block):\n    def forward(self, x):\n        return x\n", sourceless)
    for cls in (Computed, sourceless["Made"]):
        model = model_of(blocks=torch.nn.ModuleList([cls(), cls()]))
        assert find_anatomy(model).stacks[0].streams == ()


def test_a_block_that_is_held_twice_has_both_its_places() -> None:
    one, two = Block(), Block()
    for blocks in ([one, two, one, two], [one, one, one]):
        model = model_of(blocks=torch.nn.ModuleList(blocks))
        (stack,) = find_anatomy(model).stacks
        assert stack.block_paths == tuple(f"blocks.{index}" for index in range(len(blocks)))
        assert stack.modules(model) == tuple(blocks)
        assert stack.num_bytes == len(set(blocks)) * (16 + 4) * 4


def test_a_compiled_model_has_the_anatomy_of_the_bare_one() -> None:
    def build(compiled: bool) -> torch.nn.Module:
        blocks = [Block(), Block()]
        inner = model_of(blocks=torch.nn.ModuleList(map(torch.compile, blocks) if compiled else blocks))
        return model_of(inner=torch.compile(inner) if compiled else inner)

    bare, compiled = build(False), torch.compile(build(True))
    assert find_anatomy(compiled) == find_anatomy(bare)
    (stack,) = find_anatomy(compiled).stacks
    assert stack.modules(compiled) == tuple(compiled.inner.blocks), "as the model calls them"


def test_arguments_go_by_the_names_of_the_first_block() -> None:
    class Other(torch.nn.Module):
        def forward(self, temb: Any, x: Any, ctx: Any, extra: Any = None) -> None: ...

    stack = BlockStack("blocks", (), (), ("hidden_states", "context", "temb"), (), 0)
    assert stack.arguments(Block(), (1,), {"temb": 3}) == {"hidden_states": 1, "temb": 3}
    assert stack.arguments(Other(), (3, 1), {"ctx": 2, "extra": 4}) == {
        "temb": 3, "hidden_states": 1, "context": 2, "extra": 4,
    }  # fmt: skip


def test_an_unknown_stack_is_refused_with_the_nearest() -> None:
    anatomy = find_anatomy(model_of(blocks=torch.nn.ModuleList([Block(), Block()])))
    with pytest.raises(ModelError, match=r"Module has no stack of blocks at 'bloks'. Did you mean 'blocks'\?"):
        anatomy.stack("bloks")


def test_functions_inside_forward_return_to_themselves() -> None:
    class Nested(Block):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            if x is None:
                return x, y

            def helper(x: torch.Tensor) -> torch.Tensor:
                return x

            class Inner:
                def method(self) -> Any:
                    return y

            helper(x), Inner()

    model = model_of(blocks=torch.nn.ModuleList([Nested(), Nested()]))
    assert find_anatomy(model).stacks[0].carried == ("x", "y")


class Pair(NamedTuple):
    first: Any
    second: Any


def test_outputs_are_read_and_rebuilt_in_their_form() -> None:
    def stack(*parameters: str | None) -> BlockStack:
        return BlockStack("blocks", (), (), (), tuple(map(Stream, parameters)), 0)

    one, two, three = (torch.full((2,), float(value)) for value in (1, 2, 3))
    assert output_values(one) == (one,)
    single = stack("x")
    assert single.read(one) == {"x": one}
    assert single.rebuild(one, {"x": two}) is two
    pair = stack("context", None)
    for form, output in ((tuple, (one, two)), (list, [one, two]), (Pair, Pair(one, two))):
        assert pair.read(output) == {"context": one}
        rebuilt = pair.rebuild(output, {"context": three})
        assert type(rebuilt) is form
        assert rebuilt[0] is three
        assert rebuilt[1] is two
    assert pair.read((None, two)) == {"context": None}
    with pytest.raises(ModelError, match=r"'blocks' returned 1 values; 2 were expected"):
        pair.read(one)
    with pytest.raises(ModelError, match=r"'blocks' returned 3 values; 2 were expected"):
        pair.rebuild((one, two, three), {})
    with pytest.raises(ModelError, match="A block returned dict; a tensor, a tuple or a list was expected"):
        output_values({"sample": one})
