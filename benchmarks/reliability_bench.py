"""What the tests of reliability share: servers that run tiny models, requests, and readings of memory."""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import httpx  # noqa: E402
import psutil  # noqa: E402

Device = Literal["cpu", "cuda"]
GENERATE = "/v1/images/generations"
PROMPT, LONG, MIB = "a cat", 50_000, 2**20
_DEFAULTS = {"num_inference_steps": 3, "height": 16, "width": 24, "max_sequence_length": 8}


@dataclass(frozen=True)
class Outcome:
    """What came of one test: whether it holds (None: not tried, and the figures say why), and the figures."""

    holds: bool | None
    figures: str
    how: str = ""
    """What is to be said beside "holds": of a run that is shorter than it should be, or of one figure that is not."""

    @property
    def words(self) -> str:
        said = {True: "holds", False: "**does not hold**", None: "not tried"}[self.holds]
        return f"{said} {self.how}" if self.how else said


@dataclass(frozen=True)
class Memory:
    """What is taken at one moment, in MiB."""

    resident: float
    """Of the server and its workers, on the host."""
    held: float
    """What the worker says, by /metrics: tensors on the GPU, or where there is none, its part of the above."""
    device: float
    """Of the GPU, by all processes, seen from this one; 0 where there is none."""

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.resident - other.resident, self.held - other.held, self.device - other.device)


class Bench:
    """The models, and servers that run them."""

    def __init__(self, folder: Path, device: Device, soak_minutes: float, fuzz_minutes: float = 5.0) -> None:
        from pipelines import tiny_flux_pipeline

        self._folder, self.device, self.soak_minutes, self.fuzz_minutes = folder, device, soak_minutes, fuzz_minutes
        self.model = self._saved("tiny", tiny_flux_pipeline())  # Now: to build it is no part of a server's start.
        self.idle_mib = self.device_mib()
        """Of the GPU, before any server."""

    @cached_property
    def editor(self) -> Path:
        from diffusers import FluxImg2ImgPipeline

        from pipelines import tiny_flux_pipeline

        return self._saved("editor", FluxImg2ImgPipeline(**tiny_flux_pipeline().components))

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """Options for two adapters of the model."""
        from pipelines import tiny_flux_pipeline
        from pipelines.adapters import save_adapters

        found = save_adapters(tiny_flux_pipeline(), self._folder / "adapters")
        return tuple(f"--lora={name}={source}" for name, source in found.items())

    @contextlib.contextmanager
    def videos(self) -> Iterator[Any]:
        """A server that makes videos."""
        from pipelines import PIPELINES

        size = {"height": 32, "width": 48, "num_frames": 9, "max_sequence_length": 16}
        place = self._folder / "films"
        if not place.exists():
            self._saved("films", PIPELINES["wan"].build(0), **size)
        with self.server("--jobs", str(self._folder / "jobs"), "--quiet", model=place) as started:
            yield started

    @cached_property
    def heavy(self) -> Path:
        """A tiny denoiser before a VAE of FLUX.1's shape, whose decoding is what takes memory in real pipelines."""
        import torch
        from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel

        from pipelines import tiny_flux_pipeline

        parts = dict(tiny_flux_pipeline().components)
        parts["transformer"] = FluxTransformer2DModel.from_config(parts["transformer"].config, in_channels=64)
        parts["vae"] = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=16,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1159, scaling_factor=0.3611,
        )  # fmt: skip
        return self._saved("heavy", FluxPipeline(**parts).to(torch.bfloat16), height=64, width=64)

    def _saved(self, name: str, pipe: Any, **defaults: int) -> Path:
        place = self._folder / name
        pipe.save_pretrained(place)
        (place / "samovar.json").write_text(json.dumps(_DEFAULTS | defaults))
        return place

    @contextlib.contextmanager
    def server(self, *options: str, model: Path | None = None, **more: Any) -> Iterator[Any]:
        from server.running import running

        place = model or self.model
        with running(place, "--max-steps", "100000", *options, device=self.device, **more) as started:
            yield started

    def device_mib(self) -> float:
        """What all processes take of the GPU; 0 where there is none."""
        if self.device == "cpu":
            return 0.0
        import torch

        free, total = torch.cuda.mem_get_info()
        return (total - free) / MIB

    def memory(self, server: Any) -> Memory:
        text = httpx.get(f"{server.address}/metrics", timeout=60).text
        held = float(re.findall(r"^samovar_memory_bytes (\S+)$", text, flags=re.MULTILINE)[0])
        return Memory(resident_mib(server), held / MIB, self.device_mib())


def resident_mib(server: Any) -> float:
    """What a server and its workers take on the host."""
    processes = [psutil.Process(server.process.pid), *server.workers()]
    return float(sum(process.memory_info().rss for process in processes) / MIB)


def peak_bytes(server: Any) -> int:
    """The most that a server ever held: what it took for a moment is seen too."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0])


def seconds_until(condition: Callable[[], bool], most: float = 120.0) -> float:
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > most:
            return float("inf")
        time.sleep(0.005)
    return time.monotonic() - started


def timed(call: Callable[[], httpx.Response]) -> tuple[httpx.Response, float]:
    started = time.perf_counter()
    answer = call()
    return answer, time.perf_counter() - started


def post(http: httpx.Client, **values: Any) -> httpx.Response:
    return http.post(GENERATE, json={"prompt": PROMPT, **values})


def is_ready(server: Any) -> bool:
    return httpx.get(f"{server.address}/ready", timeout=60).status_code == 200


def percentile(times: list[float], part: float) -> float:
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]


@contextlib.contextmanager
def left_at(http: httpx.Client, until_step: int, **values: Any) -> Iterator[float]:
    """A stream without end that has come to some step; its client goes away. Gives the time that a step takes."""
    body = {"prompt": PROMPT, "num_inference_steps": LONG, "stream": True, "progress": True, **values}
    with http.stream("POST", GENERATE, json=body) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        steps = []
        for event in lines:
            if event["type"] == "samovar.progress":
                steps.append(event["seconds"])
                if event["step"] == until_step:
                    break
        yield statistics.median(steps)


@contextlib.contextmanager
def endless(server: Any, until_step: int = 1, **values: Any) -> Iterator[float]:
    """The same, by a client of its own."""
    with server.client() as http, left_at(http, until_step, **values) as step:
        yield step
