"""Memory that comes back: after clients that go away, after a GPU that was full, and over a long time."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from reliability_bench import (
    GENERATE,
    MIB,
    PROMPT,
    ROOT,
    Bench,
    Memory,
    Outcome,
    left_at,
    percentile,
    post,
    resident_mib,
    seconds_until,
    timed,
)

# ------------------------------------------------------------------------------------------------ 6: clients that go


def disconnects(bench: Bench) -> Outcome:
    """6: five hundred clients that go away at random steps."""
    with bench.server("--quiet") as server, server.client() as http:
        chance = random.Random(6)

        def leave(count: int) -> Memory:
            for _ in range(count):
                with left_at(http, chance.randint(1, 20), num_inference_steps=200):
                    pass
            post(http, seed=1).raise_for_status()  # It waits for the last one: nothing runs any more.
            return bench.memory(server)

        warm = leave(100)
        started = time.monotonic()
        grown = leave(500) - warm
        took = time.monotonic() - started
        status = server.status()
    made = status["images"] - 2  # All but one for each `leave`.
    figures = (
        f"by HTTP, in {took:.0f} s after 100 to warm up: {made} made in spite of it, {status['restarts']} workers "
    )
    figures += f"lost; RSS of server and worker {grown.resident:+.1f} MiB"
    holds = made == status["restarts"] == 0 and grown.resident * MIB < 20e6
    if bench.device == "cuda":
        holds = holds and grown.held == 0 and grown.device == 0
        figures += f"; GPU memory {grown.held * MIB:+.0f} bytes by torch in the worker, "
        figures += f"{grown.device:+.0f} MiB by the driver"
    return Outcome(holds, figures)


# ------------------------------------------------------------------------------------------------ 7: a full GPU

HOG, HOGGED = ROOT / "benchmarks" / "reliability_hog.py", 0.95
LARGE, SMALL = (3072, 2048), "64x64"
NEED_MIB = 3 * 256 * 2 * LARGE[0] * LARGE[1] / MIB
"""At its widest, the VAE holds three tensors of 256 channels in bfloat16 at the size of the picture."""
BACK_MIB = 64


@contextlib.contextmanager
def hog(to_leave: float) -> Iterator[tuple[float, float]]:
    """Another process that takes the GPU but for some MiB; gives what it took and what is left, in MiB."""
    command = [sys.executable, str(HOG), str(int(to_leave * MIB))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if len(words) != 2:
                raise RuntimeError(f"The hog ended with exit code {process.wait()} instead of saying what it took.")
            yield int(words[0]) / MIB, int(words[1]) / MIB
        finally:
            process.kill()


def out_of_memory(bench: Bench) -> Outcome:
    """7: another process takes the GPU, and goes."""
    if bench.device == "cpu":
        why = "on a CPU the system ends a process that takes too much, which is test 1; see the GPU's table"
        return Outcome(None, why)
    total = _total_mib()
    to_leave = min((1 - HOGGED) * total, 0.8 * NEED_MIB)
    rounds, grown = [], []
    options = ("--max-pixels", str(LARGE[0] * LARGE[1]), "--quiet")
    with bench.server(*options, model=bench.heavy) as server, server.client() as http:
        (worker,) = server.workers()
        post(http, size=SMALL).raise_for_status()
        baseline = bench.device_mib()
        for _ in range(2):  # What only a first failure leaves, such as kernels that it loads, is told from a leak.
            with hog(to_leave) as (taken, left):
                full = bench.device_mib() / total
                rounds.append((*_told(_ask_for_large(http)), post(http, size=SMALL).status_code))
            grown.append(_settled_mib(bench, baseline))
        again = _ask_for_large(http).status_code
        need = bench.device_mib() - baseline
        is_same = [process.pid for process in server.workers()] == [worker.pid]
    after = _settled_mib(bench, bench.idle_mib)
    is_told = all(one[0] in (503, 507) and one[1:] == ("out_of_memory", True, 200) for one in rounds)
    holds = is_told and all(abs(one) <= BACK_MIB for one in grown) and again == 200 and is_same
    size = f"{LARGE[0]}x{LARGE[1]}"
    figures = (
        f"{size} through a VAE of FLUX.1's shape; another process takes {taken / 1024:.1f} GiB: the GPU is {full:.1%} "
        f"full, {left / 1024:.1f} GiB are left; twice: "
        f"{' and '.join(f'{one[0]} {one[1]} (names the size: {one[2]}), then {SMALL} {one[3]}' for one in rounds)}; it "
        f"goes: GPU memory {' and '.join(f'{one:+.0f}' for one in grown)} MiB (asked: within {BACK_MIB}), {size} gives "
        f"{again} and takes {need / 1024:.1f} GiB; the same worker: {is_same}; after the server's end {after:+.0f} MiB"
    )
    return Outcome(holds, figures)


def _ask_for_large(http: httpx.Client) -> httpx.Response:
    return post(http, size=f"{LARGE[0]}x{LARGE[1]}", output_format="jpeg")


def _told(answer: httpx.Response) -> tuple[int, str, bool]:
    """The status, the code, and whether the message names the size."""
    if answer.status_code == 200:
        return 200, "no error", False
    error = answer.json()["error"]
    return answer.status_code, error["code"], f"{LARGE[0]} x {LARGE[1]}" in error["message"]


def _settled_mib(bench: Bench, baseline: float) -> float:
    """By how much the GPU's memory is above some state, when the driver has cleaned up after a process that ended."""
    seconds_until(lambda: bench.device_mib() - baseline <= BACK_MIB, 10)
    return bench.device_mib() - baseline


def _total_mib() -> float:
    import torch

    return torch.cuda.mem_get_info()[1] / MIB


# ------------------------------------------------------------------------------------------------ 18: a long time

SPEC_MINUTES, SPEC_MIB_PER_HOUR, SPEC_DRIFT = 120, 1.0, 0.05
VISIBLE_MIB, LONG_HALF_S = 4.0, 1800.0
"""Medians of a few samples of the RSS differ by about this; over halves of half an hour and more, none is allowed."""
CONTROL_MINUTES, LEAK_KIB = 0.5, 256
LEAK = f"""
import samovar.engine.worker as worker

run, kept = worker.Worker.run, []


def leaking(self, *args, **kwargs):
    import torch

    kept.append(torch.ones({LEAK_KIB * 256}, device=self.device))
    return run(self, *args, **kwargs)


worker.Worker.run = leaking
"""
"""What Python runs when it starts, if it is found: nothing in the server knows of it."""


@dataclass
class Phase:
    """A part of a soak. Every part asks for the same pictures in the same order, as far as it comes."""

    seconds: float
    statuses: Counter[int] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)
    """How long each request took that was not taken back."""
    num_left: int = 0
    num_films: int = 0
    resident: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    rest: Memory = field(default_factory=lambda: Memory(0, 0, 0))
    """After it, when nothing runs."""


@dataclass(frozen=True)
class Finding:
    """One figure of a soak."""

    name: str
    holds: bool
    measured: str
    asked: str

    def __str__(self) -> str:
        return f"{self.measured} (asked: {self.asked})"


def soak(bench: Bench) -> Outcome:
    """18: four clients for a long time, with replicas, batches and adapters, random requests, one in ten goes away; one
    of videos beside them; and a server that leaks is caught."""
    minutes = bench.soak_minutes
    if not minutes:
        return Outcome(None, f"left out by --soak-minutes 0; it is meant to take {SPEC_MINUTES}")
    first, second = _phases(bench, minutes)
    findings = _judge(first, second, bench.device)
    missed = {finding.name for finding in findings if not finding.holds}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(LEAK)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        control = _judge(*_phases(bench, CONTROL_MINUTES, {"PYTHONPATH": path}), bench.device)
    (leaked,) = (finding for finding in control if finding.name == ("RSS" if bench.device == "cpu" else "GPU memory"))
    caught = "not caught" if leaked.holds else "caught"
    figures = [f"{minutes:g} min", *map(str, findings)]
    control_is = f"control: a worker that keeps {LEAK_KIB} KiB a request is {caught} in {CONTROL_MINUTES:g} min"
    figures.append(f"{control_is} ({leaked.measured})")
    how = f"for {minutes:g} of {SPEC_MINUTES} min" if minutes < SPEC_MINUTES else ""
    if first.seconds < LONG_HALF_S:
        how += ", too short to show the RSS an hour"
    if missed == {"p99"}:
        how = f"{how}, but for the p99".strip(", ")
    return Outcome(missed <= {"p99"} and not leaked.holds, "; ".join(figures), how)


@contextlib.contextmanager
def _servers(bench: Bench, environment: dict[str, str] | None = None) -> Iterator[tuple[Any, Any]]:
    """One of images, with replicas, batches, a cache and adapters; and one of videos."""
    replicas = ("--devices", "0,0") if bench.device == "cuda" else ("--replicas", "2")
    options = ("--cache", "auto", "--max-batch", "4", *replicas, *bench.adapters, "--quiet")
    with bench.server(*options, environment=environment) as images, bench.videos() as videos:
        yield images, videos


def _phases(bench: Bench, minutes: float, environment: dict[str, str] | None = None) -> tuple[Phase, Phase]:
    """A quarter to warm up, which is not looked at, and two halves of the rest."""
    with _servers(bench, environment) as servers:
        _run(bench, servers, Phase(60 * minutes / 4))
        return _run(bench, servers, Phase(60 * minutes * 3 / 8)), _run(bench, servers, Phase(60 * minutes * 3 / 8))


def _run(bench: Bench, servers: tuple[Any, Any], phase: Phase) -> Phase:
    end = time.monotonic() + phase.seconds
    images, videos = servers
    with ThreadPoolExecutor(5) as pool, images.client() as http:
        clients = [pool.submit(_client, images, number, end, phase) for number in range(4)]
        clients.append(pool.submit(_film_client, videos, end, phase))
        while time.monotonic() < end:
            phase.resident.append(resident_mib(images) + resident_mib(videos))
            phase.device.append(bench.device_mib())
            time.sleep(0.5)
        for client in clients:
            client.result()
        post(http, size="64x64", seed=1).raise_for_status()
        phase.rest = bench.memory(images)
    return phase


def _client(server: Any, number: int, end: float, phase: Phase) -> None:
    """Ask until the end."""
    chance = random.Random(number)
    with server.client() as http:
        while time.monotonic() < end:
            side = 16 * chance.randint(1, 4)
            values: dict[str, Any] = {
                "size": f"{side}x{side}",
                "num_inference_steps": chance.randint(1, 50),
                "seed": chance.randint(0, 99),
                "cache": chance.random() < 0.75,
                "n": chance.choice([1, 1, 1, 2]),
            }
            if values["cache"]:
                values["quality"] = chance.choice(["auto", "high", "low"])
            if chance.random() < 0.4:
                values["lora"] = {"name": chance.choice(["pixel", "ink"]), "scale": chance.choice([0.5, 1.0])}
            patience, leaves = chance.random() / 5, chance.random() < 0.1
            if leaves:
                phase.num_left += 1
                with contextlib.suppress(httpx.ReadTimeout):
                    body = {"prompt": PROMPT, **values}
                    http.post(GENERATE, json=body, timeout=httpx.Timeout(60, read=patience))
                continue
            answer, seconds = timed(lambda: post(http, **values))  # noqa: B023
            phase.statuses[answer.status_code] += 1
            phase.times.append(seconds)


def _film_client(server: Any, end: float, phase: Phase) -> None:
    """Make a video, fetch it, delete it, until the end."""
    with server.client() as http:
        while time.monotonic() < end:
            answer = http.post("/v1/videos", json={"prompt": PROMPT})
            phase.statuses[answer.status_code] += 1
            if answer.status_code >= 400:
                continue
            place = f"/v1/videos/{answer.json()['id']}"
            while (state := http.get(place).json()["status"]) in ("queued", "in_progress"):
                time.sleep(0.05)
            phase.statuses[http.get(f"{place}/content").status_code if state == "completed" else 500] += 1
            phase.num_films += state == "completed"
            http.delete(place)


def _judge(first: Phase, second: Phase, device: str) -> list[Finding]:
    """What the two halves say, each figure beside what is asked of it."""
    statuses = first.statuses + second.statuses
    answers = ", ".join(f"{count} times {status}" for status, count in sorted(statuses.items()))
    answers += f", {first.num_left + second.num_left} taken back, {first.num_films + second.num_films} videos"
    findings = [
        Finding("answers", set(statuses) <= {200, 429} and second.num_films > 0, answers, "no 5xx"),
        _judge_resident(first, second),
    ]
    if device == "cuda":
        peak, rest = max(second.device) - max(first.device), (second.rest - first.rest).held * MIB
        measured = f"GPU memory: peak by the driver {max(first.device):.0f} MiB, {peak:+.0f} in the second half; "
        measured += f"at rest {rest:+.0f} bytes by torch in the worker"
        findings.append(Finding("GPU memory", peak <= 0 and rest <= 0, measured, "constant"))
    p50, p99 = (percentile(second.times, part) / percentile(first.times, part) - 1 for part in (0.5, 0.99))
    was, now = (1e3 * percentile(phase.times, 0.99) for phase in (first, second))
    measured = f"p99 {was:.0f} ms, then {now:.0f} ms: {p99:+.1%}, p50 {p50:+.1%}"
    return [*findings, Finding("p99", p99 < SPEC_DRIFT, measured, f"p99 under {SPEC_DRIFT:+.0%}")]


def _judge_resident(first: Phase, second: Phase) -> Finding:
    grown = statistics.median(second.resident) - statistics.median(first.resident)
    hours = (first.seconds + second.seconds) / 2 / 3600
    asked = f"under {SPEC_MIB_PER_HOUR:g} MiB an hour"
    if second.seconds >= LONG_HALF_S:
        return Finding("RSS", grown / hours < SPEC_MIB_PER_HOUR, f"RSS {grown / hours:+.2f} MiB an hour", asked)
    measured, asked = (
        f"RSS {grown:+.1f} MiB from half to half",
        f"{asked}; so short a run is held to {VISIBLE_MIB:g} MiB",
    )
    return Finding("RSS", grown < VISIBLE_MIB, measured, asked)
