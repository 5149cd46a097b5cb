"""A silence is a hang only when it is long for the size of the images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from samovar.engine import OmniDiffusionConfig, OmniDiffusionSamplingParams, Request
from samovar.engine.facts import PipelineFacts
from samovar.engine.patience import Patience, pixels_of, shape_of

CONFIG = OmniDiffusionConfig("emoji", device="cpu", step_timeout_s=60.0, load_timeout_s=1800.0)
DEFAULT = 64 * 64


def facts(**defaults: Any) -> PipelineFacts:
    return PipelineFacts("Pipeline", frozenset({"height", "width"}), 16, OmniDiffusionSamplingParams(**defaults))


SMALL = facts(height=64, width=64)


@pytest.mark.parametrize(
    ("pixels", "seconds"),
    [(DEFAULT, 60.0), (DEFAULT // 4, 60.0), (2 * DEFAULT, 240.0), (1024 * DEFAULT, 1800.0), (0, 60.0)],
)
def test_what_was_never_made_is_guessed_from_the_default_size(pixels: int, seconds: float) -> None:
    assert Patience().allowed_s(pixels, SMALL, CONFIG) == seconds


def test_a_model_that_is_fast_is_found_to_hang_soon() -> None:
    """0.1 s at the default size: four times the pixels take seconds at most."""
    patience = Patience()
    patience.note(DEFAULT, 0.1)
    assert patience.allowed_s(4 * DEFAULT, SMALL, CONFIG) == 60.0


def test_a_size_that_took_minutes_may_take_them_again() -> None:
    patience = Patience()
    patience.note(DEFAULT, 0.1)
    patience.note(1024 * DEFAULT, 300.0)
    patience.note(DEFAULT, 0.1)
    assert patience.allowed_s(1024 * DEFAULT, SMALL, CONFIG) == 3000.0, "known, so not bounded by a guess"
    assert patience.allowed_s(512 * DEFAULT, SMALL, CONFIG) == 1500.0
    assert patience.allowed_s(DEFAULT, SMALL, CONFIG) == 60.0
    for _ in range(10):
        patience.note(1024 * DEFAULT, 1.0)
    assert patience.allowed_s(1024 * DEFAULT, SMALL, CONFIG) == 60.0, "a compiler that ran once is forgotten"


def test_pixels_are_those_of_one_call() -> None:
    asked = Request("", OmniDiffusionSamplingParams(height=32, num_outputs_per_prompt=5))
    assert pixels_of([asked], SMALL) == 32 * 64
    assert pixels_of([asked, asked], SMALL, 8) == 8 * 32 * 64
    assert pixels_of([], SMALL) == DEFAULT
    assert pixels_of([Request("")], facts()) == 1024 * 1024


def test_a_shape_that_must_be_compiled_may_take_as_long_as_loading() -> None:
    compiled, patience = replace(CONFIG, compile="eager"), Patience()
    usual, wide = (shape_of([Request("", OmniDiffusionSamplingParams(**how))], SMALL) for how in ({}, {"width": 128}))
    assert shape_of([Request("", OmniDiffusionSamplingParams(seed=3, num_inference_steps=9))], SMALL) == usual != wide
    patience.restart(SMALL, is_warm=False)
    assert patience.allowed_s(DEFAULT, SMALL, compiled, usual) == 1800.0
    assert patience.allowed_s(DEFAULT, SMALL, CONFIG, usual) == 60.0, "nothing is compiled"
    patience.restart(SMALL, is_warm=True)
    assert patience.allowed_s(DEFAULT, SMALL, compiled, usual) == 60.0
    assert patience.allowed_s(2 * DEFAULT, SMALL, compiled, wide) == 1800.0
    patience.note(2 * DEFAULT, 1.0, wide)
    assert patience.allowed_s(2 * DEFAULT, SMALL, compiled, wide) == 60.0
    patience.restart(SMALL, is_warm=True)
    assert patience.allowed_s(2 * DEFAULT, SMALL, compiled, wide) == 1800.0, "another process compiles again"


def test_clients_cannot_make_it_grow_without_end() -> None:
    patience = Patience()
    for shape in range(5000):
        patience.note(DEFAULT, 0.1, shape)
    assert len(patience.shapes) < 2000
    assert 4999 in patience.shapes
