"""The queue: its end, its order, its deadlines, and who goes together."""

from __future__ import annotations

import random
from typing import Any

import pytest

from samovar import OmniDiffusionSamplingParams
from samovar.engine import Done, Event, Failed, GeneratedPictures, Request
from samovar.engine.waiting import Entry, Waiting
from samovar.errors import CancelledRequestError, QueueFullError


def entry(name: str = "a cat", *, priority: int = 0, deadline: float | None = None, **params: Any) -> Entry:
    request = Request(name, OmniDiffusionSamplingParams(**params))
    return Entry(request, lambda event: None, name, priority, 0.0, deadline)


def test_higher_priorities_go_first_and_among_equals_who_came_first() -> None:
    waiting = Waiting(100)
    entries = [entry(str(number), priority=random.Random(number).randrange(3)) for number in range(50)]
    for each in entries:
        waiting.add(each, 0.0)
    expected = sorted(entries, key=lambda each: -each.priority)
    assert waiting.entries == expected
    assert [waiting.place(each) for each in expected] == list(range(1, 51))
    assert [waiting.take(1)[0] for _ in expected] == expected
    assert waiting.take(1) == []
    assert waiting.place(entries[0]) == 0


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    waiting = Waiting(2)
    waiting.add(entry(), 4.0)
    waiting.add(entry(), 4.0)
    with pytest.raises(QueueFullError, match=r"2 requests are waiting.*in 12 s") as caught:
        waiting.add(entry(priority=9), 4.0)
    assert caught.value.retry_after_s == 12.0
    assert len(waiting.entries) == 2
    with pytest.raises(QueueFullError) as caught:
        waiting.add(entry(), 0.0)
    assert caught.value.retry_after_s == 1.0, "nothing has been served yet"


def test_what_waits_too_long_is_taken_out() -> None:
    waiting = Waiting(9)
    early, late, patient = entry(deadline=5.0), entry(deadline=7.0), entry()
    for each in (patient, late, early):
        waiting.add(each, 0.0)
    assert waiting.next_deadline() == 5.0
    assert waiting.overdue(4.9) == []
    assert waiting.overdue(5.0) == [early]
    assert waiting.next_deadline() == 7.0
    assert waiting.overdue(99.0) == [late]
    assert waiting.next_deadline() is None
    assert waiting.remove(patient)
    assert not waiting.remove(patient)


def test_only_what_fits_goes_together() -> None:
    waiting = Waiting(99)
    first = entry("first", height=64, seed=1)
    same = entry("same", height=64, seed=2)
    other = entry("other", height=32)
    two = entry("two", height=64, num_outputs_per_prompt=2)
    last = entry("last", height=64)
    for each in (first, other, same, two, last):
        waiting.add(each, 0.0)
    assert waiting.take(3) == [first, same, last], "two pictures are one too many"
    assert waiting.take(3) == [other]
    assert waiting.take(1) == [two], "more pictures than a call can make take several calls"
    assert waiting.clear() == []


def test_an_image_goes_alone() -> None:
    from PIL import Image

    plain, edit = Request("a"), Request("a", image=Image.new("RGB", (8, 8)))
    assert plain.fits_with(Request("b"))
    assert not plain.fits_with(edit)
    assert not edit.fits_with(edit)


def test_nothing_is_told_after_the_end() -> None:
    told: list[Event] = []
    one = Entry(Request("a cat"), told.append)
    one.end(Failed(CancelledRequestError("taken back")))
    one.tell(Done(GeneratedPictures("a cat", (), (), OmniDiffusionSamplingParams(), 0.0)))
    one.end(Failed(CancelledRequestError("again")))
    (event,) = told
    assert isinstance(event, Failed)
    assert str(event.error) == "taken back"
