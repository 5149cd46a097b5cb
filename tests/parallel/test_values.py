"""Tensors in arguments and outputs, and how far two outputs are apart."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from samovar.parallel.failures import ShardingError
from samovar.parallel.values import difference, is_close, map_tensors, most_different, signature_of, tensors_in


class Pair(NamedTuple):
    cos: torch.Tensor
    name: str


def test_all_forms_are_walked_and_kept() -> None:
    one, two = torch.ones(2), torch.ones(3)
    value = ([one, None], {"a": (two, 3)}, Pair(one, "x"), Transformer2DModelOutput(sample=two))
    assert [tensor is known for tensor, known in zip(tensors_in(value), (one, two, one, two), strict=True)] == [
        True
    ] * 4
    doubled = map_tensors(value, lambda tensor: 2 * tensor)
    assert isinstance(doubled[2], Pair)
    assert isinstance(doubled[3], Transformer2DModelOutput)
    assert doubled[3].sample.sum() == 6
    assert doubled[1]["a"][1] == 3


def test_signatures_follow_shapes_and_settings() -> None:
    base = signature_of(({"x": torch.ones(2)}, [1, "a", None]))
    assert base == signature_of(({"x": torch.zeros(2)}, [1, "a", None]))
    assert base != signature_of(({"x": torch.zeros(3)}, [1, "a", None]))
    assert base != signature_of(({"x": torch.zeros(2)}, [2, "a", None]))
    hash(base)


def test_differences() -> None:
    one = torch.ones(4)
    assert difference([one], [one]) == 0
    assert difference([one * 1.1], [one]) == pytest.approx(0.1)
    assert difference([one * float("nan")], [one]) == float("inf")
    with pytest.raises(ShardingError, match=r"shape \(3,\) and not \(4,\)"):
        difference([torch.ones(3)], [one])
    assert is_close([one + 1e-6], [one])
    assert not is_close([one + 1e-2], [one])
    assert not is_close([torch.ones(3)], [one])
    assert not is_close([one, one], [one])
    assert most_different([one.bfloat16()]) > most_different([one])
