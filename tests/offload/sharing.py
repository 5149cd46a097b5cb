"""A process that shares its host copy of a file of weights: obeys one word a line, and answers each with JSON.

Its arguments are the file and the folder that stands for shared memory. It imports no more than it must.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from samovar.offload import HostStage, shared
from samovar.offload.files import Source
from samovar.offload.pinned import HostMemory
from samovar.offload.weight_group import WeightGroup


def answer(weights: list[torch.Tensor], group: WeightGroup, stage: HostStage) -> None:
    """Say what arrives on the device."""
    group.prepare()
    group.load()
    stage.compute_waits(stage.mark_copied())
    bits = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()
    group.unload()
    print(
        json.dumps({"bits": bits, "shared": stage.stats.shared_bytes, "copied": stage.stats.copied_bytes}), flush=True
    )


def die_half_way() -> None:
    read = Source.read

    def killed(self: Source, start: int, target: torch.Tensor) -> None:
        read(self, start, target[: len(target) // 2])
        print('"dying"', flush=True)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)

    Source.read = killed  # type: ignore[method-assign]


def main() -> None:
    file, memory, *how = sys.argv[1:]
    shared.FOLDER = Path(memory)
    weights = list(load_file(file).values())
    stage = HostStage(lazy=True)
    host = HostMemory(stage, None)
    host.follow(0, shares=True)
    group = WeightGroup("weights", lambda: weights, stage, host)
    if "dies" in how:
        die_half_way()
    answer(weights, group, stage)
    for line in sys.stdin:
        if line.strip() == "change":
            weights[0].data.mul_(1.5)
        answer(weights, group, stage)
    group.restore()
    host.close()


if __name__ == "__main__":
    main()
