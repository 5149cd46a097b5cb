"""The cost of the server per request, and its throughput, beside a plain FastAPI loop, in one run.

    python benchmarks/server.py [--steps 8] [--rounds 10] [--clients 8] [--spells 5] [--json FILE]

Three processes hold the built-in model: the bare pipeline of diffusers, which only calls it; a plain FastAPI server
around the same pipeline, with a lock; and `samovar serve`. They are asked in turn, one picture a time, so that a busy
machine disturbs all alike, and each with as many threads as the others, which spin alike while they wait. What a server
costs is the time of its request less that of the bare pipeline in the same round; the median of the rounds is judged.
Beside it stands what is spent around the pipeline: the time of a request at the client less the pipeline's own in it.
Then several clients ask at once, of one server and of the other in turn, in spells of one picture for each client.
Beside the pictures a second stands how long a pipeline waits between two pictures although another is to be made.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import httpx

PROMPT, MODEL = "a grinning cat, 3d style", "emoji"
GOAL_S, GOAL_PART = 0.005, 0.02


class Pipeline:
    """The bare pipeline: what everything else is measured against."""

    def __init__(self, steps: int) -> None:
        from diffusers import FluxPipeline

        from samovar.builtin import BUILTIN_MODELS

        folder = BUILTIN_MODELS[MODEL]
        self.pipe = FluxPipeline.from_pretrained(folder)
        self.pipe.set_progress_bar_config(disable=True)
        self.call = json.loads((folder / "samovar.json").read_text()) | {"num_inference_steps": steps}

    def picture(self) -> tuple[Any, float]:
        import torch

        started = time.perf_counter()
        image = self.pipe(PROMPT, generator=torch.Generator("cpu").manual_seed(7), **self.call).images[0]
        return image, time.perf_counter() - started


def run_bare(steps: int) -> None:
    """A process that makes a picture for every line it reads, and says how long that took."""
    pipeline = Pipeline(steps)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(pipeline.picture()[1], flush=True)


def run_plain(steps: int) -> None:
    """The server that one writes in ten minutes."""
    import uvicorn
    from fastapi import FastAPI

    pipeline, lock, app = Pipeline(steps), threading.Lock(), FastAPI()

    @app.post("/v1/images/generations")
    def generate(request: dict[str, Any]) -> dict[str, Any]:
        with lock:
            image, seconds = pipeline.picture()
        file = io.BytesIO()
        image.save(file, "PNG")
        data = [{"b64_json": base64.b64encode(file.getvalue()).decode()}]
        return {"data": data, "samovar": {"seconds": seconds}}

    config = uvicorn.Config(app, port=0, log_level="warning")
    listener = config.bind_socket()
    print(f"ready at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def started(command: list[str], threads: int) -> Iterator[subprocess.Popen[str]]:
    # `samovar serve` sets the second by itself: the others get the same.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "10000"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL,
                             "text": True}  # fmt: skip
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.terminate()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return next(word for word in process.stdout.readline().split() if word.startswith("http"))


def asker(http: httpx.Client, steps: int) -> Callable[[], tuple[float, float]]:
    """A request by HTTP: its time here, and the pipeline's own."""
    body = {"prompt": PROMPT, "seed": 7, "num_inference_steps": steps}

    def ask() -> tuple[float, float]:
        begun = time.perf_counter()
        answer = http.post("/v1/images/generations", json=body)
        seconds = time.perf_counter() - begun
        answer.raise_for_status()
        return seconds, answer.json()["samovar"]["seconds"]

    return ask


def measure(options: argparse.Namespace) -> dict[str, Any]:
    me = [sys.executable, __file__, "--steps", str(options.steps), "--role"]
    ours = [sys.executable, "-m", "samovar", "serve", MODEL, "--port", "0", "--quiet", "--device", "cpu"]
    with ExitStack() as stack:
        bare, plain, samovar = (
            stack.enter_context(started(command, options.threads))
            for command in ([*me, "bare"], [*me, "plain"], ours)
        )  # fmt: skip
        assert bare.stdin is not None
        assert bare.stdout is not None
        bare.stdout.readline()
        https = [stack.enter_context(httpx.Client(base_url=address_of(p), timeout=600)) for p in (plain, samovar)]
        asks = dict(zip(("plain", "samovar"), [asker(http, options.steps) for http in https], strict=True))
        times: dict[str, list[tuple[float, float]]] = {"bare": [], "plain": [], "samovar": []}
        for number in range(options.rounds + 1):
            bare.stdin.write("\n")
            bare.stdin.flush()
            seconds = float(bare.stdout.readline())
            found = {"bare": (seconds, seconds)} | {name: ask() for name, ask in asks.items()}
            for name, pair in found.items():
                times[name] += [pair] if number else []  # The first round warms up.
        crowds: dict[str, list[Spell]] = {name: [] for name in asks}
        for number in range(options.spells):
            # The order changes too: what a busy machine does for a while is shared out.
            for name in sorted(asks, reverse=bool(number % 2)):
                crowds[name].append(crowd(asks[name], options.clients))
    return report(times, crowds)


class Spell(NamedTuple):
    """As many pictures as there are clients, asked for at once."""

    pictures: int
    seconds: float
    pipeline_seconds: float


def crowd(ask: Callable[[], tuple[float, float]], clients: int) -> Spell:
    begun = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        pairs = [future.result() for future in [pool.submit(ask) for _ in range(clients)]]
    return Spell(clients, time.perf_counter() - begun, sum(own for _, own in pairs))


def report(times: dict[str, list[tuple[float, float]]], crowds: dict[str, list[Spell]]) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for name, pairs in times.items():
        overheads = [whole - bare for (whole, _), (bare, _) in zip(pairs, times["bare"], strict=True)]
        around = [whole - own for whole, own in pairs]
        rows[name] = {
            "median_s": statistics.median(whole for whole, _ in pairs),
            "best_s": min(whole for whole, _ in pairs),
            "pipeline_median_s": statistics.median(own for _, own in pairs),
            "overhead_median_ms": 1e3 * statistics.median(overheads),
            "overhead_quartiles_ms": [1e3 * part for part in statistics.quantiles(overheads, n=4)[::2]],
            "around_median_ms": 1e3 * statistics.median(around),
            "around_best_ms": 1e3 * min(around),
        }
        if name in crowds:
            pictures, seconds, own = (sum(part) for part in zip(*crowds[name], strict=True))
            rows[name] |= {
                "pictures_per_second": pictures / seconds,
                "pictures_per_second_by_spell": [spell.pictures / spell.seconds for spell in crowds[name]],
                "between_pictures_ms": 1e3 * (seconds - own) / pictures,
            }
    allowed = 1e3 * (GOAL_S + GOAL_PART * rows["bare"]["median_s"])
    return {"rows": rows, "goal_ms": allowed, "is_reached": rows["samovar"]["overhead_median_ms"] <= allowed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="from 2 on")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--spells", type=int, default=5, help="in which all clients ask at once, from 1 on")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=("bare", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds must be from 2 on, not {options.rounds}: their median is judged")
    if options.spells < 1:
        parser.error(f"--spells must be from 1 on, not {options.spells}")
    if options.role is not None:
        {"bare": run_bare, "plain": run_plain}[options.role](options.steps)
        return 0
    result = measure(options)
    print(
        f"{'':10} {'request':>10} {'pipeline':>10} {'less the bare one':>26} {'around its own':>22} "
        f"{f'{options.clients} clients':>14} {'between':>10}"
    )
    for name, row in result["rows"].items():
        speed = gap = ""
        if "pictures_per_second" in row:
            speed, gap = f"{row['pictures_per_second']:.3f} a second", f"{row['between_pictures_ms']:.1f} ms"
        low, high = row["overhead_quartiles_ms"]
        overhead = f"{row['overhead_median_ms']:.1f} ({low:.1f} to {high:.1f}) ms"
        around = f"{row['around_median_ms']:.1f} (best {row['around_best_ms']:.1f}) ms"
        times = f"{row['median_s']:8.3f} s {row['pipeline_median_s']:8.3f} s"
        print(f"{name:10} {times} {overhead:>26} {around:>22} {speed:>14} {gap:>10}")
    print(f"goal: at most {result['goal_ms']:.1f} ms: {'reached' if result['is_reached'] else 'missed'}")
    if options.json:
        import torch

        facts = {"date": str(date.today()), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                 "torch": torch.__version__, "python": platform.python_version()}  # fmt: skip
        settings = {name: getattr(options, name) for name in ("steps", "rounds", "clients", "spells", "threads")}
        command = " ".join(["python", "benchmarks/server.py", *(f"--{k} {v}" for k, v in settings.items())])
        options.json.write_text(
            json.dumps({"command": command, **facts, "settings": settings, **result}, indent=2) + "\n"
        )
    return 0 if result["is_reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
