"""Pictures a second of each training mode on this GPU.

    python -m training.bench

Each variant runs on made-up data in a process of its own with a time limit, so that one that
crashes or hangs costs only itself. Prints a table; the whole takes less than three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from training import loop, models
from training.flow import Captions, FlowStage
from training.settings import Settings, override

VARIANTS = [
    ("compiled", 512), ("graph-compiled", 512), ("eager", 512), ("graph", 512),
    ("graph-compiled", 1024), ("compiled", 256),
]  # fmt: skip
WARM, TIMED = 3, 12


class MadeUpTokenizer:
    """As much of a tokenizer as the text encoders ask for."""

    bos_token_id, eos_token_id, pad_token_id = 0, 1, 1

    def __len__(self) -> int:
        return 2048


def made_up_stage(settings: Settings, device: str) -> FlowStage:
    """A flow stage of full size on random latents and captions."""
    model, count, texts = settings.model, 2048, 4096
    torch.manual_seed(0)
    latents = torch.randn(count, model.grid**2, 4 * model.latent_channels, device=device)
    clip = torch.randint(2, 2000, (texts, 36))
    clip[:, 20:] = 1
    captions = Captions(
        clip, torch.full((texts,), 20), torch.randint(0, 2000, (texts, model.text_tokens)),
        torch.randint(0, texts, (count, 16)),
    )  # fmt: skip
    tokenizer = MadeUpTokenizer()
    weights = models.flow_weights(models.build_flow(model, tokenizer, tokenizer))
    return FlowStage(settings, weights, latents, captions, 0)


def measure(mode: str, batch: int, device: str, changes: list[str]) -> dict[str, Any]:
    """One variant's speed and memory."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)
    changes = [f"flow.batch={batch}", "flow.long_every=0", *changes]
    stage = made_up_stage(override(Settings(), changes), device)
    began = time.monotonic()
    step = loop.prepare(stage, mode, lambda line: print(line, file=sys.stderr, flush=True))
    losses: list[Tensor] = []
    for number in range(WARM + TIMED):
        if number == WARM:
            losses[-1].item()
            warm, started = time.monotonic() - began, time.monotonic()
        stage.set_rates(number, 0.0)
        losses.append(step(stage.batch(number), 0.0))
    last = losses[-1].item()
    seconds = (time.monotonic() - started) / TIMED
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {
        "mode": mode, "batch": batch, "pictures/s": round(batch / seconds),
        "ms/step": round(1000 * seconds, 1), "warm-up s": round(warm, 1),
        "GiB": round(memory, 1), "finite": last == last and abs(last) != float("inf"),
    }  # fmt: skip


def run_variant(mode: str, batch: int, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "training.bench", "--one", mode, "--batch", str(batch)]
    command += ["--device", args.device, "--set", *args.set]
    row: dict[str, Any] = {"mode": mode, "batch": batch}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {**row, "error": f"not done in {limit:.0f} s"}
    if done.returncode != 0:
        return {**row, "error": "\n".join(done.stderr.strip().splitlines()[-6:])}
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=2.8, help="time for all variants")
    add("--variants", nargs="*", metavar="MODE:BATCH", help="instead of the usual ones")
    add("--set", nargs="*", default=[], metavar="model.heads=2", help="settings to change")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--one", choices=loop.MODES, help=argparse.SUPPRESS)
    add("--batch", type=int, default=512, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.batch, args.device, args.set)))
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.abspath("out/inductor"))
    end = time.monotonic() + args.minutes * 60
    variants = [(m, int(b)) for m, _, b in (v.partition(":") for v in args.variants or [])]
    print("| mode | batch | pictures/s | ms/step | warm-up s | GiB | finite |\n|" + "---|" * 7)
    for mode, batch in variants or VARIANTS:
        left = end - time.monotonic()
        if left < 10:
            print(f"| {mode} | {batch} | no time left |")
            continue
        row = run_variant(mode, batch, args, min(left, 100.0))
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
