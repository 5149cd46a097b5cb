"""Ranks are started, watched and ended: whatever happens to one, nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samovar.errors import SettingError
from samovar.parallel import (
    RankError,
    Ranks,
    SequenceParallelConfig,
    enable_sequence_parallel_for_model,
    join_world,
    launch,
)

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
        time.sleep(60)
    return total(0.0)


def sleep() -> None:
    time.sleep(60)


def test_calls_and_results() -> None:
    with Ranks(2, backend="gloo", num_threads=1) as ranks:
        assert ranks.call(total, 1.0) == [3.0, 3.0]
        assert ranks.call(total, 2.0) == [5.0, 5.0], "the same world, again"
        assert ranks.is_running
        assert len(set(ranks.process_ids)) == 2
        with pytest.raises(
            RankError, match=r"(?s)Rank 1 of 2 failed, and all were ended.*ValueError: this rank has had"
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
    with pytest.raises(RankError, match=r"Rank 0 of 2 failed, and all were ended. Not heard from: rank 1.*Timed out"):
        launch(wait_for_nobody, 2, backend="gloo", timeout_s=1.0)


def test_a_limit() -> None:
    with Ranks(1, backend="gloo") as ranks, pytest.raises(RankError, match=r"Rank 0 did not answer within 0.1 s"):
        ranks.call(sleep, limit_s=0.1)


def test_no_ranks_at_all() -> None:
    with pytest.raises(SettingError, match="num_ranks is 0"):
        Ranks(0)
    with pytest.raises(SettingError, match="not started by torchrun"):
        join_world()


_SCRIPT = """
import torch.distributed as dist, torch
from samovar.parallel import join_world
rank = join_world(timeout_s=30)
value = torch.tensor([1.0])
dist.all_reduce(value)
print(f"rank {rank} sees {int(value)}", flush=True)
dist.destroy_process_group()
"""


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr
    assert all(f"rank {rank} sees 2" in ended.stdout for rank in range(2)), ended.stdout
