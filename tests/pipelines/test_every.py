"""Every pipeline of diffusers that has a transformer: what the table says of it holds."""

from __future__ import annotations

from typing import Any

import pytest

from .builder import Recipe, pipeline_classes
from .recipes import RECIPES
from .table import PAGE, families_without, page, passes, read
from .trying import CHECKS, try_pipeline

ROWS: dict[str, Any] = read()["rows"]
WORKING = [name for name, row in ROWS.items() if passes(row)]
SAMPLE = ("FluxControlPipeline", "StableAudioPipeline", "LTX2Pipeline")
"""One for each kind of output."""


def test_the_page_shows_what_was_found() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_goal_is_met() -> None:
    """At least 70 pass everything, every family that makes images, video or sound and every kind of output among them;
    each other has its reason."""
    assert len(WORKING) >= 70
    assert families_without(ROWS) == ["rfd4_proteina"], "which makes proteins"
    assert {ROWS[name]["makes"] for name in WORKING} == {"images", "video", "audio", "video with audio"}
    assert all(row["problem"] for name, row in ROWS.items() if name not in WORKING)


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.filterwarnings("ignore")
def test_a_sample_works(name: str) -> None:
    import diffusers

    row = try_pipeline(getattr(diffusers, name), RECIPES[name])
    assert row.works == dict.fromkeys(CHECKS, True), row.problem


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKING)
@pytest.mark.filterwarnings("ignore")
def test_what_works_goes_on_working(name: str) -> None:
    import diffusers

    row = try_pipeline(getattr(diffusers, name), RECIPES.get(name, Recipe()))
    assert row.works == dict.fromkeys(CHECKS, True), row.problem


@pytest.mark.slow
def test_no_pipeline_is_left_out() -> None:
    assert set(pipeline_classes()) == set(ROWS)
