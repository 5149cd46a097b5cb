"""Coverage: what share of the weights lies in blocks, and what holds the rest."""

from __future__ import annotations

from dataclasses import replace

import torch

import zoo
from samovar.arch import Coverage, coverage, find_anatomy
from samovar.arch.blocks import Anatomy
from samovar.trace import survey


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(10, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Module()
        self.trunk.blocks = torch.nn.ModuleList(Block() for _ in range(8))
        self.trunk.norm = torch.nn.Linear(5, 1, bias=False)
        self.trunk.table = torch.nn.Parameter(torch.zeros(45))
        self.embed = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(5, 10, bias=False))


def test_what_is_outside_is_named_the_largest_first() -> None:
    model = Model()
    found = coverage(model, find_anatomy(model))
    assert found == Coverage(3200, 4000, (("embed", 600), ("trunk.table", 180)))
    assert found.share == 0.8
    assert str(found) == "blocks hold 80.0 % of the weights; outside: embed 15.0 %, trunk.table 4.5 %"
    model.trunk = torch.compile(model.trunk)
    assert coverage(torch.compile(model), find_anatomy(model)) == found


def test_shared_weights_count_once_and_where_they_are_in_a_block_as_covered() -> None:
    model = Model()
    model.embed[0].weight = model.trunk.blocks[0].linear.weight
    model.again = model.embed
    found = coverage(model, find_anatomy(model))
    assert (found.covered_bytes, found.total_bytes) == (3200, 3600)
    assert found.uncovered == (("embed", 200), ("trunk.table", 180))


def test_a_stack_that_did_not_run_is_outside() -> None:
    model = Model()
    nothing = replace(find_anatomy(model), stacks=())
    assert coverage(model, nothing).uncovered[0] == ("trunk", 3400)
    assert str(coverage(torch.nn.Module(), Anatomy("Module", ()))) == "blocks hold 100.0 % of the weights"


def test_blocks_hold_nearly_all_of_a_real_model() -> None:
    (part,) = survey("FluxTransformer2DModel").components
    assert part.coverage is not None
    assert part.coverage.share > 0.98


def test_covered_and_uncovered_make_the_whole() -> None:
    for case in zoo.load()[::9]:
        if case.model in zoo.exported_classes():
            model = case.build()
            found = coverage(model, find_anatomy(model))
            rest = found.total_bytes - found.covered_bytes - sum(size for _, size in found.uncovered)
            assert 0 <= rest < 0.2 * found.total_bytes, case.id
