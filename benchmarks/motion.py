"""Skipped steps in videos: caches on the built-in Wan model, beside fewer plain steps, in one run.

    python benchmarks/motion.py [--json FILE] [--prompts 12] [--device cuda]

Each method makes the same clips from the same noise, 50 steps with guidance, in turn with the exact pipeline. The PSNR
is of all frames against the exact clip. "Computed" counts the forwards whose last block is computed; the speed is of
the whole call, text and VAE included, the best of `--repeats`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import date
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np

STEPS = 50
NAMES = (
    "rocket",
    "teapot",
    "cat face",
    "snail",
    "guitar",
    "pizza",
    "penguin",
    "balloon",
    "robot",
    "key",
    "owl",
    "taxi",
)
WAYS = ("flying up", "turning clockwise", "bouncing", "growing", "flying left", "fading out")
PROMPTS = [f"{name}, {('flat', '3d')[i % 2]} style, {WAYS[i % len(WAYS)]}" for i, name in enumerate(NAMES)]
Attach = Callable[[Any], AbstractContextManager[Any]]


def ours(**settings: Any) -> Attach:
    import samovar

    return partial(samovar.attach, **settings)


def of_diffusers(config: str, **settings: Any) -> Attach:
    @contextlib.contextmanager
    def attached(pipe: Any) -> Any:
        import diffusers

        pipe.transformer.enable_cache(getattr(diffusers, config)(**settings))
        try:
            yield
        finally:
            pipe.transformer.disable_cache()

    return attached


def of_cache_dit(threshold: float) -> Attach:
    @contextlib.contextmanager
    def attached(pipe: Any) -> Any:
        import cache_dit  # type: ignore[import-not-found]

        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=4, residual_diff_threshold=threshold
        )
        cache_dit.enable_cache(pipe, cache_config=config)
        try:
            yield
        finally:
            cache_dit.disable_cache(pipe)

    return attached


def methods() -> dict[str, tuple[Attach, int]]:
    """Each with the number of steps that it makes."""

    def bare(pipe: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    found: dict[str, tuple[Attach, int]] = {
        "samovar auto": (ours(cache="auto"), STEPS),
        "samovar auto, fast": (ours(cache={"backend": "auto", "tolerance": "fast"}), STEPS),
        "samovar TeaCache": (ours(cache="tea_cache"), STEPS),
    }
    for threshold in (0.1, 0.2):
        found[f"diffusers FirstBlockCache {threshold}"] = (
            of_diffusers("FirstBlockCacheConfig", threshold=threshold), STEPS,
        )  # fmt: skip
    for interval in (2, 4):
        settings = {"cache_interval": interval, "disable_cache_before_step": 4, "max_order": 1, "use_lite_mode": True}
        found[f"diffusers TaylorSeer lite every {interval}"] = (
            of_diffusers("TaylorSeerCacheConfig", **settings), STEPS,
        )  # fmt: skip
    if find_spec("cache_dit") is not None:
        found |= {f"cache-dit DBCache {threshold}": (of_cache_dit(threshold), STEPS) for threshold in (0.2,)}
    return found | {f"{steps} plain steps": (bare, steps) for steps in (25,)}


class Clips:
    """The pipeline, and clips by it."""

    def __init__(self, device: str, repeats: int) -> None:
        import torch
        from diffusers import WanPipeline

        from samovar.builtin import BUILTIN_MODELS

        folder = BUILTIN_MODELS["motion"]
        self.torch, self.pipe = torch, WanPipeline.from_pretrained(folder).to(device)
        self.pipe.set_progress_bar_config(disable=True)
        defaults = json.loads((folder / "samovar.json").read_text())
        self.call = {name: value for name, value in defaults.items() if name not in ("fps", "num_inference_steps")}
        self.repeats, self.computed = repeats, 0
        self.pipe.transformer.blocks[-1].ffn.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.computed += 1

    def make(self, prompt: str, seed: int, steps: int) -> tuple[np.ndarray, float]:
        generator = self.torch.Generator().manual_seed(seed)
        started = time.perf_counter()
        frames = self.pipe(prompt, num_inference_steps=steps, generator=generator, **self.call).frames[0]
        return np.round(frames * 255), time.perf_counter() - started

    def under(self, attach: Attach, prompt: str, seed: int, steps: int) -> tuple[np.ndarray, float, int]:
        """The clip, the best time, and how many forwards were computed."""
        with attach(self.pipe):
            self.computed = 0
            frames, seconds = self.make(prompt, seed, steps)
            computed = self.computed
            more = [self.make(prompt, seed, steps)[1] for _ in range(1, self.repeats)]
            return frames, min(seconds, *more) if more else seconds, computed


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(float(((one - other) ** 2).mean()), 1e-9)))


def measure(device: str, prompts: int, repeats: int) -> list[dict[str, Any]]:
    clips, entries = Clips(device, repeats), methods()
    seen: dict[str, list[tuple[float, float, int]]] = {name: [] for name in entries}
    problems: dict[str, str] = {}
    for seed, prompt in enumerate(PROMPTS[:prompts]):
        exact, plain, every = clips.under(lambda pipe: contextlib.nullcontext(), prompt, seed, STEPS)
        for name, (attach, steps) in entries.items():
            if name in problems:
                continue
            try:
                frames, seconds, computed = clips.under(attach, prompt, seed, steps)
            except Exception as error:
                if name.startswith("samovar"):
                    raise
                problems[name] = f"{type(error).__name__}: {error}"[:200]
                continue
            seen[name].append((psnr(frames, exact), plain / seconds, computed))
        print(f"{seed + 1} of {min(prompts, len(PROMPTS))} clips, exact in {plain:.2f} s, {every} forwards", flush=True)
    rows: list[dict[str, Any]] = [{"method": name, "problem": text} for name, text in problems.items()]
    for name, figures in seen.items():
        if name not in problems:
            values, speeds, computed = np.array(figures).T
            closeness = {"psnr": round(float(np.median(values)), 1), "worst_psnr": round(float(values.min()), 1)}
            speed = {"computed": round(float(computed.mean()), 1), "speedup": round(float(np.median(speeds)), 2)}
            rows.append({"method": name, **speed, **closeness})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows = measure(options.device, options.prompts, options.repeats)
    for row in rows:
        text = row.get(
            "problem"
        ) or "{computed:5.1f} computed {speedup:5.2f}x {psnr:6.1f} dB, worst {worst_psnr} dB".format(**row)
        print(f"{row['method']:40} {text}")
    if options.json:
        about: dict[str, Any] = {
            "command": f"python benchmarks/motion.py {' '.join(sys.argv[1:])}",
            "date": date.today().isoformat(),
        }
        about |= {name: version(name) for name in ("torch", "diffusers", "transformers")}
        about |= {"python": platform.python_version(), "device": options.device, "cores": os.cpu_count()}
        about |= {"steps": STEPS, "clips": min(options.prompts, len(PROMPTS)), "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
