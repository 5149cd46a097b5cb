"""Every setting stands beside the exact pictures and the plain steps of the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tiny import MakeSession
from samovar.errors import SettingError
from samovar.lab.compare import compare, same_time_steps
from samovar.lab.methods import Method, ours, plain
from samovar.lab.metrics import Quality
from samovar.lab.session import Row


def test_each_setting_is_followed_by_its_baseline(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session(steps=8)
    methods = [ours("tea_cache", {"schedule": "##.#.#.#"}), ours("tea_cache", {"schedule": "##......"})]
    found = compare(session, methods, tmp_path)
    assert found.rows[0].family == "exact"
    assert [row.method for row in found.rows if row.family.startswith("samovar")] == [m.name for m in methods]
    plains = [row for row in found.rows if row.family == "plain steps"]
    settings = [row for row in found.rows if row.family.startswith("samovar")]
    one = session.measure(plain(1))
    assert {row.steps for row in plains} == {same_time_steps(found.rows[0], one, row) for row in settings}
    assert {folder.name for folder in tmp_path.iterdir() if "-" in folder.name} - {"state-"} == {
        folder.name for folder in found.folders[1:]
    }, "and nothing is left of the one step that was measured to know what each takes"
    for folder in found.folders:
        assert sorted(file.name for file in folder.iterdir()) == ["0.png", "1.png", "2.png"]
    report = found.to_dict()
    assert [task["seed"] for task in report["tasks"]] == [0, 1, 2]
    assert len(report["rows"]) == len(found.rows)


@pytest.mark.parametrize(("seconds", "steps"), [(2.0, 11), (3.0, 19), (4.0, 19), (0.5, 1), (1.6, 7)])
def test_plain_steps_of_the_same_time(seconds: float, steps: int) -> None:
    """Twenty steps take 2.9 s; text encoders and VAE one second, which no setting saves."""
    exact, one = (timed(steps, 0.9 + 0.1 * steps) for steps in (20, 1))
    assert same_time_steps(exact, one, timed(20, seconds)) == steps


def test_plain_steps_that_take_no_time() -> None:
    assert same_time_steps(timed(20, 1.0), timed(1, 1.0), timed(20, 0.5)) == 10


def timed(steps: int, seconds: float) -> Row:
    quality = Quality(40, 1, 0)
    return Row("a", "a", {}, steps, steps, seconds, 1.0 / seconds, quality, (quality,))


def test_a_setting_given_twice_is_refused(make_session: MakeSession, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="given twice"):
        compare(make_session(), [ours("forecast", {}), ours("forecast", {})], tmp_path)
    assert not any(tmp_path.glob("*/*.png")), "and nothing is made"


def test_one_name_for_two_settings(make_session: MakeSession, tmp_path: Path) -> None:
    """A name leaves out weights, so two may share one. They are measured, and kept, each for itself."""
    masks = ("##.#", "#...")
    methods = [ours("tea_cache", {"schedule": mask}, name="mine") for mask in masks]
    rows = compare(make_session(steps=4), methods, tmp_path).rows
    assert [row.computed for row in rows if row.method == "mine"] == [3, 1]
    again = Method("mine", "any", {"weights": {1: {0: 2.0}}})
    assert again.key == Method("mine", "any", {"weights": {"1": {"0": 2.0}}}).key, "loaded from a file it is the same"
