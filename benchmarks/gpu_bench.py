"""Time and memory of a forward on a GPU, for the benchmarks of offload."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_models
import torch

GIB = 2**30
PASSES = 4
STEPS = 28


class Holder:
    """The least that counts as a pipeline: an object with modules, and a scheduler that knows its steps."""

    def __init__(self, device: torch.device, **modules: torch.nn.Module) -> None:
        vars(self).update(modules)
        self.scheduler = SimpleNamespace(timesteps=torch.linspace(1000, 20, STEPS, device=device))


def gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)


def resident_set_bytes() -> int:
    """What this process holds of the host's memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu(), other.cpu())


class Bench:
    """One device, and how a forward is timed on it."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny = device, tiny
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.is_cuda = device.type == "cuda"

    def sync(self) -> None:
        gpu_models.synchronise(self.device)

    def clear(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            if hasattr(torch._C, "_host_emptyCache"):  # What peers pinned is not given back otherwise.
                torch._C._host_emptyCache()

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else 0

    @torch.no_grad()
    def pass_ms(self, forward: Any, passes: int = PASSES, warm: int = 2) -> tuple[float, float]:
        """Milliseconds of a pass among several, and GiB of its peak."""
        for _ in range(warm):
            forward()
        self.sync()
        self.reset_peak()
        start = time.perf_counter()
        for _ in range(passes):
            forward()
        self.sync()
        return (time.perf_counter() - start) * 1e3 / passes, gib(self.peak())

    def seconds(self, call: Any) -> float:
        self.sync()
        start = time.perf_counter()
        call()
        self.sync()
        return time.perf_counter() - start

    def bus(self) -> dict[str, float]:
        """GiB a second from memory that CUDA allocated, as a yardstick for ours."""
        if not self.is_cuda:
            return {}
        found = {}
        for name, pinned in (("pinned", True), ("pageable", False)):
            source = torch.ones(GIB // 2, dtype=torch.uint8, pin_memory=pinned)
            target = torch.empty_like(source, device=self.device)
            target.copy_(source, non_blocking=True)
            taken = min(self.seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True)) for _ in range(5))
            found[f"{name}_gib_s"] = round(0.5 / taken, 2)
        return found
