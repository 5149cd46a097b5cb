"""What source says: which parameters come back, and whether something is added to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar.arch.source import adds_to_its_input, returned_parameters


class Sum(torch.nn.Module):
    def forward(self, x: Any, gate: Any) -> Any:
        return x + gate * self.part(x)


class Grown(torch.nn.Module):
    def forward(self, img: Any, txt: Any) -> Any:
        img, txt = img + self.part(txt), txt + self.part(img)
        return img, txt


class InPlace(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        x += self.part(x)
        return x


class Renamed(torch.nn.Module):
    def forward(self, hidden_states: Any) -> Any:
        residual = hidden_states
        hidden_states = self.part(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class Elsewhere(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return self.run(x)

    def run(self, x: Any) -> Any:
        if x is None:
            return x
        return self.part(x) + self.part(2) + x


class Inherited(Sum):
    pass


class Fresh(torch.nn.Module):
    def forward(self, x: Any, scale: Any) -> Any:
        shift = self.part(scale)
        return self.part(x) * (1 + scale) + shift


class Unused(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        total = x + 1
        self.seen = total
        return self.part(x)


class Nested(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        def helper(y: Any) -> Any:
            return y + 1

        return helper(x)


@pytest.mark.parametrize("cls", [Sum, Grown, InPlace, Renamed, Inherited])
def test_blocks_that_add_to_what_they_are_given(cls: type[torch.nn.Module]) -> None:
    assert adds_to_its_input(cls)


@pytest.mark.parametrize("cls", [Fresh, Unused, Nested, torch.nn.Linear, torch.nn.Module])
def test_modules_that_return_something_new(cls: type[torch.nn.Module]) -> None:
    assert not adds_to_its_input(cls)


def test_the_sum_may_be_in_one_branch_of_another_method() -> None:
    assert adds_to_its_input(Elsewhere)


def test_a_class_without_source_says_nothing() -> None:
    made: dict[str, Any] = {"torch": torch}
    exec("class Made(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n", made)
    assert not adds_to_its_input(made["Made"])
    assert returned_parameters(made["Made"](), ("x",)) == ()


def test_returned_parameters_are_those_that_the_last_return_names() -> None:
    assert returned_parameters(Grown(), ("img", "txt")) == ("img", "txt")
    assert returned_parameters(Renamed(), ("hidden_states",)) == ("hidden_states",)
    assert returned_parameters(Sum(), ("x", "gate")) == ()
