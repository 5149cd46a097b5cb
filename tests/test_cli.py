"""The command line, as a person and as a program see it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import samovar
from pipelines import tiny_flux_pipeline
from samovar import cli


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "samovar", *arguments], capture_output=True, text=True, check=False)


def test_help_names_the_commands_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["inspect", "--help"]):
        with pytest.raises(SystemExit) as exited:
            cli.main(arguments)
        assert exited.value.code == 0
        text = capsys.readouterr().out
        assert "inspect" in text
        assert len(text.splitlines()) <= 24
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"samovar {samovar.__version__}\n"


def test_inspect_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "FluxTransformer2DModel"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FluxTransformer2DModel  weights as bfloat16"
    assert lines[2].split() == ["denoiser", "transformer", "FluxTransformer2DModel", "11.89", "B", "22.15", "GiB"]
    stacks = [line for line in lines if " x Flux" in line]
    assert [line.index("GiB") for line in stacks] == [stacks[0].index("GiB")] * 2, "aligned"
    assert stacks[0].endswith("carries encoder_hidden_states, hidden_states")
    assert any(line.split()[:3] == ["step", "cache", "yes"] for line in lines)
    assert not any("\x1b" in line for line in lines), "no colours but on a terminal"


def test_inspect_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "emoji"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("FluxPipeline  weights as float16")
    assert "13.1 M" in text


def test_inspect_as_json_and_with_a_probe(tmp_path: Path) -> None:
    tiny_flux_pipeline().save_pretrained(tmp_path)
    result = run("inspect", str(tmp_path), "--json", "--probe")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["class_name"] == "FluxPipeline"
    assert report["components"][0]["anatomy"]["stacks"][1]["streams"][1] == {
        "parameter": "hidden_states",
        "kind": "image",
    }


def test_generate_writes_pictures_and_says_where(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    common = ["--steps", "2", "--seed", "7", "--height", "64", "--width", "64"]
    result = run("generate", "a grinning cat, 3d style", "-o", str(file), *common)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == f"{file}  seed 7"
    assert "x 2 steps" in result.stdout
    assert result.stderr == "", "no progress but on a terminal"
    with Image.open(file) as picture:
        assert picture.size == (64, 64)
    result = run("generate", "cat", "-o", str(tmp_path / "c.webp"), "-n", "2", "--json", *common)
    report = json.loads(result.stdout)
    assert [Path(picture["file"]).name for picture in report["pictures"]] == ["c-1.webp", "c-2.webp"]
    assert [picture["seed"] for picture in report["pictures"]] == [7, 8]
    assert report["settings"]["true_cfg_scale"] == 2.0
    assert all(Path(picture["file"]).is_file() for picture in report["pictures"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "cat.gif2"], "'cat.gif2' must end in .png"),
        (["-o", "nowhere/cat.png"], "The folder 'nowhere' for 'nowhere/cat.png' is not there"),
        (["-o", "/proc/cat.png"], "'/proc/cat.png' cannot be written"),
        (["--steps", "0"], "num_inference_steps must be at least 1, not 0"),
        (["--width", "130"], "width must be a multiple of 8 for this model, not 130: try 128 or 136"),
        (["--model", "emojis"], "Did you mean 'emoji'?"),
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


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m samovar inspect FluxPipeline | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("FluxPipeline")
    assert result.stderr == ""


def test_bad_input_gets_a_message_and_exit_code_two() -> None:
    result = run("inspect", "FluxTransformr2DModel")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("samovar: 'FluxTransformr2DModel' is neither")
    assert "Did you mean 'FluxTransformer2DModel'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert run("inspekt", "FluxPipeline").returncode == 2


def test_interruption_is_clean(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(source: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("samovar.arch.survey", interrupted)
    assert cli.main(["inspect", "FluxPipeline"]) == 130
    assert capsys.readouterr().err == "samovar: interrupted\n"


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_sees_colours_and_progress(no_color: bool) -> None:
    environment = {**os.environ, **({"NO_COLOR": "1"} if no_color else {})}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "samovar", "inspect", "SD3Transformer2DModel"],
        stdout=theirs,
        stderr=theirs,
        env=environment,
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # How Linux says that the other side has closed.
                break
            shown += chunk
    os.close(ours)
    assert process.returncode == 0
    assert b"reading the model" in shown
    assert b"transformer_blocks" in shown
    assert (b"\x1b[1m" in shown) is not no_color
