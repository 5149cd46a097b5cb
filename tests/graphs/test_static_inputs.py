"""What makes two calls of one form, and what is copied where."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from samovar.graphs.static_inputs import Unsuitable, form_of, has_same_bits


@dataclass
class Held:
    tensor: torch.Tensor
    name: str = "a"


Pair = namedtuple("Pair", "one other")
A, B = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)

SAME: list[tuple[Any, Any]] = [
    (A, B), ([A, 1, "x"], [B, 1, "x"]), ({"a": (A, None)}, {"a": (B, None)}), (Pair(A, 2), Pair(B, 2)),
    (Held(A), Held(B)), ((A, A), (B, B)), (A.expand(4, 2, 3), B.expand(4, 2, 3)),
]  # fmt: skip
OTHER: list[tuple[Any, Any]] = [
    (A, A.t()), (A, A.double()), (A, A[:1]), ([A], (A,)), ([A, 1], [A, 2]), ([A, True], [A, 1]), ((A, A), (A, B)),
    (Held(A), Held(A, "b")), (A.expand(2, 2, 3), A), ([A, 0.0], [A, -0.0]),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_calls_of_one_form(one: Any, other: Any) -> None:
    assert form_of(one) == form_of(other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_calls_of_other_forms(one: Any, other: Any) -> None:
    assert form_of(one) != form_of(other)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.float32(1),
        torch.nn.Linear(1, 1),
        torch.eye(2).to_sparse(),
        torch.ones(1, device="meta"),
        A.as_subclass(type("Special", (torch.Tensor,), {})),
        torch.ones(2, dtype=torch.cfloat).conj(),
    ],
)
def test_what_cannot_be_compared(value: Any) -> None:
    with pytest.raises(Unsuitable):
        form_of([A, value])


def test_bits_are_compared() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert has_same_bits({"a": nan}, {"a": nan.clone()})
    assert not has_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not has_same_bits([A], (A,))
    assert not has_same_bits(object(), object())
