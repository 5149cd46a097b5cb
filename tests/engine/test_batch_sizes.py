"""Batches are made of the size that was seen to pay. All times here are given, none is measured."""

from __future__ import annotations

import pytest

from samovar.engine.batch_sizes import _FORGET, _MOST_KINDS, _TRIAL, BatchSizes


def taught(*batches: tuple[int, float], tries: bool = False) -> BatchSizes:
    """After batches, each given by its number of images and how long one image took."""
    sizes = BatchSizes(tries=tries)
    for images, seconds_each in batches:
        sizes.note("kind", images, images * seconds_each)
    return sizes


def test_as_many_as_there_are_as_long_as_nothing_is_known() -> None:
    assert [BatchSizes().best("kind", images) for images in (1, 4, 16)] == [1, 4, 16]
    assert taught((4, 9.0), (4, 9.0)).best("kind", 4) == 4, "slower than what?"
    assert taught((1, 1.0), (1, 1.0), (4, 9.0)).best("kind", 4) == 4, "once may be chance"


@pytest.mark.parametrize(("together", "expected"), [(0.1, 4), (0.97, 4), (1.0, 1), (1.08, 1)])
def test_a_batch_must_take_less_for_each_image_than_one_alone(together: float, expected: int) -> None:
    assert taught((1, 1.0), (1, 1.0), (4, together), (4, together)).best("kind", 4) == expected


def test_the_quickest_of_each_counts_so_that_a_slow_one_does_no_harm() -> None:
    sizes = taught((1, 30.0), (1, 1.0), (4, 50.0), (4, 0.9))
    assert sizes.best("kind", 4) == 4
    sizes = taught((1, 30.0), (1, 1.0), (4, 50.0), (4, 1.1))
    assert sizes.best("kind", 4) == 1


def test_a_device_that_is_shared_for_a_while_does_not_make_batches_look_slow() -> None:
    sizes = taught(*[(4, 0.45)] * 4, (1, 0.54), *[(4, 0.57)] * 6, (1, 0.67))
    assert sizes.best("kind", 4) == 4, "one alone was quick when batches were quicker"


def test_each_size_is_judged_and_unknown_ones_are_like_the_next_larger() -> None:
    sizes = taught(*[(1, 1.0), (4, 0.8), (8, 0.9)] * 2)
    assert [sizes.best("kind", images) for images in (2, 4, 6, 8)] == [2, 4, 4, 4]
    assert sizes.best("kind", 16) == 16, "nothing is known beyond"
    sizes = taught(*[(1, 1.0), (3, 1.08), (4, 0.9)] * 2)
    assert [sizes.best("kind", images) for images in (2, 3, 4)] == [1, 1, 4]


def test_each_kind_of_request_is_known_by_itself_and_old_ones_are_forgotten() -> None:
    sizes = taught(*[(1, 1.0), (4, 2.0)] * 2)
    assert (sizes.best("kind", 4), sizes.best("other", 4)) == (1, 4)
    for number in range(_MOST_KINDS):
        sizes.note(number, 1, 1.0)
    assert len(sizes._kinds) == _MOST_KINDS
    assert sizes.best("kind", 4) == 4


def test_what_did_not_pay_is_tried_again_ever_more_rarely() -> None:
    sizes, tried = taught(*[(1, 1.0), (4, 2.0)] * 2), []
    for number in range(4, 6 * _FORGET):
        size = sizes.best("kind", 4)
        sizes.note("kind", size, size * {1: 1.0, 4: 2.0}[size])
        tried += [number + 1] if size == 4 else []
    again = [_FORGET * 2**times for times in range(3)]
    assert tried == [number for first in again for number in (first + 1, first + 2)]


def test_what_has_become_quicker_is_used_again() -> None:
    sizes = taught(*[(1, 1.0), (4, 2.0)] * 2)
    for _ in range(_FORGET + 2):
        size = sizes.best("kind", 4)
        sizes.note("kind", size, size * {1: 1.0, 4: 0.5}[size])
    assert sizes.best("kind", 4) == 4


def test_one_alone_is_tried_if_there_never_was_one_and_only_if_it_may() -> None:
    for tries in (True, False):
        sizes, seen = BatchSizes(tries=tries), []
        for _ in range(4 * _TRIAL):
            size = sizes.best("kind", 16)
            sizes.note("kind", size, size * {1: 1.0, 16: 0.1}[size])
            seen.append(size)
        assert [number + 1 for number, size in enumerate(seen) if size == 1] == ([_TRIAL, 2 * _TRIAL] if tries else [])
        assert sizes.best("kind", 16) == 16
    requests_of_several = taught(*[(2, 1.0)] * _TRIAL * 4, tries=True)
    assert requests_of_several.best("kind", 4) == 4, "one alone never came, and is given up"
