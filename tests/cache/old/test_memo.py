"""What is the same at every step is kept as long as nobody has changed it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from samovar.cache.memo import Memo, equal
from samovar.cache.trace import Active, Gate

from samovar.hooks import NOT_BYPASSED

ONE, TWO = Gate(Active(), "one"), Gate(Active(), "two")
NAN = float("nan")


def test_what_was_kept_is_recalled_by_module_and_call() -> None:
    memo, first, second = Memo(), torch.ones(2), (torch.zeros(1), None)
    assert memo.recall((ONE, 0)) is NOT_BYPASSED
    memo.keep((ONE, 0), first)
    memo.keep((ONE, 1), second)
    assert memo.recall((ONE, 0)) is first
    assert memo.recall((ONE, 1)) is second
    assert memo.recall((TWO, 0)) is NOT_BYPASSED
    memo.keep((ONE, 0), second)
    assert memo.recall((ONE, 0)) is second
    memo.clear()
    assert memo.recall((ONE, 0)) is memo.recall((ONE, 1)) is NOT_BYPASSED


@pytest.mark.parametrize("output", [None, (), "text"], ids=str)
def test_what_holds_no_tensor_can_be_kept(output: Any) -> None:
    memo = Memo()
    memo.keep((ONE, 0), output)
    assert memo.recall((ONE, 0)) is output


@pytest.mark.parametrize(
    "pack",
    [lambda t: t, lambda t: (torch.ones(1), t), lambda t: {"a": [t]}, lambda t: Transformer2DModelOutput(sample=t)],
    ids=["tensor", "tuple", "nested", "diffusers"],
)
def test_what_was_changed_in_place_is_not_recalled(pack: Any) -> None:
    memo, tensor = Memo(), torch.ones(3)
    memo.keep((ONE, 0), pack(tensor))
    assert memo.recall((ONE, 0)) is not NOT_BYPASSED
    tensor[1:].add_(1)
    assert memo.recall((ONE, 0)) is NOT_BYPASSED


def test_a_change_that_cannot_be_seen_is_not_risked() -> None:
    memo = Memo()
    with torch.inference_mode():
        memo.keep((ONE, 0), torch.ones(1))
        assert memo.recall((ONE, 0)) is NOT_BYPASSED


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.tensor([1.0, 1.0000001]), False),
        (torch.ones(2), torch.ones(1), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2), None, False),
        (None, torch.ones(2), False),
        (None, None, True),
        (torch.tensor([NAN]), torch.tensor([NAN]), False),
        ((torch.ones(1), torch.zeros(1)), (torch.ones(1), torch.zeros(1)), True),
        ((torch.ones(1), torch.zeros(1)), (torch.ones(1),), False),
        ((torch.ones(1), None), (torch.ones(1), torch.ones(1)), False),
        ((torch.ones(1),), [torch.ones(1)], False),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, False),
        ({"a": torch.ones(1)}, {"a": torch.ones(1)}, True),
        ((torch.ones(1), 2, "a"), (torch.ones(1), 2, "a"), True),
        ((torch.ones(1), 2), (torch.ones(1), 3), False),
        (SimpleNamespace(a=torch.ones(1)), SimpleNamespace(a=torch.zeros(1)), False),
    ],
    ids=["same", "near", "length", "shape", "type", "lost", "new", "nothing", "nan", "tuples", "shorter", "part lost",
         "other kind", "other key", "dicts", "plain", "other number", "opaque"],
)  # fmt: skip
def test_outputs_are_equal_bit_for_bit(one: Any, other: Any, expected: bool) -> None:
    assert equal(one, other) is expected
