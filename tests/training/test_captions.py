"""Captions and held-out pairs."""

from __future__ import annotations

import random

import pytest

from training import captions
from training.pictures import Row

ROWS = [
    Row(f"thing {i}", style, "object", ("one", "two", "three"), f"{i:X}")
    for i in range(100)
    for style in (("noto", "3d", "flat") if i % 10 else ("noto",))
]


def test_held_out_pairs_leave_every_emoji_another_style() -> None:
    held = captions.held_out(ROWS)
    several = [row for row in ROWS if int(row.hexcode, 16) % 10]
    assert len(held) == round(0.05 * len(several))
    assert len({ROWS[i].hexcode for i in held}) == len(held)
    kept = captions.training_rows(ROWS)
    assert sorted(held + kept) == list(range(len(ROWS)))
    assert {ROWS[i].hexcode for i in kept} == {row.hexcode for row in ROWS}
    assert {ROWS[i].style for i in held} == {"noto", "3d", "flat"}


def test_split_is_seeded() -> None:
    assert captions.held_out(ROWS) == captions.held_out(ROWS)
    assert captions.held_out(ROWS, seed=1) != captions.held_out(ROWS)
    with pytest.raises(ValueError, match=r"0\.7"):
        captions.held_out(ROWS, share=0.7)


def test_most_captions_name_the_emoji_and_the_style() -> None:
    some = captions.captions(ROWS[2], random.Random(0), 64)
    assert len(some) == 64
    assert some[0] == "thing 1, 3d style"
    assert 0.7 < sum("thing 1" in text for text in some) / 64 < 1
    assert 0.7 < sum("3d style" in text for text in some) / 64 < 1
    assert captions.with_article("apple") == "an apple"


def test_new_combinations_fill_a_sheet() -> None:
    prompts = captions.new_combinations(ROWS)
    assert len(prompts) == 64 == len(set(prompts))
