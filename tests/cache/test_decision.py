"""What a decision rests on: relative changes, read from the device in one go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samovar.cache.decision import Measured, Signal, measure


class Reads(TorchDispatchMode):
    """Counts how often a number is read from a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `tolist` of a tensor on the host reads its memory, which cannot be seen; its `stack` can.
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.stack.default)
        return func(*args, **(kwargs or {}))


def pair(change: float, size: float) -> list[torch.Tensor]:
    return [torch.tensor(change), torch.tensor(size)]


def test_the_change_of_a_signal_is_its_relative_l1_distance() -> None:
    before, now = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    found = Signal(before).change(Signal(now))
    assert found is not None
    expected = (now - before).abs().mean() / before.abs().mean()
    assert measure(found, (), (), None).signal == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_do_not_overflow_or_stall(dtype: torch.dtype) -> None:
    before = torch.full((1, 1000, 1000), 3.0, dtype=dtype)
    found = Signal(before).change(Signal(before * 1.25))
    assert found is not None
    assert measure(found, (), (), None).signal == pytest.approx(0.25, rel=1e-3)


def test_signals_of_another_form_or_place_cannot_be_compared() -> None:
    signal = Signal(torch.ones(1, 3), "attn1")
    assert signal.change(Signal(torch.ones(1, 3), "attn1")) is not None
    assert signal.change(Signal(torch.ones(1, 3), "attn2")) is None
    assert signal.change(Signal(torch.ones(2, 3), "attn1")) is None
    assert signal.change(Signal(torch.ones(1, 3, device="meta"), "attn1")) is None


def test_a_signal_keeps_no_graph() -> None:
    assert not Signal(torch.ones(1, requires_grad=True) * 2).value.requires_grad


def test_all_that_changed_is_read_at_once() -> None:
    with Reads() as reads:
        found = measure(pair(1.0, 4.0), [pair(0.0, 0.0), pair(1.0, 2.0)], [torch.tensor(750)], None)
    assert found == Measured(0.25, 0.5, (750.0,))
    assert reads.count == 1


@pytest.mark.parametrize(
    ("change", "size", "relative"), [(0.0, 0.0, 0.0), (1.0, 0.0, float("inf")), (0.0, 2.0, 0.0), (1.0, 2.0, 0.5)]
)
def test_what_was_nothing_and_is_something_has_changed_beyond_measure(
    change: float, size: float, relative: float
) -> None:
    assert measure(pair(change, size), (), (), None).signal == relative
    assert measure(pair(0.0, 1.0), [pair(change, size)], (), None).others == relative


def test_what_is_no_number_is_never_small() -> None:
    nan = float("nan")
    assert not measure(pair(nan, 1.0), (), (), None).signal < 1e9
    assert not measure(pair(0.0, 1.0), [pair(nan, 1.0)], (), None).others < 1e9
    assert not measure(pair(0.0, 1.0), [pair(0.0, 1.0), pair(nan, 1.0)], (), None).others < 1e9


class Two:
    """Two ranks: this one, and one with figures of its own."""

    def __init__(self, theirs: torch.Tensor) -> None:
        self._theirs = theirs
        self.asked: list[tuple[str, list[float]]] = []

    def __call__(self, figures: torch.Tensor) -> torch.Tensor:
        self.asked.append(("all", figures.tolist()))
        return figures + self._theirs

    def within_branch(self, figures: torch.Tensor) -> torch.Tensor:
        self.asked.append(("branch", figures.tolist()))
        return figures + self._theirs


@pytest.mark.parametrize("others", [[], [(1.0, 4.0)], [(1.0, 8.0), (1.0, 2.0), (0.0, 0.0)]], ids=len)
def test_ranks_agree_on_as_many_sums_whatever_changed(others: list[tuple[float, float]]) -> None:
    """Another rank has changes of its own; time is the same for all."""
    agree = Two(torch.tensor([3.0, 4.0, 0.5, 1.0]))
    found = measure(pair(1.0, 4.0), [pair(*other) for other in others], [torch.tensor(0.25)], agree)
    largest = max((change / size for change, size in others if change), default=0.0)
    assert agree.asked == [("all", [1.0, 4.0, largest, 1.0])]
    assert found == Measured(0.5, (largest + 0.5) / 2, (0.25,))


def test_a_rank_without_a_signal_makes_all_of_them_compute() -> None:
    found = measure(None, (), (), Two(torch.tensor([0.1, 1.0, 0.0, 1.0])), torch.device("cpu"))
    assert found.signal == float("inf")
    assert measure(None, (), (), None).signal == float("inf")


def test_a_branch_may_decide_for_itself() -> None:
    agree = Two(torch.tensor([1.0, 4.0, 0.0, 1.0]))
    assert measure(pair(1.0, 4.0), (), (), agree, within_branch=True).signal == 0.25
    assert [kind for kind, _ in agree.asked] == ["branch"]


def test_conditioning_that_changed_on_one_rank_has_changed_on_all() -> None:
    agree = Two(torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert measure(pair(0.0, 1.0), [pair(1.0, 0.0)], (), agree).others == float("inf")
