"""A long run of an engine: replicas, batches, adapters and videos at once, and workers that are killed.

    python benchmarks/soak.py --device cuda --minutes 10 --json benchmarks/results/soak.json
    python benchmarks/soak.py --device cpu --minutes 2

Needs nothing but torch and diffusers (and peft, for adapters): no HTTP, no network. Tiny models with random weights.
One engine makes images with two replicas (two of one GPU), in batches, with a cache and adapters; another makes videos.
Clients ask at random for sizes, steps, tolerances, adapters and numbers of images, and take one request in ten back.

After a quarter of the time, which is not looked at, memory and times of two halves are compared. Then workers are
killed under load: each request must end with its outputs or the loss of its worker, and no more are lost than
the workers had. Memory is printed as it goes, and kept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

MIB = 2**20
IMAGE = {"num_inference_steps": 3, "height": 16, "width": 24, "max_sequence_length": 8}
VIDEO = {"num_inference_steps": 2, "height": 32, "width": 48, "num_frames": 9, "max_sequence_length": 16}
MOST_MIB, MOST_MIB_PER_HOUR, LONG_S = 4.0, 1.0, 1800.0
"""The RSS from half to half: medians of a few readings differ by so much. Of long halves an hour's growth is asked."""


@dataclass
class Phase:
    """A part of the time."""

    name: str
    ends: Counter[str] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)
    readings: list[dict[str, float]] = field(default_factory=list)


class Soak:
    """The engines, their clients, and what is seen."""

    def __init__(self, folder: Path, device: str, json_file: Path | None) -> None:
        self.device, self.file = device, json_file
        self.is_over = False
        self.report: dict[str, Any] = {"about": self._about(), "readings": [], "phases": {}}
        self.adapters: tuple[str, ...] = ()
        self.images, self.videos = self._engines(folder)
        self.phase = Phase("warm-up")
        self._began = time.monotonic()

    def _about(self) -> dict[str, Any]:
        import diffusers
        import torch

        name = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        command = f"python benchmarks/soak.py {' '.join(sys.argv[1:])}"
        versions = {"torch": torch.__version__, "diffusers": diffusers.__version__}
        return {"command": command, "date": str(date.today()), "device": name, **versions}

    def _engines(self, folder: Path) -> tuple[Any, Any]:
        from pipelines import PIPELINES, tiny_flux_pipeline
        from pipelines.adapters import save_adapters
        from samovar.engine import OmniDiffusionConfig, Supervisor

        def saved(name: str, pipe: Any, defaults: dict[str, int]) -> str:
            pipe.save_pretrained(folder / name)
            (folder / name / "samovar.json").write_text(json.dumps(defaults))
            return str(folder / name)

        images, videos = saved("images", tiny_flux_pipeline(), IMAGE), saved("videos", PIPELINES["wan"].build(0), VIDEO)
        lora = save_adapters(tiny_flux_pipeline(), folder / "lora") if importlib.util.find_spec("peft") else None
        self.adapters = tuple(lora or ())
        how: dict[str, Any] = {"device": self.device, "dtype": "float32", "progress": False, "max_queue": 32}
        twins = {"devices": "0,0"} if self.device == "cuda" else {"replicas": 2}
        made = OmniDiffusionConfig(images, max_batch=4, cache="auto", lora=lora, **twins, **how)
        engines = Supervisor(made), Supervisor(OmniDiffusionConfig(videos, **how))
        for engine in engines:
            engine.start()
        return engines

    # ------------------------------------------------------------------------------------------ clients

    def ask(self, chance: random.Random, engine: Any) -> None:
        """One request of an image or a video, perhaps taken back."""
        from samovar.core.errors import QueueFullError
        from samovar.engine import Done, Failed, OmniDiffusionSamplingParams, Request

        started = time.monotonic()
        is_video = engine is self.videos
        how: dict[str, Any] = {"seed": chance.randint(0, 99), "num_inference_steps": chance.randint(1, 20)}
        extra: dict[str, Any] = {}
        if is_video:
            how["num_frames"] = chance.choice([5, 9, 13])
        else:
            side = chance.choice([16, 32, 64])
            how |= {"height": side, "width": side, "num_outputs_per_prompt": chance.choice([1, 1, 1, 2])}
            extra = {"exact": True} if chance.random() < 0.2 else {"tolerance": chance.choice([None, 0.02, 0.1])}
            if self.adapters and chance.random() < 0.4:
                extra["lora"] = {"name": chance.choice(self.adapters), "scale": chance.choice([0.5, 1.0])}
        leaves = chance.random() / 5 if chance.random() < 0.1 else None
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        kind = "video" if is_video else "image"
        try:
            job = engine.submit(Request("a cat", OmniDiffusionSamplingParams(**how), **extra), events.put)
        except QueueFullError:
            self.phase.ends["queue full"] += 1
            time.sleep(0.05)
            return
        event = None
        while not isinstance(event, (Done, Failed)):
            try:
                event = events.get(timeout=leaves)
            except queue.Empty:
                leaves = None
                job.cancel()
        phase = self.phase  # That in which it ends.
        if isinstance(event, Failed):
            phase.ends[f"{kind}: {type(event.error).__name__}"] += 1
            return
        wanted = how.get("num_outputs_per_prompt", 1)
        phase.ends[f"{kind}s made" if len(event.result.outputs) == wanted else f"{kind}: too few"] += 1
        phase.times.append(time.monotonic() - started)

    def client(self, number: int, engine: Any) -> None:
        chance = random.Random(number)
        while not self.is_over:
            self.ask(chance, engine)

    # ------------------------------------------------------------------------------------------ what is seen

    def read(self) -> dict[str, float]:
        """What is taken now, in MiB."""
        import torch

        ids = [*self.images.status().worker_ids, *self.videos.status().worker_ids]
        row = {"second": round(time.monotonic() - self._began), "parent": resident_mib(os.getpid())}
        row |= {"workers": sum(map(resident_mib, ids))}
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            held = self.images.status().memory_bytes + self.videos.status().memory_bytes
            row |= {"driver": (total - free) / MIB, "torch": held / MIB}
        return {name: round(value, 2) for name, value in row.items()}

    def spend(self, phase: Phase, seconds: float, now_and_then: Callable[[], None] = lambda: None) -> Phase:
        """Look on while the clients ask."""
        self.phase, end = phase, time.monotonic() + seconds
        next_print = 0.0
        while (now := time.monotonic()) < end:
            phase.readings.append(self.read())
            if now >= next_print:
                print(f"{phase.name}: {phase.readings[-1]} {dict(phase.ends)}", flush=True)
                self.report["readings"].append(phase.readings[-1])
                self.keep(phase)
                next_print = now + max(5.0, seconds / 20)
            now_and_then()
            time.sleep(0.5)
        self.keep(phase)
        return phase

    def keep(self, phase: Phase) -> None:
        self.report["phases"][phase.name] = {
            "ends": dict(phase.ends),
            "p50_s": part(phase, 0.5),
            "p99_s": part(phase, 0.99),
        }
        if self.file is not None:
            self.file.write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")

    def kill_one(self, chance: random.Random) -> int:
        """Kill a worker that is busy; gives how many requests it had at most."""
        busy = [replica for replica in self.images.status().replicas if replica.running and replica.worker_ids]
        if not busy:
            return -1
        replica = chance.choice(busy)
        with contextlib.suppress(ProcessLookupError):
            os.kill(replica.worker_ids[0], signal.SIGKILL)
        return 4  # No batch has more.


def resident_mib(process_id: int) -> float:
    with contextlib.suppress(OSError), open(f"/proc/{process_id}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / MIB
    return 0.0


def part(phase: Phase, share: float) -> float:
    times = sorted(phase.times) or [0.0]
    return round(times[min(len(times) - 1, int(share * len(times)))], 3)


def judge(
    first: Phase, second: Phase, killing: Phase, allowed: list[int], seconds: float
) -> dict[str, tuple[bool, str]]:
    """By name: whether it holds, and the figures."""
    found: dict[str, tuple[bool, str]] = {}
    good = {"images made", "videos made", "queue full", "image: CancelledRequestError", "video: CancelledRequestError"}
    ends = first.ends + second.ends
    found["answers"] = set(ends) <= good and {"images made", "videos made"} <= set(ends), str(dict(ends))
    for name in [name for name in second.readings[0] if name != "second"]:
        before, after = ([row[name] for row in phase.readings] for phase in (first, second))
        grown = statistics.median(after) - statistics.median(before)
        hourly = grown * 3600 / seconds
        holds = hourly < MOST_MIB_PER_HOUR if seconds >= LONG_S else grown < MOST_MIB
        text = f"{statistics.median(before):.1f} MiB, then {grown:+.2f} ({hourly:+.1f} an hour)"
        found[f"memory, {name}"] = holds, text
    lost, most = killing.ends["image: WorkerLostError"], sum(allowed)
    if allowed:
        text = f"{len(allowed)} kills, {lost} requests lost, at most {most} were with them; {dict(killing.ends)}"
        found["killed workers"] = set(killing.ends) <= good | {"image: WorkerLostError"} and 0 < lost <= most, text
    return found


def run(soak: Soak, minutes: float, kills: int) -> int:
    engines = [soak.images] * 6 + [soak.videos]
    clients = [threading.Thread(target=soak.client, args=each, daemon=True) for each in enumerate(engines)]
    for client in clients:
        client.start()
    half_s = 60 * minutes * 3 / 8
    soak.spend(soak.phase, 60 * minutes / 4)
    first, second = soak.spend(Phase("first half"), half_s), soak.spend(Phase("second half"), half_s)
    killing, chance, allowed = Phase("killing"), random.Random(0), list[int]()

    def kill() -> None:
        status = soak.images.status()
        if len(allowed) < kills and status.replicas_ready == 2 and (had := soak.kill_one(chance)) > 0:
            allowed.append(had)

    started = time.monotonic()
    while len(allowed) < kills and time.monotonic() - started < 600:
        soak.spend(killing, 5.0, kill)
    soak.spend(killing, 5.0)
    soak.is_over = True
    for client in clients:
        client.join(120)
    found = judge(first, second, killing, allowed, half_s)
    if any(client.is_alive() for client in clients):
        found["clients"] = False, "a client still waits for its answer"
    soak.report["findings"] = {name: {"holds": holds, "figures": text} for name, (holds, text) in found.items()}
    soak.keep(killing)
    for name, (holds, text) in found.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {name}: {text}", flush=True)
    return 0 if all(holds for holds, _ in found.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="without the start and the kills at the end (10)")
    parser.add_argument("--kills", type=int, default=3, help="workers to kill at the end; each takes a restart (3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), options.device, options.json)
        try:
            return run(soak, options.minutes, options.kills)
        finally:
            soak.images.close()
            soak.videos.close()


if __name__ == "__main__":
    sys.exit(main())
