"""Which settings, prompts and times the lab's commands take when they are not given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.calling import run


def test_a_saved_setting_is_compared_as_it_was_tuned(
    model: str, prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    saved = {"cache": {"backend": "tea_cache", "schedule": "##.#"}, "num_inference_steps": 4, "height": 16, "width": 24,
             "true_cfg_scale": 3.0, "negative_prompt": "", "max_sequence_length": 8}  # fmt: skip
    files[0].write_text(json.dumps(saved))
    files[1].write_text(json.dumps({**saved, "width": 16}))
    common = ["compare", model, "--prompts", prompts[0], "--num-prompts", "1", "-o", str(tmp_path / "out")]
    code, out, err = run(capsys, *common, "--cache", str(files[0]), "--cache", str(files[1]))
    assert (code, out) == (2, "")
    assert "one.json' was tuned with --width 24 and" in err
    code, _, err = run(capsys, *common, "--cache", str(files[0]), "--true-cfg-scale", "2")
    assert code == 0, err
    assert "width=24" in err
    settings = json.loads((tmp_path / "out" / "compare.json").read_text())["about"]["settings"]
    assert (settings["width"], settings["true_cfg_scale"], settings["num_inference_steps"]) == (24, 2.0, 4)
    stranger = {"denoisers": {"transformer": {"class": "Another", "config": {}}}}
    files[0].write_text(json.dumps({**saved, "tuned_for": stranger}))
    code, _, err = run(capsys, *common[:-1], str(tmp_path / "none"), "--cache", str(files[0]))
    assert code == 2
    assert "was tuned for another model" in err
    assert not (tmp_path / "none").exists(), "it is refused before anything is made"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("compare", "--prompts FILE, with"),
        ("calibrate", "--prompts FILE, with"),
        ("tune", "--prompts FILE and --test-prompts FILE, with"),
    ],
)
def test_emoji_captions_are_not_for_other_models(
    model: str, command: str, options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--target-speedup", "2"] if command == "tune" else []
    code, out, err = run(capsys, command, model, *target, "-o", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert f"needs prompts of its own kind, and the shipped ones are captions of emoji. Give {options}" in err
    assert not any(tmp_path.iterdir())
