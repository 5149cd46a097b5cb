"""Attention is captured on this thread, while it is asked for, and nowhere else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from samovar.parallel.attention import sdpa
from samovar.parallel.capture import attention_left_alone, attention_through

TENSORS = torch.randn(3, 1, 2, 4, 8)


def nothing(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(1)


def test_only_inside_and_only_here() -> None:
    elsewhere: list[torch.Tensor] = []
    with attention_through(nothing, everywhere=False):
        assert F.scaled_dot_product_attention(*TENSORS).shape == (1,)
        thread = threading.Thread(target=lambda: elsewhere.append(F.scaled_dot_product_attention(*TENSORS)))
        thread.start()
        thread.join()
        with attention_left_alone():
            assert torch.equal(F.scaled_dot_product_attention(*TENSORS), sdpa(*TENSORS))
        assert F.scaled_dot_product_attention(*TENSORS).shape == (1,)
    assert torch.equal(elsewhere[0], sdpa(*TENSORS))
    assert F.scaled_dot_product_attention is sdpa, "torch is as it was"


def test_torch_s_own_function_is_seen_everywhere() -> None:
    noted: list[int] = []
    with attention_through(nothing, everywhere=True, noted=lambda: noted.append(1)):
        assert sdpa(*TENSORS).shape == (1,)
        assert F.scaled_dot_product_attention(*TENSORS).shape == (1,)
        with attention_left_alone():
            assert sdpa(*TENSORS).shape == TENSORS[0].shape
    assert noted == [1], "the second call came the other way"
    with attention_through(nothing, everywhere=False):
        assert sdpa(*TENSORS).shape == TENSORS[0].shape


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), attention_through(nothing, everywhere=True):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is sdpa
    assert F.scaled_dot_product_attention(*TENSORS).shape == TENSORS[0].shape


def test_one_inside_another() -> None:
    with attention_through(nothing, everywhere=False):
        with attention_through(lambda *args, **kwargs: torch.zeros(2), everywhere=False):
            assert F.scaled_dot_product_attention(*TENSORS).shape == (2,)
        assert F.scaled_dot_product_attention(*TENSORS).shape == (1,)
    assert F.scaled_dot_product_attention is sdpa
