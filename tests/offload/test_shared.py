"""One host copy for several processes: built once, never written to, and gone with the last one, killed or not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.offload import shared
from samovar.offload.shared import shared_copy


class Sharer:
    """A process of `sharing.py`."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "offload.sharing", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, word: str) -> Any:
        self.tell(word)
        return self.answer()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        with self.process:
            pass  # Its streams are closed, and it ends.


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file({"large": torch.randn(700, 700), "small": torch.randn(70), "other": torch.randn(600, 700)}, path)
    return path


def bits_of(file: Path) -> str:
    weights = load_file(file).values()
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()


@pytest.fixture
def start(file: Path, tmp_path: Path) -> Iterator[Callable[..., Sharer]]:
    with ExitStack() as undo:

        def begin(*how: str) -> Sharer:
            sharer = Sharer(file, tmp_path, *how)
            undo.callback(sharer.end, kill=True)
            return sharer

        yield begin


def is_blocked(sharer: Sharer) -> bool:
    """Whether a process waits for a lock, as far as the kernel tells."""
    try:
        waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " -> " in line]
    except OSError:
        return False
    return any(words[5] == str(sharer.process.pid) for words in waiting)


def copies(memory: Path) -> list[Path]:
    return [file for file in memory.glob("samovar-*") if file.suffix != ".lock"]


def test_processes_share_one_copy_and_not_their_changes(
    start: Callable[..., Sharer], file: Path, tmp_path: Path
) -> None:
    first = start()
    alone = first.answer()
    assert alone["bits"] == bits_of(file)
    assert alone["copied"] == alone["shared"] > 0
    second = start()
    assert second.answer() == {**alone, "copied": 0}, "nothing is read again"
    first.end(kill=True)
    third = start()
    assert third.answer()["copied"] == 0
    changed = third.ask("change")
    assert changed["bits"] != alone["bits"]
    assert second.ask("draw")["bits"] == alone["bits"]
    assert copies(tmp_path)
    for last in (second, third):
        last.end()
    assert not copies(tmp_path)


def test_what_a_killed_process_left_is_removed_by_the_next(start: Callable[..., Sharer], tmp_path: Path) -> None:
    killed = start()
    bits = killed.answer()["bits"]
    killed.end(kill=True)
    assert copies(tmp_path)
    for file in copies(tmp_path):
        file.write_bytes(file.read_bytes()[::-1])  # So that its use would show.
    last = start()
    assert last.answer()["bits"] == bits
    for file in copies(tmp_path):
        file.unlink()  # Somebody cleans up while it is in use.
    alone = start()
    assert (alone_answer := alone.answer())["bits"] == bits
    assert alone_answer["shared"] == 0
    for sharer in (last, alone):
        sharer.end()
    assert not copies(tmp_path)


def test_a_process_that_dies_while_it_builds_is_replaced(
    start: Callable[..., Sharer], file: Path, tmp_path: Path
) -> None:
    dying = start("dies")
    assert dying.answer() == "dying"
    waiting = [start(), start()]
    deadline = time.monotonic() + 60
    while not all(is_blocked(sharer) for sharer in waiting) and time.monotonic() < deadline:
        time.sleep(0.05)
    dying.tell("now")
    answers = [sharer.answer() for sharer in waiting]
    assert [answer["bits"] for answer in answers] == [bits_of(file)] * 2
    assert answers[0]["shared"] == answers[1]["shared"] > 0
    for sharer in waiting:
        sharer.end()
    assert not copies(tmp_path)


# ------------------------------------------------------------------------------------------------ in this process


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(shared, "FOLDER", folder)
    shared._locks.cache_clear()
    shared._sweep.cache_clear()
    monkeypatch.setattr(shared, "_lock", shared._lock)
    return folder


def fill_with(value: int, log: list[int]) -> Callable[[torch.Tensor], None]:
    def fill(target: torch.Tensor) -> None:
        log.append(value)
        target.fill_(value)

    return fill


def test_it_is_built_once_and_removed_with_its_last_user(memory: Path) -> None:
    log: list[int] = []
    one = shared_copy((0, 1), 7000, fill_with(1, log))
    other = shared_copy((0, 1), 7000, fill_with(2, log))
    assert one is not None
    assert other is not None
    assert (one is other, log, other[6999]) == (True, [1], 1)
    assert len(copies(memory)) == 1
    del one
    assert copies(memory)
    del other
    assert not copies(memory)


def test_another_file_or_place_is_another_copy(memory: Path) -> None:
    log: list[int] = []
    held = [shared_copy((0, 1), 7000, fill_with(1, log)), shared_copy((8, 1), 7008, fill_with(2, log))]
    held.append(shared_copy((0, 2), 7000, fill_with(3, log)))
    assert log == [1, 2, 3]
    assert len(copies(memory)) == 3


def test_what_cannot_be_shared_is_not(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[int] = []

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.warns(UserWarning, match=r"6.84 KiB of weights cannot be shared .*: No space left .* --shm-size"):
            assert shared_copy((0, 1), 7000, fill_with(1, log)) is None
    assert not copies(memory)
    kept = shared_copy((0, 1), 7000, fill_with(1, log))
    (file,) = copies(memory)
    del kept
    file.touch(mode=0o666)
    file.chmod(0o666)
    shared._sweep(os.getpid())
    with pytest.warns(UserWarning, match="is somebody else's"):
        assert shared_copy((0, 1), 7000, fill_with(1, log)) is None, "others could have written to it"
    monkeypatch.setattr(shared, "FOLDER", memory / "nowhere")
    shared._locks.cache_clear()
    with pytest.warns(UserWarning, match="cannot be shared"):
        assert shared_copy((0, 1), 7000, fill_with(1, log)) is None
    assert log == [1]
