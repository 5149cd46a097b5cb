"""Whether a step may be skipped: by guards and schedules, by a model's own polynomial, and by what has changed."""

from __future__ import annotations

import functools
import math
from typing import Any

import diffusers
import pytest
import torch

from pipelines import PIPELINES
from samovar.cache import TeaCacheConfig, apply_teacache_hook
from samovar.cache.error_control import Step
from samovar.cache.run import Verdict
from samovar.cache.signal import Coefficients, Measured, Signal, known_coefficients, measure, rescaling
from samovar.cache.threshold import judge


def whole(number: int, total: int | None) -> Step:
    """A step of a run that goes through all of them."""
    return Step(number, total=total, run_length=total)


# ------------------------------------------------------------------------------------------------ schedules


def test_each_branch_has_its_own_schedule() -> None:
    config = TeaCacheConfig(schedule={"cond": "#.#.", "uncond": "##.."})
    found = {
        branch: "".join("#" if judge(config, whole(n, 4), 0, branch).action == "compute" else "." for n in range(4))
        for branch in ("cond", "uncond", "other")
    }
    assert found == {"cond": "#.#.", "uncond": "##..", "other": "####"}
    assert judge(config, whole(1, 4), 0, "other") == Verdict("compute", "no schedule for this branch")
    others = TeaCacheConfig(schedule={"cond": "#.#.", "*": "#..."})
    assert [judge(others, whole(2, 4), 0, branch).action for branch in ("cond", "other")] == ["compute", "skip"]


# ------------------------------------------------------------------------------------------------ coefficients

FLUX = "FluxTransformer2DModel"
GIVEN = (1.0, 0.0, -2.0, 3.0, 0.5)


@functools.cache
def model(pipeline: str) -> torch.nn.Module:
    transformer: torch.nn.Module = PIPELINES[pipeline].build(0).transformer
    return transformer


@pytest.mark.parametrize("distance", [0.0, 0.01, 0.1, 0.3])
def test_the_polynomial_has_its_highest_power_first_and_is_never_negative(distance: float) -> None:
    a, b, c, d, e = GIVEN
    value = a * distance**4 + b * distance**3 + c * distance**2 + d * distance + e
    assert rescaling(Coefficients(GIVEN, ""))(distance) == pytest.approx(max(value, 0.0))
    assert rescaling(Coefficients((0.0, 0.0, 0.0, 0.0, -1.0), ""))(distance) == distance, "it says nothing here"
    assert rescaling(None)(distance) == distance


@pytest.mark.parametrize("name", known_coefficients())
@pytest.mark.parametrize("distance", [0.45, 0.5, 1.0, 2.0, 10.0, math.inf])
def test_a_large_change_is_never_taken_for_none(name: str, distance: float) -> None:
    """Beyond where they were fitted polynomials fall below zero; the signal of another picture must still count."""
    rescaled = rescaling(known_coefficients()[name])(distance)
    assert not rescaled < 0.4, "it would be skipped at the fast setting"


def test_what_is_not_a_number_is_not_below_any_threshold() -> None:
    for coefficients in (None, known_coefficients()[FLUX]):
        for threshold in (0.2, math.inf):
            assert not rescaling(coefficients)(math.nan) < threshold


class MyFluxTransformer2DModel(diffusers.FluxTransformer2DModel):
    """Only like a known one."""


@pytest.mark.parametrize(
    ("name", "settings", "says", "values"),
    [
        ("flux", {}, "rescaled by the coefficients of FLUX.1-dev", known_coefficients()[FLUX].values),
        ("flux", {"coefficients": GIVEN}, "rescaled by the coefficients of the settings", GIVEN),
        ("flux2-klein", {}, "not rescaled", None),
        ("flux2-klein", {"transformer_type": FLUX}, "of FLUX.1-dev", known_coefficients()[FLUX].values),
        ("mine", {}, "not rescaled", None),
    ],
)
def test_coefficients_are_those_given_else_of_the_models_own_class_else_none(
    name: str, settings: dict[str, Any], says: str, values: tuple[float, ...] | None
) -> None:
    own = MyFluxTransformer2DModel(num_layers=1, num_single_layers=0, num_attention_heads=1, attention_head_dim=8,
                                   axes_dims_rope=(2, 2, 4)) if name == "mine" else model(name)  # fmt: skip
    hook = apply_teacache_hook(own, settings)
    assert says in hook.stats().signal
    expected = rescaling(None if values is None else Coefficients(values, ""))
    assert hook.rescale_func(0.07) == expected(0.07)
    hook.detach()


# ------------------------------------------------------------------------------------------------ the signal


def pair(change: float, size: float) -> list[torch.Tensor]:
    return [torch.tensor(change), torch.tensor(size)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_do_not_overflow_or_stall(dtype: torch.dtype) -> None:
    before = torch.full((1, 1000, 1000), 3.0, dtype=dtype)
    found = Signal(before).change(Signal(before * 1.25))
    assert found is not None
    assert measure(found, (), None).signal == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "size", "relative"), [(0.0, 0.0, 0.0), (1.0, 0.0, float("inf")), (0.0, 2.0, 0.0), (1.0, 2.0, 0.5)]
)
def test_what_was_nothing_and_is_something_has_changed_beyond_measure(
    change: float, size: float, relative: float
) -> None:
    assert measure(pair(change, size), (), None).signal == relative
    assert measure(pair(0.0, 1.0), [pair(change, size)], None).others == relative


def test_what_is_no_number_is_never_small() -> None:
    nan = float("nan")
    assert not measure(pair(nan, 1.0), (), None).signal < 1e9
    assert not measure(pair(0.0, 1.0), [pair(nan, 1.0)], None).others < 1e9
    assert not measure(pair(0.0, 1.0), [pair(0.0, 1.0), pair(nan, 1.0)], None).others < 1e9


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
    found = measure(pair(1.0, 4.0), [pair(*other) for other in others], agree)
    largest = max((change / size for change, size in others if change), default=0.0)
    assert agree.asked == [("all", [1.0, 4.0, largest, 1.0])]
    assert found == Measured(0.5, (largest + 0.5) / 2)
