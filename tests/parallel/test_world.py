"""Ranks that torch has started, in Python, under torchrun, and on two nodes: one image, and nothing hangs."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipelines import tiny_flux_pipeline
from samovar import cli
from samovar.parallel import SequenceParallelConfig, enable_sequence_parallel_for_model, join_world

from . import toys


class Ends(toys.Attention):
    """An attention that is the last of rank 1 in training."""

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.training and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().attend(*args, **kwargs)


@torch.no_grad()
def forward(is_last: bool) -> tuple[int, float]:
    """A sharded forward, and one in which a rank is killed if `is_last`."""
    rank = join_world()
    model, tokens = toys.build(Ends), toys.tokens(13)
    bare = model(tokens)
    enable_sequence_parallel_for_model(model, SequenceParallelConfig(ring_degree=dist.get_world_size()))
    apart = float((model(tokens) - bare).abs().max())
    if is_last:
        model.blocks[1].train()
        model(tokens)
    return rank, apart


@pytest.mark.slow
def test_ranks_that_a_program_starts() -> None:
    two = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        start_method="spawn", monitor_interval=0.1, max_restarts=0,
    )  # fmt: skip
    found = elastic_launch(two, forward)(False)
    assert [found[rank][0] for rank in range(2)] == [0, 1]
    assert max(apart for _, apart in found.values()) <= 1e-5
    with pytest.raises(ChildFailedError, match=r"(?s)rank\s*: 1.*Signal 9"):  # And not the other one, which waits.
        elastic_launch(two, forward)(True)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
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


def start(how: list[str], options: list[str], folder: Path, file: Path) -> subprocess.Popen[str]:
    command = [*TORCHRUN, *how, "-m", "samovar", *COMMON, *options, "--model", str(folder), "-o", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"ulysses": 2, "ring": 2}, {"ring": 2}], ids=str)
def test_the_command_line_under_torchrun(degrees: dict[str, int], image: tuple[Path, Any], tmp_path: Path) -> None:
    folder, expected = image
    options = [text for name, degree in degrees.items() for text in (f"--{name}-degree", str(degree))]
    size = math.prod(degrees.values())
    with start(["--standalone", "--nproc-per-node", str(size)], options, folder, tmp_path / "many.png") as process:
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert np.abs(pixels(tmp_path / "many.png") - expected).max() / 255 <= 1e-3


@pytest.mark.slow
def test_two_nodes_meet_through_torchruns_rendezvous(image: tuple[Path, Any], tmp_path: Path) -> None:
    """Two agents that know only an address of each other, each with its own process."""
    folder, expected = image
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "an-image",
               "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]  # fmt: skip
    files = [tmp_path / "first.png", tmp_path / "second.png"]
    nodes = [start(meeting, ["--ulysses-degree", "2"], folder, file) for file in files]
    try:
        said = [node.communicate(timeout=600) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    made = [file for file in files if file.exists()]
    assert len(made) == 1, "the first rank writes, on whichever node it is"
    assert np.abs(pixels(made[0]) - expected).max() / 255 <= 1e-3
