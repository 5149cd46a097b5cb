"""Ranks are started, watched and ended: whatever happens to one, nothing hangs."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from pipelines import tiny_flux_pipeline
from samovar import cli
from samovar.core.errors import SettingError
from samovar.parallel import (
    RankError,
    Ranks,
    SequenceParallelConfig,
    enable_sequence_parallel_for_model,
    join_world,
    launch,
)
from samovar.parallel.launch import default_backend

from . import toys


def total(number: float) -> float:
    value = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(value)
    return float(value)


def fail_on_one() -> float:
    if dist.get_rank() == 1:
        raise ValueError("this rank has had enough")
    return total(0.0)


class _Dies(toys.Attention):
    """The second attention of a rank is its last."""

    def attend(self, *args: object, **kwargs: object) -> torch.Tensor:
        if dist.get_rank() == 1 and self.training:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().attend(*args, **kwargs)


@torch.no_grad()
def die_in_a_forward() -> None:
    model = toys.build(_Dies)
    enable_sequence_parallel_for_model(model, SequenceParallelConfig(ring_degree=2))
    model(toys.tokens(12))
    model.blocks[1].train()
    model(toys.tokens(12))


def wait_for_nobody() -> float:
    if dist.get_rank() == 1:
        time.sleep(600)
    return total(0.0)


def sleep() -> None:
    time.sleep(600)


def test_calls_and_results() -> None:
    with Ranks(2, backend="gloo", num_threads=1) as ranks:
        assert ranks.call(total, 1.0) == [3.0, 3.0]
        assert ranks.call(total, 2.0) == [5.0, 5.0], "the same world, again"
        assert ranks.is_running
        with pytest.raises(
            RankError, match=r"(?s)Rank 1 of 2 failed, and all were stopped.*ValueError: this rank has had"
        ):
            ranks.call(fail_on_one)
        assert not ranks.is_running
        with pytest.raises(RankError, match="These ranks have ended"):
            ranks.call(total, 1.0)


def test_a_rank_that_is_killed_in_a_forward_ends_the_others() -> None:
    ranks = Ranks(2, backend="gloo", num_threads=1, timeout_s=30.0)
    processes = list(ranks._processes)
    with pytest.raises(RankError, match=r"Rank 1 of 2 failed.*the process ended with exit code -9") as caught:
        ranks.call(die_in_a_forward, limit_s=60.0)
    assert caught.value.rank == 1
    assert not any(process.is_alive() for process in processes)


def test_a_rank_that_hangs_is_not_waited_for() -> None:
    with pytest.raises(
        RankError, match=r"(?s)Rank 0 of 2 failed, and all were stopped. Not heard from: rank 1.*Timed out"
    ):
        launch(wait_for_nobody, 2, backend="gloo", timeout_s=4.0)


def test_a_limit() -> None:
    with Ranks(1, backend="gloo") as ranks, pytest.raises(RankError, match=r"Rank 0 did not answer within 0.1 s"):
        ranks.call(sleep, limit_s=0.1)


def test_no_ranks_at_all() -> None:
    with pytest.raises(SettingError, match="num_ranks is 0"):
        Ranks(0)
    with pytest.raises(SettingError, match="not started by torchrun"):
        join_world()


def test_gpus_talk_over_nccl_and_cpus_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_backend(2) == "gloo"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [default_backend(ranks) for ranks in (1, 2, 3)] == ["nccl", "nccl", "gloo"], "a GPU for each, or none"


# ------------------------------------------------------------------------------------------------ under torchrun

_SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from parallel import toys
from samovar.parallel import SequenceParallelConfig, enable_sequence_parallel_for_model, join_world

class Ends(toys.Attention):
    def attend(self, *args, **kwargs):
        if self.training and dist.get_rank() == 1:
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this rank has had enough")
        return super().attend(*args, **kwargs)

rank = join_world(timeout_s=600)
model, tokens = toys.build(Ends), toys.tokens(13)
with torch.no_grad():
    bare = model(tokens)
    enable_sequence_parallel_for_model(model, SequenceParallelConfig(ring_degree=dist.get_world_size()))
    apart = float((model(tokens) - bare).abs().max())
    print(f"rank {rank} of {dist.get_world_size()} is right: {apart <= 1e-5}", flush=True)
    if sys.argv[1] != "well":
        model.blocks[1].train()
        model(tokens)
dist.destroy_process_group()
"""
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def torchrun(script: Path, how: str) -> subprocess.CompletedProcess[str]:
    script.write_text(_SCRIPT)
    command = [*_TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    ended = torchrun(tmp_path / "script.py", "well")
    assert ended.returncode == 0, ended.stderr
    assert all(f"rank {rank} of 2 is right: True" in ended.stdout for rank in range(2)), ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("killed", [r"rank\s*: 1", r"exitcode\s*: -9", "Signal 9"]),
        ("raises", [r"rank\s*: 1", "ValueError: this rank has had enough"]),
    ],
)
def test_under_torchrun_a_rank_that_ends_in_a_forward_ends_the_others(
    how: str, messages: list[str], tmp_path: Path
) -> None:
    """All end before the timeout of the exchange that the other rank waits in, and the message names the rank."""
    ended = torchrun(tmp_path / "script.py", how)
    assert ended.returncode != 0
    assert ended.stdout.count("is right: True") == 2, "both were in the forward after that"
    for message in messages:
        assert re.search(message, ended.stderr), ended.stderr


COMMON = ["generate", "cat", "--device", "cpu", "--seed", "7", "--steps", "3", "--height", "16", "--width", "24",
          "--max-sequence-length", "8"]  # fmt: skip


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a model, and the image that one process makes with it."""
    folder = tmp_path_factory.mktemp("models")
    tiny_flux_pipeline().save_pretrained(folder / "tiny")
    assert cli.main([*COMMON, "--model", str(folder / "tiny"), "-o", str(folder / "one.png")]) == 0
    return folder / "tiny", pixels(folder / "one.png")


def pixels(file: Path) -> Any:
    with Image.open(file) as opened:
        return np.asarray(opened).astype(float)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"ulysses": 2, "ring": 2}, {"ring": 2}], ids=str)
def test_the_command_line_under_torchrun(degrees: dict[str, int], image: tuple[Path, Any], tmp_path: Path) -> None:
    folder, expected = image
    options = [text for name, degree in degrees.items() for text in (f"--{name}-degree", str(degree))]
    size = math.prod(degrees.values())
    file = tmp_path / "many.png"
    command = [*_TORCHRUN, "--standalone", "--nproc-per-node", str(size), "-m", "samovar", *COMMON, *options]
    ended = subprocess.run(
        [*command, "--model", str(folder), "-o", str(file)],
        capture_output=True, text=True, timeout=600, env=environment(),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert np.abs(pixels(file) - expected).max() / 255 <= 1e-3


@pytest.mark.slow
def test_two_nodes_meet_through_torchruns_rendezvous(image: tuple[Path, Any], tmp_path: Path) -> None:
    """Two agents that know only an address of each other, each with its own process."""
    folder, expected = image
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "an-image",
               "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]  # fmt: skip
    files = [tmp_path / "first.png", tmp_path / "second.png"]
    nodes = [
        subprocess.Popen(
            [*_TORCHRUN, *meeting, "-m", "samovar", *COMMON, "--ulysses-degree", "2", "--model", str(folder),
             "-o", str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )
        for file in files
    ]  # fmt: skip
    try:
        said = [node.communicate(timeout=600) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    made = [file for file in files if file.exists()]
    assert len(made) == 1, "the first rank writes, on whichever node it is"
    assert np.abs(pixels(made[0]) - expected).max() / 255 <= 1e-3
