"""Every method is measured on the same tasks, against the same exact images, once; an interrupted run goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lab.tiny import TASKS, MakeSession, exact_images
from samovar.core.errors import SettingError
from samovar.lab import Journal, Method, Session, Task, cached, plain
from samovar.lab.metrics import HIGHEST_PSNR, measure
from samovar.lab.progress import Progress, in_words

Calls = list[tuple[int, int]]
"""The images and steps of each call of the pipeline."""


def calls(session: Session, method: Method, stop: int = 99) -> Calls:
    """Those that measuring a method takes; it is interrupted in the call of number `stop`."""
    made: Calls = []
    call = session.runner._call

    def note(tasks: list[Task], steps: int) -> torch.Tensor:
        if len(made) == stop:
            raise KeyboardInterrupt
        made.append((len(tasks), steps))
        return call(tasks, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.runner, "_call", note)
        try:
            session.measure(method)
        except KeyboardInterrupt:
            assert len(made) == stop
    return made


def test_rows_have_what_was_measured(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session(steps=8)
    schedule = cached("tea_cache", {"schedule": "##.#.#.#", "forecast_of": "output"})
    exact, half, skipping = session.exact(), session.measure(plain(4), tmp_path / "four"), session.measure(schedule)
    assert (exact.computed, exact.speedup, exact.quality.psnr) == (8, 1.0, HIGHEST_PSNR)
    assert (half.computed, half.steps, half.saving) == (4, 4, 2.0)
    assert (skipping.computed, skipping.steps, skipping.seconds, skipping.speedup) == (5, 8, None, None)
    assert skipping.to_dict()["each"]["psnr"] == [round(quality.psnr, 7) for quality in skipping.images]
    with session.runner.under(plain(4)) as make:
        images = make(TASKS[2:]).images
    assert list(half.images[2:]) == measure(images, exact_images(session)[2:])
    with Image.open(tmp_path / "four" / "2.png") as file:
        saved = np.asarray(file)
    assert np.abs(saved / 255 - images[0].permute(1, 2, 0).numpy()).max() <= 0.5 / 255 + 1e-6
    neutral = session.measure(cached("tea_cache", {"rel_l1_thresh": 0.0}))
    assert neutral.quality.psnr > 90, "of a call of its own, before rounding"


def test_a_method_that_decides_by_the_image_makes_each_alone(make_session: MakeSession) -> None:
    session = make_session(batch=3)
    schedule, auto = cached("tea_cache", {"schedule": "#########."}), cached("auto", {"tolerance": 0.1})
    assert calls(session, schedule) == [(3, 10), (3, 10)], "the exact ones and those of a schedule at once"
    assert calls(session, auto) == [(1, 10)] * 3


def test_what_is_known_is_not_made_again_and_an_interruption_loses_no_call(make_session: MakeSession) -> None:
    assert calls(make_session(steps=4, batch=1), plain(2), stop=2) == [(1, 4)] * 2
    session = make_session(steps=4, batch=1)
    assert calls(session, plain(2)) == [(1, 4), *[(1, 2)] * 3]
    expected, again = session.measure(plain(2)).to_dict(), make_session(steps=4, batch=1)
    assert calls(again, plain(2)) == []
    assert again.measure(plain(2)).to_dict() == expected
    for file in session.journal.folder.glob("*.safetensors"):
        file.unlink()
    moved = make_session(steps=4, batch=1)
    assert calls(moved, plain(2)) == [(1, 4)] * 3, "a journal without its images makes these"
    assert moved.measure(plain(2)).to_dict() == expected


# ------------------------------------------------------------------------------------------------ times


@pytest.mark.parametrize("batch", [1, 3])
def test_methods_are_timed_alone_between_exact_images(make_session: MakeSession, batch: int) -> None:
    session = make_session(steps=8, batch=batch, is_timed=True, tasks=[Task("a dog", seed) for seed in range(6)])
    rest = [(1, 8)] * 2 if batch == 1 else [(2, 8)]
    less = [(count, 4) for count, _ in rest]
    assert calls(session, plain(4)) == [*[(1, 8)] * 4, *rest, (1, 8), *[(1, 4)] * 4, *less, (1, 8)]
    assert calls(session, plain(2))[0] == (1, 2), "the exact image after one method is that before the next"


def test_one_disturbed_image_changes_no_speedup(make_session: MakeSession) -> None:
    session = make_session(steps=4, batch=1, is_timed=True)
    session.measure(plain(2))
    times = [name for name in session.journal if name.endswith(("0", "1", "2"))]
    for beside, usual in (([4.0, 4.0], 4.0), ([60.0, 4.0], 4.0), ([4.0, 4.0], 60.0), ([4.0, 60.0], 4.0)):
        for name in times:
            seconds = usual if name.startswith("exact") else 2.0
            session.journal.record(name, {**session.journal[name], "seconds": seconds})
        session.journal.record(session._key(plain(2), "beside"), beside)
        found = make_session(steps=4, batch=1, is_timed=True).measure(plain(2))
        assert (found.seconds, found.speedup) == (2.0, 2.0)


def test_the_time_left_follows_from_what_was_made() -> None:
    now = 0.0
    said: list[str] = []
    progress = Progress(said.append, lambda: now)
    progress.expect(60)
    progress.say("exact")
    now = 20.0
    for images, is_made, text in ((10, True, "exact"), (40, False, "search"), (10, True, "over")):
        progress.add(images, is_made)
        progress.say(text)
    assert said == ["exact", "exact, about 2 min left", "search, about 20 s left", "over"]
    assert [in_words(s) for s in (0, 44, 600, 9000)] == ["5 s", "45 s", "10 min", "2.5 h"]


# ------------------------------------------------------------------------------------------------ journal


def test_values_and_images_are_found_again(tmp_path: Path) -> None:
    about = {"steps": 4, "model": "emoji"}
    journal, images = Journal(tmp_path / "state", about), torch.rand(2, 3, 4, 4)
    journal.save_images("exact-0", images)
    journal.record("exact 0", {"seconds": 1.5})
    with (tmp_path / "state" / "journal.jsonl").open("a") as file:
        file.write('["b", {"seco')
    with pytest.raises(SettingError, match=r"unfinished run with other settings \(steps: was 4, is 5\)"):
        Journal(tmp_path / "state", about | {"steps": 5})
    again = Journal(tmp_path / "state", about)
    assert (len(again), again["exact 0"]) == (1, {"seconds": 1.5}), "what was cut off is measured again"
    assert torch.equal(again.load_images("exact-0"), images), "not rounded"
    again.record("b", 3)
    assert Journal(tmp_path / "state", about)["b"] == 3
    again.delete()
    assert not (tmp_path / "state").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="Cannot create"):
        Journal(tmp_path / "file" / "state", {})
