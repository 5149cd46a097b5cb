"""Operations that a replay would not do, and tensors that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from samovar.graphs.audit import Audit, Constants

WEIGHT = torch.randn(4, 4)
TABLE = torch.ones(4)

FOUND: list[tuple[str, Callable[[torch.Tensor], Any], str | None]] = [
    ("plain", lambda x: (x @ WEIGHT).relu_() + TABLE, None),
    ("attention", lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]), None),
    ("no dropout", lambda x: functional.dropout(x, 0.5, training=False), None),
    ("indices", lambda x: x[torch.tensor([0, 1])], None),
    ("own memory", lambda x: torch.zeros_like(x).add_(x), None),
    ("a view of its own", lambda x: (x * 2)[0].mul_(2), None),
    ("item", lambda x: x.sum().item(), "waits for the device (_local_scalar_dense)"),
    ("equal", lambda x: torch.equal(x, x), "waits for the device (equal)"),
    ("nonzero", lambda x: x.nonzero(), "waits for the device (nonzero)"),
    ("mask", lambda x: x[x > 0], "waits for the device (index with a mask)"),
    ("repeats", lambda x: x[0].repeat_interleave(torch.tensor([1, 2, 1, 1])), "waits for the device"),
    ("sums", lambda x: torch.zeros(4, 4).scatter_add(0, x.long().clamp(0, 3), x),
     "adds up in no fixed order (scatter_add), so that its bits differ from run to run"),
    ("input", lambda x: x[0].add_(1), "writes into its inputs (add_)"),
    ("out", lambda x: torch.add(x[0], 1, out=TABLE), "writes into what outlives it (add)"),
    ("table", lambda x: TABLE.mul_(1.0), "writes into what outlives it (mul_)"),
    ("weight", lambda x: WEIGHT.mul_(1.0), "writes into what outlives it (mul_)"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "problem"), [case[1:] for case in FOUND], ids=[case[0] for case in FOUND])
def test_what_is_found(function: Callable[[torch.Tensor], Any], problem: str | None) -> None:
    given = torch.randn(4, 4)
    audit = Audit([given], [WEIGHT])
    with audit:
        function(given)
    assert audit.problem is None if problem is None else problem in str(audit.problem)


def test_what_is_read_and_is_no_weight_is_kept() -> None:
    given = torch.randn(4, 4)
    audit = Audit([given], [WEIGHT])
    with audit:
        (given[0] @ WEIGHT + TABLE) * TABLE[0] + torch.ones(4)
    assert len(audit.constants) == 1
    assert audit.constants[0] is TABLE


def test_the_same_numbers_are_copied_from_the_first() -> None:
    constants = Constants(torch.device("cpu"))
    with constants:
        one, other = torch.tensor([1, 2]), torch.tensor([1, 2])
        assert torch.tensor([1.0, 2.0]).dtype == torch.float32
        assert torch.tensor([1, 2], dtype=torch.float64).dtype == torch.float64
        assert one.new_tensor(3).item() == torch.as_tensor(3).item() == 3
    assert len(constants.made) == 5
    one.fill_(7)
    assert other.tolist() == [1, 2], "each call has its own"
    with constants:
        assert torch.tensor([1, 2]).tolist() == [1, 2]
