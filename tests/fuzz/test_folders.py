"""Model folders with something wrong in them: looked at, planned for, and loaded, as from the shell.

Each case runs in a process of its own, so that one that crashes or hangs ends alone. A configuration may ask for a
model that is larger than the time or memory that a case gets; that is no error, and is counted.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from samovar import cli

from .cases import Fuzz, fuzzed
from .changes import TEXTS, changed_bytes, changed_json, weird, written

MEMORY, SECONDS, PATIENCE_S = 6 * 2**30, 20, 600
"""Bytes and seconds of processor time that a case gets, and how long it may take on a busy machine."""
TOO_MUCH = "asked for too much"


def modest(random: Random) -> Any:
    """A value that rarely asks for more than there is."""
    value = weird(random)
    return 5 if type(value) in (int, float) and abs(value) > 100 and random.random() < 0.95 else value


def damage(random: Random, folder: Path) -> str:
    """Change one to three files of a folder, and say which."""
    said = []
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        file = random.choice(files)
        kind = random.randrange(12)
        said.append(f"{file.relative_to(folder)} {kind}")
        if kind < 6 and file.suffix == ".json" and file.stat().st_size < 200_000:
            with contextlib.suppress(ValueError):
                file.write_bytes(written(random, changed_json(random, json.loads(file.read_bytes()), modest)))
        elif kind < 8:
            file.write_bytes(changed_bytes(random, file.read_bytes()))
        elif kind == 8:
            file.unlink()
        elif kind == 9:
            file.write_bytes(random.choice([*files, Path(os.devnull)]).read_bytes())
        elif kind == 10:
            file.unlink()
            target = random.choice(["/etc/passwd", "/dev/zero", str(folder), "gone", file.name, str(files[0])])
            file.symlink_to(target)
        else:
            name = random.choice(["model.safetensors.index.json", "adapter_config.json", "chat_template.jinja",
                                  "own.py", "added_tokens.json", "pytorch_model.bin", "generation_config.json",
                                  "config.json", "tokenizer.json", "spiece.model"])  # fmt: skip
            content = random.choice([b"", b"{}", b"[]", random.choice(TEXTS).encode("utf-8", "replace"), b"\x80\x04."])
            file.with_name(name).write_bytes(content)
    return "; ".join(said)


def commands(folder: Path) -> list[tuple[list[str], tuple[int, ...]]]:
    """What is done with a folder, and how it may end: with 1 for a model that loads and does not run."""
    size = ["--steps", "1", "--height", "16", "--width", "16", "--max-sequence-length", "8"]
    return [
        (["inspect", str(folder)], (0, 2)),
        (["plan", str(folder), "--gpu-memory", "1GiB"], (0, 2)),
        (["generate", "a cat", str(folder), "-q", "--device", "cpu", "-o", str(folder / "made.png"), *size], (0, 1, 2)),
    ]


def look(folder: Path) -> str:
    """Run the commands in this process; returns how they ended."""
    codes = []
    for command, allowed in commands(folder):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main(command)
        text = said.getvalue()
        assert code in allowed, f"{command[0]} ended with {code}: {text}"
        assert "Traceback" not in text, text
        assert code == 0 or text.count("\n") < 20, text
        codes.append(code)
    return "/".join(map(str, codes))


def in_a_child(work: Callable[[], str]) -> str:
    """What a function returns in a process of its own; AssertionError if it raises or crashes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, resource.RLIM_INFINITY))
            warnings.simplefilter("ignore")
            os.write(writing, work().encode())
            code = 0
        except MemoryError:
            code = 3
        except BaseException:
            os.write(writing, traceback.format_exc()[-3000:].encode("utf-8", "replace"))
        finally:
            os._exit(code)
    os.close(writing)
    ends_at = time.monotonic() + PATIENCE_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < ends_at:
        time.sleep(0.005)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    assert ended[0] != 0, f"not at its end after {PATIENCE_S} s, and waits"
    code = os.waitstatus_to_exitcode(ended[1])
    if code in (3, -signal.SIGXCPU):
        return TOO_MUCH
    assert code == 0, f"ended with {code}: {text}"
    return text


@fuzzed("folders", 4)
def test_no_folder_gives_a_traceback(fuzz: Fuzz, model: Path, tmp_path: Path) -> None:
    look(Path(shutil.copytree(model, tmp_path / "whole")))  # Everything is imported, and the folder is right.
    for random in fuzz.cases():
        folder = Path(shutil.copytree(model, tmp_path / "model"))
        said = damage(random, folder)
        with fuzz.trying(said.encode(), "txt"):
            try:
                fuzz.ends[in_a_child(partial(look, folder))] += 1
            finally:
                shutil.rmtree(folder)
