"""Every method is measured on the same tasks, against the same exact images, once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lab.tiny import TASKS, MakeSession
from samovar.core.errors import SettingError
from samovar.lab.image_runner import Task
from samovar.lab.methods import cached, plain
from samovar.lab.metrics import HIGHEST_PSNR, measure
from samovar.lab.session import Journal, Session
from samovar.lab.trajectory import WATCHED


def test_rows_have_what_was_measured(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session(steps=8)
    schedule = cached("tea_cache", {"schedule": "##.#.#.#", "forecast": "linear", "forecast_of": "output"})
    exact, half, skipping = session.exact(), session.measure(plain(4), tmp_path / "four"), session.measure(schedule)
    assert (exact.computed, exact.speedup, exact.quality.psnr) == (8, 1.0, HIGHEST_PSNR)
    assert (half.computed, half.steps) == (4, 4)
    assert (skipping.computed, skipping.steps) == (5, 8)
    assert (skipping.seconds, skipping.speedup) == (None, None), "nothing was timed"
    assert set(skipping.notes.values()) == {"##.#.#.#"}
    assert len(skipping.images) == len(TASKS)
    assert skipping.to_dict()["each"]["psnr"] == [round(quality.psnr, 7) for quality in skipping.images]
    with session.runner.under(plain(4)) as make:
        images = make(TASKS[2:]).images
    assert list(half.images[2:]) == measure(images, session.exact_images()[2:])
    with Image.open(tmp_path / "four" / "2.png") as file:
        saved = np.asarray(file)
    assert np.abs(saved / 255 - images[0].permute(1, 2, 0).numpy()).max() <= 0.5 / 255 + 1e-6


def test_the_same_setting_gives_the_same_figures_and_the_exact_one_the_highest(make_session: MakeSession) -> None:
    session = make_session(steps=8)
    row = session.measure(cached("tea_cache", {"rel_l1_thresh": 0.0}))
    assert row.quality == (HIGHEST_PSNR, pytest.approx(1.0), pytest.approx(0, abs=1e-9), None), (
        "neutral settings give the bits of the bare model"
    )


def test_what_is_known_is_not_made_again(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(steps=8)
    exact, half = session.exact(), session.measure(plain(4))

    def never(*_: object) -> None:
        raise AssertionError("made again")

    again = Session(session.runner, TASKS, session.journal)
    monkeypatch.setattr(session.runner, "under", never)
    assert again.exact().to_dict() == exact.to_dict()
    assert again.measure(plain(4)).to_dict() == half.to_dict()


def test_a_journal_without_its_images_goes_on(make_session: MakeSession) -> None:
    session = make_session()
    expected = session.measure(plain(2))
    again = make_session()
    images = list(again.journal.folder.glob("*.safetensors"))
    for file in [*images, again.journal._file(again._key(plain(2), 0))]:
        file.unlink()
    assert images
    assert again.measure(plain(2)) == expected


def test_an_interruption_loses_no_batch(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(steps=4, batch=1)
    made: list[str] = []
    record = session.journal.record

    def interrupted(name: str, value: object) -> None:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(name)
        record(name, value)

    monkeypatch.setattr(session.journal, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.exact()
    monkeypatch.setattr(session.journal, "record", lambda name, value: (made.append(name), record(name, value)))
    assert len(session.exact().images) == 3
    assert made == ["exact 0", "exact 1", "exact 2"]


def test_a_method_comes_off_when_a_image_fails(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(steps=8)
    session.exact()
    before = type(session.runner.pipeline.transformer)

    def fail(*_: object) -> None:
        raise RuntimeError("no image")

    monkeypatch.setattr(session.runner, "_call", fail)
    session._is_warm = True
    with pytest.raises(RuntimeError, match="no image"):
        session.measure(cached("tea_cache", {}))
    assert type(session.runner.pipeline.transformer) is before


def test_a_watched_run_is_not_timed(make_session: MakeSession) -> None:
    session = make_session(steps=4, tasks=TASKS[:1], timed=2)
    session.exact(WATCHED)
    images = session.exact_images()
    assert "exact 0" not in session.journal, "the images are known, so they are not made again"
    half = session.measure(plain(2))
    bare = session.journal["exact times"]["seconds"]
    session.exact(WATCHED)
    assert session.exact().seconds == sum(bare) / 2
    assert np.array_equal(images, session.exact_images())
    assert half.explained == 2.0


@pytest.mark.parametrize("batch", [1, 3])
def test_methods_are_timed_alone_between_exact_images(make_session: MakeSession, batch: int) -> None:
    session = make_session(steps=8, batch=batch, timed=2)
    made: list[tuple[int, int]] = []
    call = session.runner._call

    def note(tasks: list[Task], steps: int) -> torch.Tensor:
        made.append((len(tasks), steps))
        return call(tasks, steps)

    vars(session.runner)["_call"] = note
    row = session.measure(plain(4))
    del vars(session.runner)["_call"]
    if batch == 1:
        expected = [(1, 2), *[(1, 8)] * 3, *[(1, 4)] * 3, (1, 8)]
    else:
        expected = [(3, 2), (3, 8), *[(1, 8)] * 3, (3, 4), *[(1, 4)] * 3, (1, 8)]
    assert made == expected, "warm-up; exact, alone; four steps, alone; an exact one beside"
    times, exact = session.journal[session._key(plain(4), "times")], session.journal["exact times"]
    assert len(times["seconds"]) == len(exact["seconds"]) == len(times["exact"]) == 2
    assert row.explained == 2.0
    assert row.seconds == sum(times["seconds"]) / 2
    beside = sorted([*times["exact"], sum(exact["seconds"]) / 2])[1]
    assert row.speedup == pytest.approx(beside / row.seconds)


# ------------------------------------------------------------------------------------------------ journal


def test_values_and_images_are_found_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state", {"steps": 4})
    images = torch.rand(2, 3, 4, 4)
    journal.save_images("exact-0", images)
    journal.record("exact 0", {"seconds": 1.5})
    again = Journal(tmp_path / "state", {"steps": 4})
    assert len(again) == 1
    assert "exact 0" in again
    assert again["exact 0"] == {"seconds": 1.5}
    assert torch.equal(again.load_images("exact-0"), images), "not rounded"
    again.delete()
    assert not (tmp_path / "state").exists()


def test_what_was_cut_off_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, {"steps": 4})
    journal.record("a", 1)

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            journal.record("b", 2)
    again = Journal(tmp_path, {"steps": 4})
    assert len(again) == 1
    assert "b" not in again
    again.record("b", 3)
    assert Journal(tmp_path, {"steps": 4})["b"] == 3


def test_other_settings_are_refused_by_their_differences(tmp_path: Path) -> None:
    Journal(tmp_path, {"steps": 4, "model": "emoji"}).record("a", 1)
    with pytest.raises(SettingError, match=r"unfinished run with other settings \(steps: was 4, is 5\)"):
        Journal(tmp_path, {"steps": 5, "model": "emoji"})
    assert Journal(tmp_path, {"steps": 4, "model": "emoji"})["a"] == 1, "and is left as it was"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="Cannot create"):
        Journal(tmp_path / "file" / "state", {})


def test_a_long_difference_is_shown_whole_words_only(tmp_path: Path) -> None:
    tasks = [[f"a very long prompt about a cat on a mat with a hat, number {number}", number] for number in range(9)]
    Journal(tmp_path, {"tasks": tasks}).record("a", 1)
    changed = [*tasks[:4], ["a dog", 7], *tasks[5:8]]
    with pytest.raises(SettingError, match=r"tasks: 9 before, 8 now, was \['a very .* 4\], is \['a dog', 7\]\)"):
        Journal(tmp_path, {"tasks": changed})
