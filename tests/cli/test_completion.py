"""Completion for the shells, tried as the shell does it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samovar import cli
from samovar.cli.completion import SHELLS


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
