"""Tensors in any container: walked, replaced, compared."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from samovar.core import nested


class Named(NamedTuple):
    shift: Any
    scale: Any


@dataclass
class Modulation:
    shift: Any
    scale: Any


@dataclass(frozen=True)
class Frozen:
    shift: Any
    scale: Any


@dataclass(slots=True)
class Slotted:
    shift: Any
    scale: Any


class Holder:
    def __init__(self, shift: Any, scale: Any) -> None:
        self.shift, self.scale = shift, scale


def one() -> torch.Tensor:
    return torch.arange(3.0)


CONTAINERS = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "named tuple": Named,
    "dict": lambda a, b: {"shift": a, "scale": b},
    "ordered dict": lambda a, b: OrderedDict(shift=a, scale=b),
    "dataclass": Modulation,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slotted,
    "object": Holder,
    "nested": lambda a, b: {"x": [Modulation(a, ({"y": Holder(b, None)},))], "z": "text"},
    "diffusers' output": lambda a, b: Transformer2DModelOutput(sample=[a, b]),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_tensors_are_seen_replaced_and_compared_in_every_container(make: Any) -> None:
    a, b = one(), one() + 1
    value = make(a, b)
    assert [id(tensor) for tensor in nested.tensors(value)] == [id(a), id(b)]
    doubled = nested.map_tensors(lambda tensor: 2 * tensor, value)
    assert type(doubled) is type(value)
    assert [tensor.tolist() for tensor in nested.tensors(doubled)] == [(2 * a).tolist(), (2 * b).tolist()]
    assert [id(tensor) for tensor in nested.tensors(value)] == [id(a), id(b)], "the value itself is left alone"
    assert nested.signature(doubled) == nested.signature(value)
    assert nested.equal(value, make(one(), one() + 1))
    assert not nested.equal(value, doubled)
    assert nested.difference(doubled, value) == pytest.approx(1.0)
    assert nested.is_transparent(value)


def test_the_signature_tells_shapes_flags_and_structure_apart_and_not_contents_or_fractions() -> None:
    base = nested.signature([one(), 1.5, True, 3])
    assert base == nested.signature([one() * 2, 2.5, True, 3])
    for other in ([one()[:2], 1.5, True, 3], [one().double(), 1.5, True, 3], [one(), 1.5, False, 3],
                  [one(), 1.5, True, 4], (one(), 1.5, True, 3), [one(), 1.5, True]):  # fmt: skip
        assert nested.signature(other) != base


def test_what_cannot_be_looked_into_is_not_transparent_and_equals_itself_alone() -> None:
    module = torch.nn.Linear(2, 2)
    assert not nested.is_transparent({"x": one(), "y": module})
    assert nested.equal([module], [module])
    assert not nested.equal([module], [torch.nn.Linear(2, 2)])
    assert nested.is_transparent([None, (), {}, "text", torch.float32])


def test_nan_equals_nothing_and_other_forms_differ_infinitely() -> None:
    nan = torch.full((2,), torch.nan)
    assert not nested.equal(nan, nan.clone())
    assert nested.difference(nan, torch.ones(2)) != nested.difference(nan, torch.ones(2))
    assert nested.difference([one()], [one(), one()]) == float("inf")
    assert not nested.equal({"a": one()}, {"b": one()})


def test_lists_are_copied_even_where_they_hold_no_tensor() -> None:
    given: dict[str, list[int]] = {"steps": [], "sizes": [1, 2]}
    copied = nested.map_tensors(torch.clone, given)
    copied["steps"].append(3)
    copied["sizes"].pop()
    assert given == {"steps": [], "sizes": [1, 2]}


def test_objects_that_hold_each_other_in_circles_are_walked_all_the_same() -> None:
    one_holder, other_holder = Holder(one(), None), Holder(one(), None)
    one_holder.scale, other_holder.scale = other_holder, one_holder
    assert len(list(nested.tensors(one_holder))) < 20
    assert not nested.is_transparent(one_holder)
    assert nested.signature(one_holder) == nested.signature(one_holder)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_not_comparable(layout: torch.layout) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    other = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 3)], layout=layout)
    assert nested.signature([ragged]) == nested.signature([ragged.clone()]) != nested.signature([other])
    assert nested.equal([ragged], [ragged])
    assert not nested.equal([ragged], [ragged.clone()])
    assert nested.difference(ragged, ragged.clone()) == float("inf")
    assert not nested.is_comparable(ragged)
