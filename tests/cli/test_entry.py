"""The command line as a whole: help, exit codes, errors and completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import samovar
from samovar import cli
from samovar.cli.entry import SHELLS
from samovar.core.errors import EngineError

COMMANDS = (
    "generate",
    "serve",
    "inspect",
    "plan",
    "compare",
    "calibrate",
    "tune",
    "completion",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "samovar", *arguments], capture_output=True, text=True, check=False)


def test_help_names_the_commands_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, most in ((["--help"], 24), (["inspect", "--help"], 24), (["plan", "--help"], 36)):
        with pytest.raises(SystemExit) as exited:
            cli.main(arguments)
        assert exited.value.code == 0
        text = capsys.readouterr().out
        assert arguments[0] in text or all(name in text for name in COMMANDS)
        assert len(text.splitlines()) <= most
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"samovar {samovar.__version__}\n"


def test_help_loads_neither_torch_nor_a_server() -> None:
    code = "import sys; from samovar.cli.entry import make_parser; make_parser().format_help(); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "diffusers", "fastapi", "uvicorn", "asyncio", "argcomplete"} & set(result.stdout.split())


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m samovar inspect FluxPipeline | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("FluxPipeline")
    assert "Traceback" not in result.stderr
    assert "Broken" not in result.stderr


def test_bad_input_gets_a_message_and_exit_code_two() -> None:
    result = run("inspect", "FluxTransformr2DModel")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "samovar: 'FluxTransformr2DModel' is neither" in result.stderr
    assert "Did you mean 'FluxTransformer2DModel'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert run("inspekt", "FluxPipeline").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["genrate", "cat"],
            "samovar: argument COMMAND: 'genrate' is not known. Did you mean 'generate'? See samovar --help.\n",
        ),
        (["generate", "cat", "--steps", "abc"], "samovar: --steps 'abc'; expected a whole number"),
        (["generate", "cat", "--fps", "1,5"], "samovar: --fps '1,5'; expected a number from 0.01 to 1000"),
        (
            ["generate", "cat", "--stps", "5"],
            "samovar generate: --stps is not an option. Did you mean '--steps'? See samovar generate --help.\n",
        ),
        (["--verson"], "samovar: --verson is not an option. Did you mean '--version'? See samovar --help.\n"),
        (["serve", "--toleranse=high"], "samovar serve: --toleranse is not an option. Did you mean '--tolerance'?"),
        (
            ["serve", "emoji", "--port", "0", "other"],
            "samovar serve: 'other' is one argument too many. Put a text of several words in quotes. See samovar serve",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as exited:
        code = int(exited.code or 0)
    assert code == 2
    said = capsys.readouterr().err
    assert said.startswith(message)
    assert said.count("\n") == 1


def test_a_model_may_come_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "cat", "--steps", "2", "emojy", "--seed", "1"]) == 2
    assert "'emojy' is not a built-in model" in capsys.readouterr().err


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "make images, videos or sound" in capsys.readouterr().err


def test_an_engine_that_fails_is_no_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(source: str) -> None:
        raise EngineError("out of luck")

    monkeypatch.setattr("samovar.trace.survey", failing)
    assert cli.main(["inspect", "FluxPipeline"]) == 1
    assert capsys.readouterr().err == "samovar: out of luck\n"


# ------------------------------------------------------------------------------------------------ completion


def completed(line: str, tmp_path: Path) -> list[str]:
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_IFS": "\n",
             "COMP_LINE": line, "COMP_POINT": str(len(line))}  # fmt: skip
    command = [sys.executable, "-c", "from samovar.cli import main; main()"]
    subprocess.run(command, env={**os.environ, **asked}, check=False)
    return answer.read_text().split("\n")


def test_commands_and_options_are_completed(tmp_path: Path) -> None:
    assert completed("samovar ser", tmp_path) == ["serve "]
    assert completed("samovar serve --max-q", tmp_path) == ["--max-queue "]
    assert completed("samovar plan --gpu", tmp_path) == ["--gpu-memory "]
    assert "--api-key" not in completed("samovar generate --", tmp_path)
    assert completed("samovar completion z", tmp_path) == ["zsh "]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_can_read_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "samovar" in text
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
