"""Noise in one image changes no speed-up, and what is left to do is told as soon as it is known."""

from __future__ import annotations

import re

import pytest

from benchmarks.caches import bench
from lab.tiny import TASKS, MakeSession
from samovar.lab.calibrate import calibrate
from samovar.lab.image_runner import Task
from samovar.lab.methods import cached, plain
from samovar.lab.times import Progress, footnote, in_words, is_noise, shown, speed_of
from samovar.lab.tune import Target, tune


def test_one_disturbed_image_changes_nothing() -> None:
    exact = {"seconds": [4.0, 4.0, 4.0], "forwards": [40.0] * 3, "exact": []}
    calm = {"seconds": [2.0, 2.0, 2.0], "forwards": [20.0] * 3, "exact": [4.0, 4.0]}
    assert speed_of(calm, exact) == (2.0, 2.0, 2.0)
    for name, place in (("seconds", 0), ("exact", 0), ("exact", 1)):
        disturbed = {key: list(values) for key, values in calm.items()}
        disturbed[name][place] = 60.0
        assert speed_of(disturbed, exact) == (2.0, 2.0, 2.0)
    slow = {"seconds": [3.0] * 3, "forwards": [20.0] * 3, "exact": [6.0, 6.0]}
    assert speed_of(slow, exact).speedup == 2.0, "a machine that slows down slows both"


def test_what_counts_do_not_explain_is_marked() -> None:
    assert (shown(12.05, 7.14), shown(7.2, 7.14), shown(None, 2.0), shown(3.0, None)) == (
        "12.05x?",
        "7.20x",
        "-",
        "3.00x",
    )
    assert not is_noise(None, None)
    rows = [{"method": "plain 7 steps", "speedup": 12.05, "explained": 50 / 7}, {"method": "b", "problem": "no"}]
    (line,) = footnote(rows)
    assert line.startswith("? plain 7 steps: 7.14x at most is what its computed steps explain.")


def test_the_time_left_follows_from_what_was_made() -> None:
    now = 0.0
    said: list[str] = []
    progress = Progress(said.append, lambda: now)
    progress.expect(exact=10, search=40, testing=10)
    progress.say("exact")
    now = 20.0
    progress.add(10)
    progress.say("exact")
    progress.begin("search")
    progress.add(20, is_made=False)
    progress.say("search")
    progress.begin("testing")
    progress.say("testing")
    progress.add(30)
    assert progress.left() == 0
    assert said == ["exact", "exact, about 2 min left", "search, about 60 s left", "testing, about 20 s left"]


def test_durations_in_words() -> None:
    assert [in_words(s) for s in (0, 44, 600, 9000)] == ["5 s", "45 s", "10 min", "2.5 h"]


@pytest.mark.parametrize("command", ["calibrate", "bench", pytest.param("tune", marks=pytest.mark.slow)])
def test_commands_tell_how_long_they_take(make_session: MakeSession, command: str) -> None:
    said: list[str] = []
    progress = Progress(said.append)
    session, testing = make_session(batch=1), make_session(tasks=[Task("a hat", 9)], name="testing")
    session.progress = testing.progress = progress
    if command == "calibrate":
        calibrate(session)
    elif command == "bench":
        bench(session, [plain(5), cached("tea_cache", {})])
    else:
        session.tasks = TASKS[:1]
        tune(session, testing, Target("speedup", 2.0))
    told = [text for text in said if re.search(r", about \d[\d.]* (s|min|h) left$", text)]
    assert len(told) >= len(said) - 3, "all but while nothing was made yet"
    assert progress.left() is not None
