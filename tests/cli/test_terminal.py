"""Progress on a terminal, and in a log."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from samovar.cli import terminal
from samovar.cli.terminal import Status, aligned


def test_a_terminal_sees_progress() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "samovar", "inspect", "SD3Transformer2DModel"],
        stdout=theirs,
        stderr=theirs,
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


def test_rows_are_aligned() -> None:
    assert aligned([("a", "1"), ("bcd", "23")], right=(1,)) == ["a     1", "bcd  23"]


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "INTERVAL_S", 0.05)
    with Status("loading") as status:
        time.sleep(0.2)
        status.update("step 3/5")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "samovar: loading (0 s)"
    assert lines[-1] == "samovar: step 3/5 (0 s)"
    with Status("loading", quiet=True):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""
