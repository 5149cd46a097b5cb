"""Every method is measured on the same tasks, against the same exact images, once; an interrupted run goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lab.tiny import TASKS, MakeSession, exact_images, row
from samovar.core.errors import SettingError
from samovar.lab.journal import Journal
from samovar.lab.methods import cached, plain
from samovar.lab.metrics import HIGHEST_PSNR, measure
from samovar.lab.progress import Progress, in_words
from samovar.lab.session import Session
from samovar.lab.tasks import Task
from samovar.lab.verdict import shown_speedup


def test_rows_have_what_was_measured(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session(steps=8)
    schedule = cached("tea_cache", {"schedule": "##.#.#.#", "forecast": "linear", "forecast_of": "output"})
    exact, half, skipping = session.exact(), session.measure(plain(4), tmp_path / "four"), session.measure(schedule)
    assert (exact.computed, exact.speedup, exact.quality.psnr) == (8, 1.0, HIGHEST_PSNR)
    assert (half.computed, half.steps, half.saving) == (4, 4, 2.0)
    assert (skipping.computed, skipping.steps, skipping.seconds, skipping.speedup) == (5, 8, None, None)
    assert len(skipping.images) == len(TASKS)
    assert skipping.to_dict()["each"]["psnr"] == [round(quality.psnr, 7) for quality in skipping.images]
    with session.runner.under(plain(4)) as make:
        images = make(TASKS[2:]).images
    assert list(half.images[2:]) == measure(images, exact_images(session)[2:])
    with Image.open(tmp_path / "four" / "2.png") as file:
        saved = np.asarray(file)
    assert np.abs(saved / 255 - images[0].permute(1, 2, 0).numpy()).max() <= 0.5 / 255 + 1e-6


def test_a_neutral_setting_gives_the_exact_images(make_session: MakeSession) -> None:
    found = make_session(steps=8, batch=1).measure(cached("tea_cache", {"rel_l1_thresh": 0.0}))
    assert found.quality == (HIGHEST_PSNR, pytest.approx(1.0), pytest.approx(0, abs=1e-9), None)


def test_a_method_that_decides_by_the_image_makes_each_alone(make_session: MakeSession) -> None:
    session = make_session(batch=3)
    schedule, auto = cached("tea_cache", {"schedule": "#########."}), cached("auto", {"tolerance": 0.1})
    assert calls(session, schedule) == [(3, 10), (3, 10)], "the exact ones and those of a schedule at once"
    assert calls(session, auto) == [(1, 10)] * 3


def calls(session: Session, method: object) -> list[tuple[int, int]]:
    """The images and steps of each call of the pipeline while a method is measured."""
    made: list[tuple[int, int]] = []
    call = session.runner._call

    def note(tasks: list[Task], steps: int) -> torch.Tensor:
        made.append((len(tasks), steps))
        return call(tasks, steps)

    vars(session.runner)["_call"] = note
    session.measure(method)  # type: ignore[arg-type]
    del vars(session.runner)["_call"]
    return made


def test_what_is_known_is_not_made_again(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(steps=8)
    exact, half = session.exact(), session.measure(plain(4))

    def never(*_: object) -> None:
        raise AssertionError("made again")

    again = Session(session.runner, TASKS, Journal(session.journal.folder, {"steps": 8}))
    monkeypatch.setattr(session.runner, "under", never)
    assert again.exact().to_dict() == exact.to_dict()
    assert again.measure(plain(4)).to_dict() == half.to_dict()


def test_a_journal_without_its_images_goes_on(make_session: MakeSession) -> None:
    expected = make_session().measure(plain(2))
    again = make_session()
    images = list(again.journal.folder.glob("*.safetensors"))
    for file in images:
        file.unlink()
    assert len(images) == 3
    assert again.measure(plain(2)) == expected
    assert torch.isfinite(exact_images(again)).all()


def test_an_interruption_loses_no_call(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(steps=4, batch=1)
    make, made = session.runner._call, list[Task]()

    def interrupted(tasks: list[Task], steps: int) -> torch.Tensor:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.extend(tasks)
        return make(tasks, steps)

    with monkeypatch.context() as patch:
        patch.setattr(session.runner, "_call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.exact()
    assert made == TASKS[:2]
    assert calls(make_session(steps=4, batch=1), plain(2)) == [(1, 4), *[(1, 2)] * 3]


# ------------------------------------------------------------------------------------------------ times


@pytest.mark.parametrize("batch", [1, 3])
def test_methods_are_timed_alone_between_exact_images(make_session: MakeSession, batch: int) -> None:
    session = make_session(steps=8, batch=batch, is_timed=True, tasks=[Task("a dog", seed) for seed in range(6)])
    rest = [(1, 8)] * 2 if batch == 1 else [(2, 8)]
    less = [(count, 4) for count, _ in rest]
    assert calls(session, plain(4)) == [*[(1, 8)] * 4, *rest, (1, 8), *[(1, 4)] * 4, *less, (1, 8)]
    found = session.measure(plain(4))
    seconds = [session.journal[session._key(plain(4), number)]["seconds"] for number in range(1, 4)]
    before, after = session.journal[session._key(plain(4), "beside")]
    beside = sorted([before, after, session.exact().seconds])[1]
    assert found.seconds == sorted(seconds)[1]
    assert found.speedup == pytest.approx(beside / found.seconds)
    assert calls(session, plain(2))[0] == (1, 2), "the exact image after one method is that before the next"


def test_one_disturbed_image_changes_no_speedup(make_session: MakeSession) -> None:
    session = make_session(steps=4, batch=1, is_timed=True)
    known = {"seconds": 2.0, "computed": 2, "quality": [40, 1, 0, None]}
    for number in range(3):
        session.journal.record(session._key(plain(2), number), known)
    session.exact()
    for beside, usual in (([4.0, 4.0], 4.0), ([60.0, 4.0], 4.0), ([4.0, 4.0], 60.0), ([4.0, 60.0], 4.0)):
        session.journal.record(session._key(plain(2), "beside"), beside)
        for number in range(3):
            session.journal.record(f"exact {number}", {**session.journal[f"exact {number}"], "seconds": usual})
        assert session.measure(plain(2)).speedup == 2.0


def test_a_speedup_that_counts_do_not_explain_is_not_shown() -> None:
    rows = [row([40.0], computed=8, speedup=speedup) for speedup in (2.6, 12.05, None)]
    assert list(map(shown_speedup, rows)) == ["2.60x", "disturbed", "-"]


def test_the_time_left_follows_from_what_was_made() -> None:
    now = 0.0
    said: list[str] = []
    progress = Progress(said.append, lambda: now)
    progress.expect(60)
    progress.say("exact")
    now = 20.0
    progress.add(10)
    progress.say("exact")
    progress.add(40, is_made=False)
    progress.say("search")
    progress.add(10)
    progress.say("over")
    assert said == ["exact", "exact, about 2 min left", "search, about 20 s left", "over"]
    assert [in_words(s) for s in (0, 44, 600, 9000)] == ["5 s", "45 s", "10 min", "2.5 h"]


# ------------------------------------------------------------------------------------------------ journal


def test_values_and_images_are_found_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state", {"steps": 4})
    images = torch.rand(2, 3, 4, 4)
    journal.save_images("exact-0", images)
    journal.record("exact 0", {"seconds": 1.5})
    again = Journal(tmp_path / "state", {"steps": 4})
    assert (len(again), again["exact 0"]) == (1, {"seconds": 1.5})
    assert torch.equal(again.load_images("exact-0"), images), "not rounded"
    again.delete()
    assert not (tmp_path / "state").exists()


def test_what_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    Journal(tmp_path, {"steps": 4}).record("a", 1)
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('["b", {"seco')
    again = Journal(tmp_path, {"steps": 4})
    assert "b" not in again
    again.record("b", 3)
    assert [Journal(tmp_path, {"steps": 4})[name] for name in ("a", "b")] == [1, 3]


def test_other_settings_are_refused_by_their_differences(tmp_path: Path) -> None:
    Journal(tmp_path, {"steps": 4, "model": "emoji"}).record("a", 1)
    with pytest.raises(SettingError, match=r"unfinished run with other settings \(steps: was 4, is 5\)"):
        Journal(tmp_path, {"steps": 5, "model": "emoji"})
    assert Journal(tmp_path, {"steps": 4, "model": "emoji"})["a"] == 1, "and is left as it was"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="Cannot create"):
        Journal(tmp_path / "file" / "state", {})
