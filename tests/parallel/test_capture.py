"""Attention is captured on this thread, while it is asked for, and nowhere else."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from torch.nn.attention import flex_attention

from samovar.parallel.attention import AttentionCall, sdpa
from samovar.parallel.capture import attention_left_alone, attention_through

TENSORS = torch.randn(3, 1, 2, 4, 8)


def nothing(call: AttentionCall) -> torch.Tensor:
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
        with attention_through(lambda call: torch.zeros(2), everywhere=False):
            assert F.scaled_dot_product_attention(*TENSORS).shape == (2,)
        assert F.scaled_dot_product_attention(*TENSORS).shape == (1,)
    assert F.scaled_dot_product_attention is sdpa


def test_flex_attention_and_scores_come_the_same_way() -> None:
    own = flex_attention.flex_attention, Attention.get_attention_scores
    with attention_through(nothing, everywhere=False):
        assert flex_attention.flex_attention(*TENSORS).shape == (1,)
        scores = Attention(8, heads=2, dim_head=4).get_attention_scores(*TENSORS[:2, 0])
        assert not isinstance(scores, torch.Tensor), "they wait for the values"
    assert (flex_attention.flex_attention, Attention.get_attention_scores) == own


def test_what_others_put_there_is_what_they_find_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users compile flex attention and put it in the place of torch's own."""

    def theirs(*args: object) -> str:
        return "theirs"

    monkeypatch.setattr(flex_attention, "flex_attention", theirs)
    with attention_through(nothing, everywhere=False):
        assert flex_attention.flex_attention(*TENSORS).shape == (1,)
        with attention_left_alone():
            assert flex_attention.flex_attention(*TENSORS) == "theirs"
    assert flex_attention.flex_attention is theirs
