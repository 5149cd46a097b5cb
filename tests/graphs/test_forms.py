"""What makes two calls of one form, and what is copied where."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from samovar.graphs import forms
from samovar.graphs.forms import Form, Given, Places, Unsuitable, has_same_bits
from samovar.hooks import Steady


@dataclass
class Held:
    tensor: torch.Tensor
    name: str = "a"


Pair = namedtuple("Pair", "one other")
A, B = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)

SAME: list[tuple[Any, Any]] = [
    (A, B), ([A, 1, "x"], [B, 1, "x"]), ({"a": (A, None)}, {"a": (B, None)}), (Pair(A, 2), Pair(B, 2)),
    (Held(A), Held(B)), ((A, A), (B, B)), (A.expand(4, 2, 3), B.expand(4, 2, 3)), ([], []),
]  # fmt: skip
OTHER: list[tuple[Any, Any]] = [
    (A, A.t()), (A, A.double()), (A, A[:1]), (A, A.t().contiguous().t()), ([A], (A,)), ([A, 1], [A, 2]),
    ([A, 1], [A, 1.0]), ([A, True], [A, 1]), ({"a": A}, {"b": A}), ((A, A), (A, B)), (Held(A), Held(A, "b")),
    (Pair(A, 1), (A, 1)), ([A, np.float32(1)], [A, np.float32(2)]), ([A, []], [A, ()]), (A.expand(2, 2, 3), A),
    ([A, 0.0], [A, -0.0]), ([A, None], [A, 0]), ([[A], B], [[A, B]]),
]  # fmt: skip


def form(value: Any) -> Form:
    return Given(value).form()


@pytest.mark.parametrize(("one", "other"), SAME)
def test_calls_of_one_form(one: Any, other: Any) -> None:
    assert form(one) == form(other)
    assert form(one).key == form(other).key
    assert Given(other).is_of(form(one))


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_calls_of_other_forms(one: Any, other: Any) -> None:
    assert form(one) != form(other)
    assert form(one).key != form(other).key
    assert not Given(other).is_of(form(one))


@pytest.mark.parametrize(
    "value", [object(), torch.nn.Linear(1, 1), torch.eye(2).to_sparse(), torch.ones(1, device="meta")]
)
def test_what_cannot_be_compared(value: Any) -> None:
    with pytest.raises(Unsuitable):
        form([A, value])


@pytest.mark.parametrize("form", [
    lambda t: t, lambda t: t.t(), lambda t: t[:, ::2], lambda t: t.expand(4, 2, 3), lambda t: t[:1].expand(5, 3),
    lambda t: t[0, 0].expand(3), lambda t: t[..., None].expand(2, 3, 4), lambda t: t[:0], lambda t: t.sum(),
])  # fmt: skip
def test_a_place_has_the_form_and_takes_the_contents(form: Any) -> None:
    one, other = form(A), form(B)
    places = Places(Given(({"x": [one]},)))
    (place,) = places.given()[0]["x"]
    assert (place.shape, place.dtype) == (one.shape, one.dtype)
    assert place.numel() <= 1 or place.stride() == one.stride()
    assert torch.equal(place, one)
    places.fill([other])
    assert torch.equal(place, other)
    assert torch.equal(one, form(torch.arange(6.0).reshape(2, 3))), "what was given is left alone"


def test_a_kind_of_tensor_that_cannot_be_copied_is_of_no_form() -> None:
    class Special(torch.Tensor):
        pass

    assert not Given(A.as_subclass(Special)).is_of(form(A))
    assert Given(torch.nn.Parameter(A)).is_of(form(A))


def test_steady_tensors_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = forms.copy_each
    monkeypatch.setattr(
        forms, "copy_each", lambda targets, sources: (copied.append(len(targets)), real(targets, sources))
    )
    places = Places(Given((A, Steady((B, None)))))
    first, (second, _) = places.given()
    assert sum(copied) == 2
    places.fill([B, B])
    assert sum(copied) == 3, "the one that may have been written into"
    assert torch.equal(first, B)
    other = A + 1
    places.fill([A, other])
    assert sum(copied) == 5
    assert torch.equal(second, other)
    del other
    places.fill([A, A - 1])
    assert torch.equal(second, A - 1), "what is gone is not what has taken its place in memory"


def test_dtypes_are_copied_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[set[torch.dtype]] = []
    real = forms.copy_each
    monkeypatch.setattr(forms, "copy_each", lambda to, of: (kinds.append({one.dtype for one in of}), real(to, of)))
    given = A, torch.arange(3), B.double(), torch.ones(2, dtype=torch.int64)
    places = Places(Given(given))
    others = [A + 1, torch.arange(3) + 1, B.double() + 1, torch.zeros(2, dtype=torch.int64)]
    kinds.clear()
    places.fill(others)
    assert all(map(torch.equal, places.given(), others))
    assert len(kinds) == 3
    assert all(len(kind) == 1 for kind in kinds), "torch copies tensors of several dtypes one by one"


def test_overlapping_elements_are_refused() -> None:
    with pytest.raises(Unsuitable, match="overlap"):
        Places(Given((A.as_strided((3, 3), (1, 1)),)))


def test_lists_are_new_each_time() -> None:
    places = Places(Given(([[A]],)))
    places.given()[0][0].clear()
    assert len(places.given()[0][0]) == 1


def test_bits_are_compared() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert has_same_bits({"a": nan}, {"a": nan.clone()})
    assert not has_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not has_same_bits([A], (A,))
    assert has_same_bits(A.t(), A.t().contiguous()), "wherever they are"
    assert not has_same_bits(object(), object())
