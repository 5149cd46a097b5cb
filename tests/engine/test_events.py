"""What is said about a request."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from samovar.engine import Failed, Listener, Progress, Started
from samovar.engine.events import SILENT
from samovar.errors import NanLatentsError


def test_events_cannot_be_changed_and_travel_whole() -> None:
    for event in (Started(0.5), Progress(1, 4, 0, 2, 0.1, None), Progress(2, 4, 1, 2, 0.1, False)):
        assert pickle.loads(pickle.dumps(event)) == event
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.step = 3  # type: ignore[union-attr,misc]
    copy = pickle.loads(pickle.dumps(Failed(NanLatentsError("no numbers", 3, "forecast: #.#"))))
    assert (str(copy.error), copy.error.step, copy.error.cache) == ("no numbers", 3, "forecast: #.#")


def test_nobody_hears_and_nobody_stops() -> None:
    assert isinstance(SILENT, Listener)
    SILENT.tell(0, Started(0.0))
    assert not SILENT.is_cancelled(0)
