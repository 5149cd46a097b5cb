"""`samovar compare`, `calibrate` and `tune`: what they write, what they refuse, and how they go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from cli.calling import IMAGE, compare, run
from samovar.cache import CacheChoice


def test_compare_writes_sheet_page_and_figures(
    model: str, prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    setting = tmp_path / "setting.json"
    setting.write_text(json.dumps({"cache": {"backend": "tea_cache", "schedule": "##.#.#.#"}}))
    common = compare(model, prompts[0], 8, output)
    code, out, err = run(capsys, *common, "--cache", str(setting), "--cache", '{"rel_l1_thresh": 0.4}')
    assert (code, err) == (0, "")
    assert "schedule=##.#.#.#" in out
    report = json.loads((output / "compare.json").read_text())
    assert [row["family"] for row in report["rows"]][:2] == ["exact", "samovar schedule"]
    assert report["rows"][1]["computed"] == 5
    assert any(row["family"] == "plain steps" for row in report["rows"])
    assert report["about"]["settings"]["num_inference_steps"] == 8
    assert [task["prompt"] for task in report["tasks"]] == ["a cat", "a dog"]
    with Image.open(output / "sheet.png") as sheet:
        assert sheet.height >= 64 * len(report["rows"])
    assert "all 2 images stay above" in out
    with Image.open(output / "worst-1.png") as worst:
        assert worst.height >= 2 * 64
    assert "data:image/png" in (output / "compare.html").read_text()
    assert not (output / "state").exists(), "what is finished leaves no state"


def test_compare_quantised_weights(
    model: str, prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("sdnq")
    common = compare(model, prompts[0], 4, tmp_path / "out")
    kinds = ["--quantization", "int8", "--quantization", "transformer=int4,text_encoder=int8"]
    code, _, err = run(capsys, *common, *kinds, "--cache", '{"schedule": "#.##"}')
    assert (code, err) == (0, "")
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())["rows"]
    found = {row["method"]: row for row in rows}
    int8, int4 = found["int8 weights"], found["transformer int4, text_encoder int8 weights"]
    assert int8["computed"] == int4["computed"] == 4, "every step is computed"
    assert 100 > int8["psnr"] > int4["psnr"] > 10
    assert [row["family"] for row in rows].index("plain steps") > 3, "plain steps are beside the cache alone"
    for wrong, words in (("int3", "Did you mean 'int"), ("nowhere.gguf", "is not a file here")):
        code, _, err = run(capsys, *common, "--quantization", wrong)
        assert code == 2
        assert words in err


def test_calibrate_writes_what_a_cache_takes(
    model: str, prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["calibrate", model, "--prompts", prompts[0], "--num-prompts", "2", "--steps", "8", *IMAGE]
    code, out, err = run(capsys, *common, "-o", str(tmp_path / "out"), "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report == json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert report["cache"]["backend"] == "tea_cache"
    assert report["num_inference_steps"] == 8
    assert set(report["fit"]) >= {"degree", "explained"}
    assert report["verdict"]


def test_tune_writes_a_setting_that_generate_takes(
    model: str, prompts: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    tasks = ["--prompts", prompts[0], "--test-prompts", prompts[1], "--num-prompts", "1", "--num-test-prompts", "1"]
    common = ["tune", model, *tasks, "--steps", "8", "-o", str(output), "--quantization", "int8", *IMAGE]
    code, out, err = run(capsys, *common, "--target-speedup", "1.3")
    assert err == "", out
    setting = json.loads((output / "setting.json").read_text())
    assert setting["num_inference_steps"] == 8
    assert "samovar tune of" in setting["origin"]
    assert "float32, torchao Int8WeightOnlyConfig, 20" in setting["origin"]
    choice = CacheChoice.read(output / "setting.json")
    assert choice is not None
    assert choice.tuned_for is not None
    assert list(choice.tuned_for.denoisers) == ["transformer"]
    report = json.loads((output / "tune.json").read_text())
    assert report["setting"] == setting
    is_met = report["held_out"]["share_met"] == 1.0
    assert code == (0 if is_met else 1), "one image shows little of how much is saved on another"
    assert len(report["tried"]) >= 5
    assert "The worst: 'a tree', seed 100000: " in out
    assert f"1.3 times fewer steps: {'met' if is_met else 'missed'}, with " in out
    assert (output / "worst.png").is_file()
    assert "95 of 100" not in out, "a speed-up promises nothing about single images"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--cache", "tea_cach"], "Did you mean 'tea_cache'?"),
        (["compare", "--cache", "[1]"], "--cache '[1]' cannot be read"),
        (["calibrate", "--num-prompts", "1"], "1 image to calibrate with; expected at least 2"),
        (["compare", "--cache", '{"rel_l1_tresh": 1}'], "Did you mean 'rel_l1_thresh'?"),
        (["compare", "--prompts", "nowhere.txt"], "'nowhere.txt' is neither a file of prompts"),
        (["compare", "--batch", "0"], "--batch 0"),
        (["compare", "--steps", "0"], "--steps 0; expected a whole number from 1 to"),
        (["tune", "--target-psnr", "200"], "--target-psnr 200.0; expected a number from 1 to 99"),
        (["tune", "--target-psnr", "30", "--num-prompts", "8"], "8 images to tune with: 45 or more are needed"),
        (["compare", "--offload", "layrwise"], "Did you mean 'layerwise'?"),
        (["compare", "--quantization", "transfomer=int8"], "Did you mean 'transformer'?"),
        (["tune", "--target-speedup", "2", "--quantization", "int7"], "Did you mean 'int"),
        (["tune", "--target-speedup", "2", "--prompts", "testing"], "is in both lists"),
    ],
)
def test_nonsense_is_refused_by_name(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert not any(tmp_path.iterdir()), "and nothing was written"


def test_a_killed_run_goes_on_where_it_was(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("\n".join(f"a cat number {number}" for number in range(6)))
    common = ["compare", model, "--prompts", str(prompts), "--num-prompts", "6", "--steps", "8", "-o", str(output)]
    command = [*common, "--cache", '{"schedule": "##.#.#.#"}', *IMAGE]
    process = subprocess.Popen([sys.executable, "-m", "samovar", *command], stderr=subprocess.PIPE, text=True)
    state = output / "state"
    try:
        deadline = time.monotonic() + 300
        while known(state) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.kill()
        _, error = process.communicate()
    assert process.returncode == -signal.SIGKILL, error
    before = known(state)
    assert 2 <= before < 24, "killed in the middle of 24 images at most"
    refused = run(capsys, *command, "--seeds", "2")
    assert refused[0] == 2
    assert "holds an unfinished run with other settings (tasks: 6 before, 12 now" in refused[2]
    refused = run(capsys, *common, "--cache", '{"schedule": "#...#..#"}', *IMAGE)
    assert refused[0] == 2
    assert "with other settings (methods)" in refused[2], "its images would stand under another setting's figures"
    code, _, err = run(capsys, *command)
    assert (code, err) == (0, f"samovar: resuming with {before} measurements from {output / 'state'}\n")
    report = json.loads((output / "compare.json").read_text())
    assert len(report["tasks"]) == 6


def known(state: Path) -> int:
    file = state / "journal.jsonl"
    return file.read_text().count("\n") - 1 if file.is_file() else 0
