"""What tests of the lab's commands call."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar import cli

IMAGE = ["--height", "16", "--width", "24", "--true-cfg-scale", "2", "--negative-prompt", "",
         "--max-sequence-length", "8"]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def compare(model: str, prompts: str, num_steps: int, output: Path) -> list[str]:
    tasks = ["--prompts", prompts, "--num-prompts", "2", "--steps", str(num_steps)]
    return ["compare", model, *tasks, "-o", str(output), *IMAGE]
