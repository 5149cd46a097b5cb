"""The time of the host for a step where forwards are replayed, on any machine: nothing is computed.

    python benchmarks/graphs_host.py [--models flux qwen] [--contestants ...] [--steps 300] [--profile]

Models have the blocks and modules of the published ones, and tiny widths. A recorder stands for CUDA graphs that
records as they do and replays nothing, so what is left is what Samovar itself does in a step: reading the arguments,
deciding, looking whether anything has changed, copying inputs and outputs. `until_launch_us` is what a device that has
nothing to do waits for; the rest goes on while it computes. Times are of the thread, in microseconds.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import gpu_models as gpu
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel, QwenImageTransformer2DModel

from samovar import attach
from samovar.graphs.recorders import Recording
from simulated import recording_by

WARM = 12
"""Steps at the beginning of a run that do not count."""
NARROW = 16
"""Width of everything that has one."""


class Nothing:
    """Records by running, and replays nothing but the moment of its launch."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.launched = 0.0

    def take_turn(self) -> None:
        """Nothing goes on in the background."""

    def record(self, function: Callable[[], Any]) -> Recording:
        def replay() -> None:
            self.launched = time.thread_time()

        return Recording(replay, function(), 0)


def flux() -> torch.nn.Module:
    return FluxTransformer2DModel(
        num_layers=19, num_single_layers=38, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=NARROW,
        pooled_projection_dim=NARROW, guidance_embeds=True, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip


def qwen() -> torch.nn.Module:
    return QwenImageTransformer2DModel(
        num_layers=60, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=NARROW,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"flux": flux, "qwen": qwen}


def arguments(name: str) -> dict[str, Any]:
    """What each call of a run is given, beside the sample and the time."""
    given: dict[str, Any] = {"encoder_hidden_states": torch.randn(1, 8, NARROW), "return_dict": False}
    if name == "qwen":
        return given | {"encoder_hidden_states_mask": None, "img_shapes": [[(1, 4, 4)]]}
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}
    return given | places | {"pooled_projections": torch.randn(1, NARROW), "guidance": torch.full((1,), 3.5)}


class Pipe:
    """Calls a transformer as diffusers' pipelines do."""

    def __init__(self, name: str, recorder: Nothing) -> None:
        torch.manual_seed(0)
        self.transformer: Any = MODELS[name]().eval().requires_grad_(False)
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self._given, self._recorder = arguments(name), recorder
        self.components = {"transformer": self.transformer, "scheduler": self.scheduler}

    @torch.no_grad()
    def __call__(self, steps: int) -> list[tuple[float, float]]:
        """For each step, the time until its last launch and until its end."""
        self.scheduler.set_timesteps(steps)
        self._num_timesteps, latents, found = steps, torch.randn(1, 16, 64), []
        for time_of_step in self.scheduler.timesteps:
            given = {"hidden_states": latents, "timestep": time_of_step.expand(1) / 1000, **self._given}
            start = time.thread_time()
            with self.transformer.cache_context("cond"):
                output = self.transformer(**given)[0]
            end = time.thread_time()
            found.append((max(self._recorder.launched - start, 0.0), end - start))
            latents = self.scheduler.step(output, time_of_step, latents, return_dict=False)[0]
        return found


def scheduled(skips: bool, steps: int, **settings: Any) -> dict[str, Any]:
    mask = "###" + ("." if skips else "#") * (steps - 4) + "."
    return {"backend": "tea_cache", "schedule": mask, **settings}


def by_signal(skips: bool) -> dict[str, Any]:
    unguarded = {"first_steps": 3, "last_steps": 0, "max_skips": None, "min_steps": 0}
    return {"backend": "tea_cache", "rel_l1_thresh": 1e30 if skips else 1e-30,
            "coefficients": (0, 0, 0, 1, 0), **unguarded}  # fmt: skip


CONTESTANTS: dict[str, Callable[[int], Any]] = {
    "skipped by schedule": lambda steps: scheduled(True, steps),
    "skipped by schedule, of the output": lambda n: scheduled(True, n, forecast="linear", forecast_of="output"),
    "skipped by signal": lambda steps: by_signal(True),
    "skipped by auto": lambda steps: {"backend": "auto", "tolerance": 1e6},
    "computed": lambda steps: None,
    "computed by schedule": lambda steps: scheduled(False, steps),
    "computed by signal": lambda steps: by_signal(False),
    "computed by auto": lambda steps: {"backend": "auto", "tolerance": 1e-30},
}


def measure(name: str, contestant: str, steps: int, profile: bool) -> dict[str, Any]:
    recorder = Nothing()
    with recording_by(recorder, torch.device("cpu")):
        pipe = Pipe(name, recorder)
        with attach(pipe, cache=CONTESTANTS[contestant](steps), compile="graphs") as attached:
            pipe(steps)
            if profile:
                profiler = cProfile.Profile()
                profiler.runcall(pipe, steps)
                pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(40)
            taken, cache = pipe(steps)[WARM:], attached.stats().cache
            mask = "#" * steps if cache is None else cache.denoisers["transformer"].branches["cond"].mask
        wanted = "." if contestant.startswith("skipped") else "#"
        kept = [one for one, step in zip(taken, mask[WARM:], strict=True) if step == wanted]
        until, whole = ([times[part] * 1e6 for times in kept] for part in (0, 1))
        return {"until_launch_us": round(median(until), 1), "us": round(median(whole), 1),
                "least_tenth_us": round(quantiles(whole, n=10)[0], 1), "steps": len(kept)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--contestants", nargs="+", choices=tuple(CONTESTANTS), default=tuple(CONTESTANTS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = gpu.header("cpu") | {"models": {}}
    for name in options.models:
        found = result["models"].setdefault(name, {"modules": sum(1 for _ in MODELS[name]().modules())})
        for contestant in options.contestants:
            found[contestant] = measure(name, contestant, options.steps, options.profile)
            print(f"{name}, {contestant}: {found[contestant]}", flush=True)
        if options.json is not None:
            gpu.write(options.json, result)


if __name__ == "__main__":
    main()
