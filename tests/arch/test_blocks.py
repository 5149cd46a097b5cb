"""Stacks by structure: what counts as one, what a block carries, how its output is read, how much blocks hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from samovar.arch import Coverage, coverage, find_anatomy
from samovar.arch.blocks import BlockStack

Linear, Norm, ModuleList = torch.nn.Linear, torch.nn.LayerNorm, torch.nn.ModuleList


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.out = Norm(4), Linear(4, 4), Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor, temb: Any = None) -> Any:
        if temb is None:
            return None
        hidden_states = hidden_states + self.attn(hidden_states)
        return context, self.attn(hidden_states), hidden_states


BLOCK_BYTES = 4 * (2 * 4 + 2 * (16 + 4))


def built_of(**parts: torch.nn.Module) -> type[torch.nn.Module]:
    """A class of modules with these parts, whose source says nothing."""

    class Built(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, module in copy.deepcopy(parts).items():
                self.add_module(name, module)

        def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor: ...

    return Built


def list_of(cls: type[torch.nn.Module], count: int = 2) -> ModuleList:
    return ModuleList(cls() for _ in range(count))


def model_of(**lists: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, module in lists.items():
        model.add_module(name, module)
    return model


def paths(model: torch.nn.Module) -> list[str]:
    return [stack.path for stack in find_anatomy(model).stacks]


Single = built_of(linear1=Linear(8, 56), linear2=Linear(40, 8), norm=Norm(8), modulation=Linear(8, 24))
"""Attention and feed-forward part side by side in two maps, as in the original FLUX: nothing is called attention."""
Modulation = built_of(linear=Linear(8, 48))
FeedForward = built_of(up=Linear(8, 32), down=Linear(32, 8))
Projection = built_of(norm=Norm(16), first=Linear(16, 8), last=Linear(8, 4))
FinalLayer = built_of(norm=Norm(8), linear=Linear(8, 4), modulation=Linear(8, 16))
Resnet = built_of(
    norm=torch.nn.GroupNorm(2, 8), conv=torch.nn.Conv2d(8, 8, 3), temb=Linear(8, 8), conv2=torch.nn.Conv2d(8, 8, 3)
)
ConvNext = built_of(mix=torch.nn.Conv1d(8, 8, 7, groups=8), norm=Norm(8), up=Linear(8, 32), down=Linear(32, 8))
Rest = list_of(Single, 6)
"""The stack of the model that other lists stand beside."""


def stages(*widths: int) -> ModuleList:
    """Blocks of one width in each stage, and stages of classes of their own."""
    block = {
        width: built_of(norm=Norm(width), qkv=Linear(width, 3 * width), out=Linear(width, width)) for width in widths
    }
    return ModuleList(type("Stage", (built_of(blocks=list_of(block[w]), norm=Norm(w)),), {})() for w in widths)


Dict, Sequential = torch.nn.ModuleDict, torch.nn.Sequential
First, Last = built_of(norm=Norm(8), a=Linear(8, 8), b=Linear(8, 8)), built_of(n=Norm(8), q=Linear(8, 8))
Sparse = built_of(norm=Norm(8), attention=Linear(8, 24), out=Linear(8, 8), experts=list_of(FeedForward, 8))
Halved = built_of(norm=Norm(8), parts=ModuleList([Single(), Single()]))
Twin = built_of(embed=Linear(4, 8), layers=list_of(Single, 3), out=Linear(8, 4))
BALLAST = Linear(1000, 10)

STACKS: dict[str, tuple[dict[str, torch.nn.Module], list[str]]] = {
    "blocks of any name": ({"things": list_of(Block), "ballast": BALLAST}, ["things"]),
    "attention and feed-forward in two maps": ({"things": list_of(Single), "ballast": BALLAST}, ["things"]),
    "most of the weights": ({"layers": list_of(FeedForward, 4), "head": Linear(8, 8)}, ["layers"]),
    "little of the weights": ({"layers": list_of(FeedForward, 4), "head": Linear(8, 1000)}, []),
    "never back to its width": ({"layers": list_of(Modulation, 4)}, []),
    "experts belong to their block": ({"layers": list_of(Sparse, 4)}, ["layers"]),
    "two halves of a block": ({"layers": list_of(Halved, 4)}, ["layers"]),
    "a dictionary": ({"blocks": Dict({"first": Single(), "second": Single()})}, ["blocks"]),
    "a sequence": ({"blocks": Sequential(Single(), Single(), Single())}, ["blocks"]),
    "an MLP": ({"time": Sequential(Linear(8, 8), torch.nn.SiLU(), Linear(8, 8)), "blocks": Rest}, ["blocks"]),
    "another one first": ({"blocks": ModuleList([First(), Single(), Single(), Single()])}, ["blocks"]),
    "half of them alike": ({"blocks": ModuleList([First(), Single()])}, []),
    "not all are blocks": ({"blocks": ModuleList([Single(), Single(), Last()]), "ballast": BALLAST}, []),
    "a single one": ({"blocks": list_of(Single, 1)}, []),
    "stages that get wider": ({"stages": stages(5, 7, 11)}, [f"stages.{i}.blocks" for i in range(3)]),
    "transformers side by side": ({"twins": list_of(Twin)}, ["twins.0.layers", "twins.1.layers"]),
    "lists by name": ({"modes": Dict({"a": list_of(Single), "b": list_of(Single)})}, ["modes.a", "modes.b"]),
    "deep inside": ({"deep": model_of(layers=list_of(Single))}, ["deep.layers"]),
    "nothing": ({"linear": Linear(2, 2)}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_stacks_are_recognised_by_how_their_members_are_built(name: str) -> None:
    lists, expected = STACKS[name]
    assert paths(model_of(**lists)) == expected


@pytest.mark.parametrize("cls", [Modulation, FeedForward, Projection, FinalLayer, Resnet, ConvNext, Norm])
def test_other_lists_are_no_stacks(cls: Any) -> None:
    extras = ModuleList(cls(8) if cls is Norm else cls() for _ in range(6))
    assert paths(model_of(blocks=Rest, extras=extras)) == ["blocks"]
    assert paths(model_of(extras=Dict({"a": extras[0], "b": extras[1]}), blocks=Rest)) == ["blocks"]


def test_a_block_between_two_lists_of_its_class_is_a_stack_of_one() -> None:
    model = model_of(in_blocks=list_of(Single), mid_block=Single(), out_blocks=list_of(Single), head=FinalLayer())
    model.mid_block = torch.compile(model.mid_block)
    before, middle, after = find_anatomy(model).stacks
    assert (before.path, middle.path, after.path) == ("in_blocks", "mid_block", "out_blocks")
    assert (len(middle), middle.block_paths, middle.pattern) == (1, ("mid_block",), "mid_block")
    assert middle.modules(model) == (model.mid_block,)
    assert before.pattern == "in_blocks.*"


def test_what_a_class_declares_for_other_libraries_is_read() -> None:
    unclear = model_of(inner=model_of(steps=list_of(Modulation)), rest=Rest)
    assert paths(unclear) == ["rest"]
    for name, value in (
        ("_layerwise_offload_blocks_attrs", ["inner.steps"]),
        ("_layerwise_offload_blocks_attr", "inner.steps"),
        ("_repeated_blocks", [Modulation.__name__]),
    ):
        vars(unclear)[name] = value
        assert "inner.steps" in paths(unclear)
        del vars(unclear)[name]


def test_a_declared_list_that_is_missing_or_no_list_is_reported() -> None:
    model = model_of(rest=Rest, head=Linear(2, 2))
    for path, problem in (("blocks", "does not exist"), ("head", "is a Linear")):
        model._layerwise_offload_blocks_attrs = [path]
        with pytest.warns(UserWarning, match=f"Module._layerwise_offload_blocks_attrs names '{path}', which {problem}"):
            assert paths(model) == ["rest"]


def test_a_block_that_is_held_twice_has_both_its_places() -> None:
    one, two = Block(), Block()
    for blocks in ([one, two, one, two], [one, one, one]):
        model = model_of(blocks=torch.nn.ModuleList(blocks))
        (stack,) = find_anatomy(model).stacks
        assert stack.block_paths == tuple(f"blocks.{index}" for index in range(len(blocks)))
        assert stack.modules(model) == tuple(blocks)
        assert stack.num_bytes == len(set(blocks)) * BLOCK_BYTES


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
    assert stack.places(Block(), (1,), {"temb": 3}) == {"hidden_states": 0, "temb": "temb"}
    assert stack.places(Other(), (3, 1), {"ctx": 2, "extra": 4}) == {
        "temb": 0, "hidden_states": 1, "context": "ctx", "extra": "extra",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ coverage


class Narrow(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(10, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Covered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Module()
        self.trunk.blocks = torch.nn.ModuleList(Narrow() for _ in range(8))
        self.trunk.norm = torch.nn.Linear(5, 1, bias=False)
        self.trunk.table = torch.nn.Parameter(torch.zeros(45))
        self.embed = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(5, 10, bias=False))


def test_what_is_outside_is_named_the_largest_first() -> None:
    model = Covered()
    found = coverage(model, find_anatomy(model))
    assert found == Coverage(3200, 4000, (("embed", 600), ("trunk.table", 180)))
    assert found.share == 0.8
    assert str(found) == "blocks hold 80.0 % of the weights; outside: embed 15.0 %, trunk.table 4.5 %"
    model.trunk = torch.compile(model.trunk)
    assert coverage(torch.compile(model), find_anatomy(model)) == found


def test_shared_weights_count_once_and_where_they_are_in_a_block_as_covered() -> None:
    model = Covered()
    model.embed[0].weight = model.trunk.blocks[0].linear.weight
    model.again = model.embed
    found = coverage(model, find_anatomy(model))
    assert (found.covered_bytes, found.total_bytes) == (3200, 3600)
    assert found.uncovered == (("embed", 200), ("trunk.table", 180))
