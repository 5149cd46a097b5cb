"""Declarations: the one line that a model of another library needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from samovar.arch import BlockDeclaration, find_anatomy, register_declaration
from samovar.arch.declarations import DECLARATIONS
from samovar.core.errors import DeclarationError
from samovar.trace import probe_anatomy


class Mixer(torch.nn.Module):
    """A block in a model of no library."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, state: torch.Tensor, mood: torch.Tensor) -> list[torch.Tensor]:
        return [self.linear(state) + mood, state.mean()]


class Foreign(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        # Each of a class of its own, so that structure does not show that they are repeated.
        self.inner.steps = torch.nn.ModuleList(type("Mixer", (Mixer,), {})() for _ in range(3))
        self.adapters = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, text], dim=1)
        for index, step in enumerate(self.inner.steps):
            x, _ = step(x * 1.5, mood=text.mean())
            if index < 2:
                x = x + self.adapters[index](x)
        return x


@pytest.fixture(autouse=True)
def _declarations_as_before() -> Iterator[None]:
    before = dict(DECLARATIONS)
    yield
    DECLARATIONS.clear()
    DECLARATIONS.update(before)


def inputs(step: int) -> dict[str, Any]:
    return {"x": torch.full((1, 3, 4), float(step)), "text": torch.ones(1, 2, 4)}


def test_one_declaration_serves_a_foreign_model() -> None:
    model = Foreign()
    with pytest.raises(ValueError, match="No stack of blocks was found in Foreign"):
        probe_anatomy(model, inputs(0))
    register_declaration("Foreign", BlockDeclaration(stacks=("inner.steps",)))
    anatomy = probe_anatomy(model, inputs(0), inputs(1))
    (stack,) = anatomy.stacks
    assert stack.path == "inner.steps"
    assert [stream.parameter for stream in stack.streams] == ["state", None]
    assert anatomy.side == ("adapters",)
    assert anatomy.leader == "inner.steps"


def test_what_is_declared_stays_as_declared() -> None:
    declaration = BlockDeclaration(
        stacks=("inner.steps",), carried={"inner.steps": ("mood", None)}, side=("adapters",), leader="inner.steps"
    )
    register_declaration("Foreign", declaration)
    anatomy = probe_anatomy(Foreign(), inputs(0), inputs(1))
    assert [stream.parameter for stream in anatomy.stacks[0].streams] == ["mood", None]
    assert (anatomy.side, anatomy.leader) == (("adapters",), "inner.steps")


Declared = BlockDeclaration
MISFITS = [
    (Declared(stacks=("inner.stebs",)), r"Foreign names 'inner.stebs'.*Did you mean 'inner.steps'\?"),
    (Declared(side=("inner.stebs",)), r"Foreign names 'inner.stebs'.*Did you mean 'inner.steps'\?"),
    (Declared(leader="inner.stebs"), r"Foreign names 'inner.stebs'.*Did you mean 'inner.steps'\?"),
    (Declared(stacks=("inner",)), r"'inner' as a stack, but it is a Module; expected a list .* 'inner.steps'"),
    (Declared(stacks=("nothing",)), "'nothing' as a stack, but it is empty; expected a list"),
    (Declared(stacks=("inner.steps",) * 2), "names the stack 'inner.steps' twice"),
    (Declared(stacks=("inner.steps",), leader="inner"), "has 'inner' as its leader, which is not a stack of blocks."),
]


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        *MISFITS,
        (Declared(carried={"inner.stebs": ("state",)}), r"Foreign names 'inner.stebs'.*Did you mean 'inner.steps'\?"),
        (Declared(("inner.steps",), {"inner.steps": ("stat", None)}),
         r"Foreign carries 'stat' through 'inner.steps', but Mixer takes no such parameter. Did you mean 'state'\?"),
        (Declared(("inner.steps",), {"adapters": (None,)}), "has 'adapters' as a key of carried, which is not a stack"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_refused(declaration: BlockDeclaration, message: str) -> None:
    model = Foreign()
    model.nothing = torch.nn.ModuleList()
    register_declaration("Foreign", declaration)
    with pytest.raises(DeclarationError, match=message):
        find_anatomy(model)


def test_a_parameter_that_only_kwargs_takes_may_be_declared() -> None:
    class Open(Mixer):
        def forward(self, state: torch.Tensor, **others: Any) -> list[torch.Tensor]:
            return super().forward(state, **others)

    register_declaration("Foreign", BlockDeclaration(stacks=("inner.steps",), carried={"inner.steps": ("mood", None)}))
    model = Foreign()
    model.inner.steps = torch.nn.ModuleList([Open(), Open()])
    assert [stream.parameter for stream in find_anatomy(model).stacks[0].streams] == ["mood", None]


def test_nonsense_is_refused() -> None:
    with pytest.raises(DeclarationError, match=r"Foreign has stacks='blocks', a string; .* \('blocks',\)"):
        register_declaration("Foreign", BlockDeclaration(stacks="blocks"))  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="takes a class name and a BlockDeclaration"):
        register_declaration("Foreign", {"stacks": ["inner.steps"]})  # type: ignore[arg-type]
