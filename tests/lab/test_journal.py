"""What is known survives an interruption, wherever it comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samovar.errors import SettingError
from samovar.lab.journal import Journal


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
