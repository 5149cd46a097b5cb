"""Completion for the shells, tried in the shell itself where it is there."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from samovar import cli
from samovar.cli.completion import SHELLS, bash_script, fish_script, options_of, zsh_script
from samovar.cli.entry import _parser


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for command, options in options_of(_parser()).items():
        assert command in text
        for option in options:
            assert option.removeprefix("--") in text


def completed(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    words = line.split(" ")
    setup = f"COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}; _samovar"
    command = f'{script("bash", capsys)}\n{setup}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout.split()


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    assert completed("samovar ser", capsys) == ["serve"]
    assert completed("samovar serve --max-q", capsys) == ["--max-queue"]
    assert completed("samovar plan --gpu", capsys) == ["--gpu-memory"]
    assert "--api-key" not in completed("samovar generate --", capsys)
    assert completed("samovar completion zsh-", capsys) == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    if shutil.which(shell) is None:  # What can be seen without it: quotes come in pairs.
        assert text.count("'") % 2 == 0
        return
    subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_zsh_asks_for_the_second_word_and_leaves_it_alone() -> None:
    text = zsh_script({"do": {"--it": "it"}})
    assert 'case "${words[2]}" in' in text
    assert "words=" not in text
    assert "local -a commands choices" in text


def test_scripts_survive_any_help_text() -> None:
    commands = {"do": {"--it": 'it\'s 100 % `rm -rf` $HOME: "yes"'}}
    assert "rm -rf" not in bash_script(commands)
    assert zsh_script(commands).count("'") % 2 == 0
    assert fish_script(commands).count("'") % 2 == 0
