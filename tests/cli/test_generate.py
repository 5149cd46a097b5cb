"""`samovar generate`: images, what is said about them, and what is refused."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines import tiny_flux_pipeline
from samovar import cli


def without_progress(text: str) -> str:
    """What is printed besides progress, which a log gets every ten seconds."""
    return re.sub(r"^samovar: .* \(\d+ s\)\n", "", text, flags=re.MULTILINE)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "samovar", *arguments], capture_output=True, text=True, check=False)


def test_generate_writes_images_and_says_where(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    common = ["--steps", "2", "--seed", "7", "--height", "64", "--width", "64"]
    result = run("generate", "a grinning cat, 3d style", "-o", str(file), *common)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == f"{file}  seed 7"
    assert "x 2 steps" in result.stdout
    assert without_progress(result.stderr) == ""
    with Image.open(file) as image:
        assert image.size == (64, 64)
    result = run("generate", "cat", "-o", str(tmp_path / "c.webp"), "-n", "2", "--json", *common)
    report = json.loads(result.stdout)
    assert [Path(image["file"]).name for image in report["images"]] == ["c-1.webp", "c-2.webp"]
    assert [image["seed"] for image in report["images"]] == [7, 8]
    assert report["settings"]["true_cfg_scale"] == 2.0
    assert all(Path(image["file"]).is_file() for image in report["images"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "cat.gif2"], "--output 'cat.gif2': the file of an output must end in .png"),
        (["-o", "cat.mp4"], "--output 'cat.mp4': the file of an image must end in .png, .jpg, .jpeg, .webp."),
        (["--frames", "9"], "FluxPipeline makes images of its own length, and takes no --frames"),
        (["--option", "sigma=[1.0]"], "FluxPipeline does not take sigma. Did you mean 'sigmas'?"),
        (["--option", "sigmas"], "--option 'sigmas'; expected NAME=VALUE"),
        (["--input", "video=nowhere.gif"], "--input video 'nowhere.gif' is not there"),
        (["--task", "img2image"], "--task 'img2image' is not a task. Did you mean 'img2img'?"),
        (
            ["-o", "nowhere/cat.png"],
            "--output 'nowhere/cat.png' cannot be written. Give a file",
        ),
        (["--steps", "0"], "--steps 0; expected a whole number"),
        (["--width", "130"], "width must be a multiple of 8 for this model, not 130: try 128 or 136"),
        (["--config", "nowhere.yaml"], "--config: 'nowhere.yaml' cannot be read"),
        (["--image", "nowhere.png"], "--image 'nowhere.png' is not there"),
        (["--strength", "2"], "--strength 2; expected a number from 0 to 1"),
        (["--cache-config", "[1]"], "--cache-config '[1]' cannot be read"),
    ],
)
def test_generate_refuses_before_it_computes(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", "cat", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prompt", ["../models/flux", "./flux", "~/flux", "/models/flux"])
def test_a_model_in_place_of_the_prompt_is_refused(prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", prompt]) == 2
    assert f"samovar generate PROMPT --model {prompt}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path)
    return path


COMMON = ["--seed", "7", "--steps", "3", "--height", "16", "--width", "24", "--max-sequence-length", "8"]


def pixels(file: Path) -> Any:
    with Image.open(file) as image:
        return np.asarray(image).astype(float)


def test_an_option_that_a_pipeline_does_not_take_is_refused_with_names_for_option(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "cat", str(folder), "--device", "cpu", "--option", "xyz=1"]) == 2
    said = capsys.readouterr().err
    assert "FluxPipeline does not take xyz. Known: " in said
    assert "'num_inference_steps'" in said
    assert "'--" not in said


def test_under_torchrun_all_ranks_make_the_image_and_one_writes_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["generate", "cat", "--model", str(folder), "--device", "cpu", *COMMON]
    assert cli.main([*common, "-o", str(tmp_path / "one.png")]) == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    file = tmp_path / "two.png"
    command = [*launcher, "-m", "samovar", *common, "--ulysses-degree", "2", "-o", str(file), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["images"] == [{"file": str(file), "seed": 7}]
    assert np.abs(pixels(file) - pixels(tmp_path / "one.png")).max() / 255 <= 1e-3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two.png"]


def test_settings_come_from_a_file_and_options_win(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "omni.yaml").write_text(
        f"model: {folder}\ndevice: cpu\ncache_backend: tea_cache\ncache_config: {{schedule: '#.#'}}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", "cat", "--config", "omni.yaml", "--json", *COMMON]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cache"][0]["transformer"]["branches"]["cond"]["mask"] == "#.#"
    own = ["--cache-config", '{"schedule": "##."}']
    assert cli.main(["generate", "cat", "--config", "omni.yaml", "--json", *own, *COMMON]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cache"][0]["transformer"]["branches"]["cond"]["mask"] == "##."
    assert cli.main(["generate", "cat", "--config", "omni.yaml", "--image", "out.png", *COMMON]) == 2
    assert "FluxPipeline takes no image" in capsys.readouterr().err
    (tmp_path / "omni.yaml").write_text("cache_bakend: tea_cache")
    assert cli.main(["generate", "cat", "--config", "omni.yaml"]) == 2
    assert "Did you mean" in capsys.readouterr().err
    monkeypatch.setenv("SAMOVAR_CACHE_BAKEND", "tea_cache")
    assert cli.main(["generate", "cat"]) == 2
    assert "Did you mean 'SAMOVAR_CACHE_BACKEND'?" in capsys.readouterr().err


def test_the_number_of_steps_comes_from_a_saved_setting(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "setting.json"
    saved.write_text(json.dumps({"cache": {"backend": "tea_cache", "schedule": "##.#"}, "num_inference_steps": 4}))
    size = [*COMMON[:2], *COMMON[4:]]
    common = ["generate", "cat", "--model", str(folder), "--device", "cpu", "-o", str(tmp_path / "cat.png"), *size]
    assert cli.main([*common, "--cache", str(saved)]) == 0
    printed = capsys.readouterr()
    assert "x 4 steps" in printed.out
    assert "##.#" in printed.out
    assert cli.main([*common, "--cache", str(saved), "--steps", "5"]) == 2
    assert "--steps 5, but the cache has a schedule for 4 steps" in capsys.readouterr().err


def test_an_interrupt_ends_it_cleanly_in_the_middle_of_a_image(folder: Path, tmp_path: Path) -> None:
    """On a terminal, as its progress bar says when it is in the middle."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    options = ["--model", str(folder), "--device", "cpu", *COMMON, "--steps", "5000", "-o", str(tmp_path / "cat.png")]
    command = [sys.executable, "-m", "samovar", "generate", "cat", *options]
    said = ""
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # As no job in the background does.
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, preexec_fn=listen) as process:
        os.close(theirs)
        try:
            while "/5000" not in said:
                assert select.select([ours], [], [], 300)[0], said
                said += os.read(ours, 4096).decode(errors="replace")
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 130
        finally:
            process.kill()
    with contextlib.suppress(OSError):  # How a terminal says that nobody writes to it any more.
        while chunk := os.read(ours, 4096):
            said += chunk.decode(errors="replace")
    os.close(ours)
    assert "samovar: interrupted" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
