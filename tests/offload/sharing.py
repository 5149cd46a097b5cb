"""A process that offloads a model and shares its host copy: obeys one word a line, and answers each with JSON.

Its arguments are the folder of the pipeline and the folder that stands for shared memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from diffusers import FluxPipeline

import samovar.offload.host
import samovar.offload.shared
import samovar.offload.weights
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload
from samovar.offload.truth import Bounced

from .test_apply import draw


def answer(pipe: FluxPipeline, offloaded: Offloaded) -> None:
    bits = hashlib.sha256(draw(pipe).numpy().tobytes()).hexdigest()
    stats = offloaded.stats()
    print(json.dumps({"bits": bits, "shared": stats.shared_bytes, "copied": stats.copied_bytes}), flush=True)


def die_half_way() -> None:
    read = Bounced.read

    def killed(self: Bounced, start: int, target: torch.Tensor, threads: object) -> None:
        read(self, start, target, threads)  # type: ignore[arg-type]
        target[target.numel() // 2 :].fill_(255)
        print('"dying"', flush=True)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)

    Bounced.read = killed  # type: ignore[method-assign]


def main() -> None:
    folder, memory, *how = sys.argv[1:]
    samovar.offload.shared.FOLDER = Path(memory)
    samovar.offload.weights.LEAST_PIECE = samovar.offload.host.LEAST_PIECE = 600
    pipe = FluxPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    if "dies" in how:
        die_half_way()
    offloaded = apply_offload(pipe, OffloadConfig("layerwise", share=True), stage=HostStage(lazy=True))
    answer(pipe, offloaded)
    for line in sys.stdin:
        if line.strip() == "change":
            pipe.transformer.transformer_blocks[0].attn.to_q.weight.data.mul_(1.5)
        if line.strip() == "detach":
            offloaded.detach()
        answer(pipe, offloaded)


if __name__ == "__main__":
    main()
