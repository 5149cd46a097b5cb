"""A model's own polynomial, the one that was given, or none: never another model's."""

from __future__ import annotations

import functools
import math

import diffusers
import pytest
import torch

from pipelines import PIPELINES
from samovar.cache import apply_teacache_hook, remove_teacache_hook
from samovar.cache.coefficients import Coefficients, coefficients_for, known_coefficients, rescaling

FLUX = "FluxTransformer2DModel"
QWEN = "QwenImageTransformer2DModel"
GIVEN = (1.0, 0.0, -2.0, 3.0, 0.5)


@functools.cache
def model(pipeline: str) -> torch.nn.Module:
    transformer: torch.nn.Module = PIPELINES[pipeline].build(0).transformer
    return transformer


def test_what_is_known_has_five_finite_numbers_and_an_origin_and_is_a_class_of_diffusers() -> None:
    known = known_coefficients()
    assert known[FLUX].values == (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861)
    assert known[QWEN].values == (-450.0, 280.0, -45.0, 3.2, -0.02)
    for name, (values, origin) in known.items():
        assert len(values) == 5
        assert all(map(math.isfinite, values))
        assert origin.strip()
        assert hasattr(diffusers, name)


def test_given_ones_come_first_then_the_models_own_and_else_there_are_none() -> None:
    flux, other = model("flux"), model("flux2-klein")
    assert coefficients_for(flux, GIVEN) == Coefficients(GIVEN, "the settings")
    assert coefficients_for(flux, None) == known_coefficients()[FLUX]
    assert coefficients_for(other, None) is None
    assert coefficients_for(other, list(GIVEN)) == Coefficients(GIVEN, "the settings")


def test_a_model_that_is_only_like_a_known_one_does_not_borrow() -> None:
    class MyFluxTransformer2DModel(diffusers.FluxTransformer2DModel):
        pass

    own = MyFluxTransformer2DModel(num_layers=0, num_single_layers=0, num_attention_heads=1, attention_head_dim=8)
    assert coefficients_for(own, None) is None


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


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("flux", {}, "rescaled by the coefficients of FLUX.1-dev"),
        ("flux", {"coefficients": GIVEN}, "rescaled by the coefficients of the settings"),
        ("flux2-klein", {}, "taken as it is"),
    ],
)
def test_a_hook_says_what_it_uses(name: str, settings: dict[str, object], says: str) -> None:
    transformer = model(name)
    hook = apply_teacache_hook(transformer, settings)
    assert says in hook.stats().signal
    known = coefficients_for(transformer, settings.get("coefficients"))  # type: ignore[arg-type]
    assert hook.rescale_func(0.07) == rescaling(known)(0.07)
    remove_teacache_hook(transformer)
