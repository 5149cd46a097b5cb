"""Requests of different steps, guidance and prompts: one at a time, and meeting at the denoiser.

Both workers serve the same requests in turn, round after round, and the ratio of their best times counts. Every image
is compared with the one that is made alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from datetime import date
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

import samovar
from samovar.engine import GenerationResult, OmniDiffusionConfig, OmniDiffusionSamplingParams, Request, Worker

PROMPTS = ("rocket, flat style", "red heart, noto style", "a grinning cat, 3d style", "robot, 3d style")


def requests(count: int, side: int, steps: tuple[int, ...]) -> list[Request]:
    chance = random.Random(1)
    return [
        Request(
            chance.choice(PROMPTS),
            OmniDiffusionSamplingParams(
                num_inference_steps=chance.choice(steps), true_cfg_scale=chance.choice((2.0, 4.5)), seed=number,
                height=side, width=side,
            ),
        )
        for number in range(count)
    ]  # fmt: skip


def served(worker: Worker, asked: list[Request]) -> tuple[float, list[Any]]:
    """The seconds that requests take, and their images."""
    started = time.perf_counter()
    outcomes = worker.run(asked)
    seconds = time.perf_counter() - started
    return seconds, [np.asarray(each.images[0]).astype(int) for each in outcomes if isinstance(each, GenerationResult)]


def measure(
    device: str, side: int, steps: tuple[int, ...], rounds: int, places: tuple[int, ...]
) -> list[dict[str, Any]]:
    asked = requests(max(places), side, steps)
    workers = {
        count: Worker(OmniDiffusionConfig("emoji", device=device, progress=False, max_batch=count))
        for count in (1, *places)
    }
    for worker in workers.values():  # What happens once: comparisons, kernels, tables.
        served(worker, asked)
    seconds: dict[int, list[float]] = {count: [] for count in workers}
    images: dict[int, list[Any]] = {}
    for _ in range(rounds):
        for count, worker in workers.items():
            taken, images[count] = served(worker, asked)
            seconds[count].append(taken)
    rows = []
    for count in places:
        apart = max(int(np.abs(one - two).max()) for one, two in zip(images[1], images[count], strict=True))
        rows.append({
            "requests": len(asked), "side": side, "max_batch": count,
            "one_at_a_time_s": round(min(seconds[1]), 3), "meeting_s": round(min(seconds[count]), 3),
            "ratio": round(min(seconds[1]) / min(seconds[count]), 3), "largest_difference_of_255": apart,
        })  # fmt: skip
    for worker in workers.values():
        worker.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--steps", type=int, nargs="+", default=(4, 6, 9))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--places", type=int, nargs="+", default=(8,))
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    rows = measure(options.device, options.side, tuple(options.steps), options.rounds, tuple(options.places))
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    if options.json:
        about = {"command": "python benchmarks/meeting.py", "date": date.today().isoformat(),
                 "samovar": samovar.__version__, "python": platform.python_version(), "torch": torch.__version__,
                 "diffusers": diffusers.__version__, "processor": platform.machine(), "device": options.device,
                 "threads": torch.get_num_threads()}  # fmt: skip
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
