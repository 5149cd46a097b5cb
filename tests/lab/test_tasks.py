"""The prompts that come with the lab are kept apart, and files are read line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.errors import SettingError
from samovar.lab.tasks import Task, check_disjoint, make_tasks, read_prompts


def test_no_emoji_is_both_tuned_with_and_tested() -> None:
    tuning, testing = read_prompts("tuning"), read_prompts("testing")
    assert len(tuning) == len(set(tuning)) == 128
    assert len(testing) == len(set(testing)) == 96
    assert not {p.split(",")[0] for p in tuning} & {p.split(",")[0] for p in testing}
    for style in ("noto", "3d", "flat"):
        assert sum(p.endswith(f"{style} style") for p in testing) >= 24


def test_a_file_has_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("# mine\n a cat \n\na dog\n")
    assert read_prompts(str(file)) == ["a cat", "a dog"]
    assert read_prompts(file, 1) == ["a cat"]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"'testin' is neither a file of prompts.*'testing'"):
        read_prompts("testin")
    empty = tmp_path / "empty.txt"
    empty.write_text("# nothing\n")
    with pytest.raises(SettingError, match="contains no prompts"):
        read_prompts(empty)
    (tmp_path / "latin.txt").write_bytes("caf\u00e9\n".encode("latin-1"))
    with pytest.raises(SettingError, match=r"latin.txt' is not UTF-8 text: .* Save it as UTF-8"):
        read_prompts(tmp_path / "latin.txt")
    (tmp_path / "marked.txt").write_text("a cat\n", encoding="utf-8-sig")
    assert read_prompts(tmp_path / "marked.txt") == ["a cat"], "a mark of some editors is no part of a prompt"
    for count in (0, 129, True):
        with pytest.raises(SettingError, match=f"{count!r} prompts were asked for, but 'tuning' has 128"):
            read_prompts("tuning", count)


def test_seeds_are_never_shared() -> None:
    tasks = make_tasks(["a", "b"], 2, 7)
    assert tasks == [Task("a", 7), Task("a", 8), Task("b", 9), Task("b", 10)]
    with pytest.raises(SettingError, match="seeds=0"):
        make_tasks(["a"], 0, 0)


def test_prompts_for_tuning_and_testing_are_kept_apart() -> None:
    with pytest.raises(SettingError, match="'a' is in both lists"):
        check_disjoint([Task("a", 0)], [Task("b", 1), Task("a", 2)])
