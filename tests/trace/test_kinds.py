"""What tokens are made of: told by what moves, not by names or shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar.errors import ModelError
from samovar.trace import probe_anatomy


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.attn(torch.cat([x, y], dim=1)).mean(1, keepdim=True)  # Everything depends on everything.
        return x + both, y + both


class Model(torch.nn.Module):
    """Streams that a test composes from the sample (s), the conditioning (c) and learned padding (p)."""

    def __init__(self, x: str, y: str) -> None:
        super().__init__()
        self.parts = (x, y)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.padding = torch.nn.Parameter(torch.randn(1, 2, 4))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        source = {"s": first, "c": second, "p": self.padding, "+": first + second}
        x, y = (torch.cat([source[part] for part in parts], dim=1) for parts in self.parts)
        for block in self.blocks:
            x, y = block(x, y)
        return x


def inputs(step: int) -> dict[str, Any]:
    torch.manual_seed(0)
    second = torch.randn(1, 3, 4)
    torch.manual_seed(step + 1)
    return {"first": torch.randn(1, 3, 4), "second": second}


@pytest.mark.parametrize(
    ("parts", "kind"),
    [("s", "image"), ("c", "text"), ("sc", "joint"), ("cs", "joint"), ("sp", "image"), ("p", "text"), ("+", "image"),
     ("+c", "joint"), ("cp", "text")],
)  # fmt: skip
def test_kind_of_a_composed_stream(parts: str, kind: str) -> None:
    anatomy = probe_anatomy(Model(parts, "s"), inputs(0), inputs(1))
    assert [stream.kind for stream in anatomy.stacks[0].streams] == [kind, "image"]


def test_steps_that_do_not_differ_are_refused() -> None:
    with pytest.raises(ModelError, match=r"the same values in 'first', 'second'. .* two different denoising steps"):
        probe_anatomy(Model("s", "c"), inputs(0), inputs(0))


class Lister(Block):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return *super().forward(x, y), [x, None]


def test_values_of_any_form_beside_the_streams() -> None:
    class Listing(Model):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            x, y = first, second
            for block in self.blocks:
                x, y, (extra, nothing) = block(x, y)
                assert extra.shape == x.shape
                assert nothing is None
            return x

    model = Listing("s", "c")
    model.blocks = torch.nn.ModuleList([Lister(), Lister()])
    anatomy = probe_anatomy(model, inputs(0), inputs(1))
    assert [stream.kind for stream in anatomy.stacks[0].streams] == ["image", "text", None]
