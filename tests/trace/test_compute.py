"""How much a call computes, counted without weights."""

from __future__ import annotations

import torch

from samovar.trace.compute import operations_of
from samovar.trace.rehearse import CallForm


class Attending(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 48), torch.nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        query, key, value = self.first(tokens).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return self.second(mixed.transpose(1, 2).flatten(-2)) * scale


def test_linear_layers_and_attention_are_counted() -> None:
    model = Attending()
    call = CallForm((torch.empty(3, 7, 16, device="meta"),), {"scale": 2.0})
    linear = 2 * 3 * 7 * 16 * (48 + 5)
    attention = 2 * 2 * 3 * 2 * 7 * 7 * 8
    assert operations_of(model, call) == linear + attention
    assert not model.first.weight.is_meta, "and nothing of the model is touched"


def test_a_model_that_cannot_be_called_so_is_not_counted() -> None:
    """As where a folder's configurations do not fit each other."""
    assert operations_of(Attending(), CallForm((torch.empty(3, 7, 15, device="meta"),), {"scale": 2.0})) is None
