"""Every setting stands beside the exact pictures and the plain steps of the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tiny import MakeSession
from samovar.errors import SettingError
from samovar.lab.compare import compare, same_time_steps
from samovar.lab.methods import ours
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
    assert {row.steps for row in plains} == {same_time_steps(found.rows[0], row) for row in settings}
    for folder in found.folders:
        assert sorted(file.name for file in folder.iterdir()) == ["0.png", "1.png", "2.png"]
    report = found.to_dict()
    assert [task["seed"] for task in report["tasks"]] == [0, 1, 2]
    assert len(report["rows"]) == len(found.rows)


@pytest.mark.parametrize(("speedup", "steps"), [(2.0, 10), (1.0, 19), (0.9, 19), (100.0, 1), (3.1, 6)])
def test_plain_steps_of_the_same_time(speedup: float, steps: int) -> None:
    quality = Quality(40, 1, 0)
    exact = Row("exact", "exact", {}, 20, 20, 1.0, 1.0, quality, (quality,))
    row = Row("a", "a", {}, 20, 10, 1.0, speedup, quality, (quality,))
    assert same_time_steps(exact, row) == steps


def test_a_setting_given_twice_is_refused(make_session: MakeSession, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="given twice"):
        compare(make_session(), [ours("forecast", {}), ours("forecast", {})], tmp_path)
    assert not any(tmp_path.glob("*/*.png")), "and nothing is made"
