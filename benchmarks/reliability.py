"""Does it keep its promises when things go wrong? The 24 tests of reliability with their figures, as a table.

    python benchmarks/reliability.py [--only 1,5,20] [--soak-minutes 120] [--write docs/reliability.md]

Real servers in their own processes, a tiny model on the CPU, real signals and sockets. What is measured here is
measured from outside, by HTTP; what is a matter of right or wrong is left to the tests that are named. Run it on a
quiet machine: the figures are strict.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import httpx  # noqa: E402
import psutil  # noqa: E402

GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"
PROMPT, KEY, LONG = "a cat", "correct-horse", 50_000


@dataclass(frozen=True)
class Outcome:
    """What came of one test: whether it holds (None: not tried here), and the figures."""

    holds: bool | None
    figures: str


class Bench:
    """The model, and servers that run it."""

    def __init__(self, folder: Path, soak_minutes: float) -> None:
        from pipelines import tiny_flux_pipeline

        self.soak_minutes = soak_minutes
        self.folder, self.editor = folder / "tiny", folder / "editor"
        defaults = {"num_inference_steps": 3, "height": 16, "width": 24, "max_sequence_length": 8}
        pipe = tiny_flux_pipeline()
        from diffusers import FluxImg2ImgPipeline

        for place, made in ((self.folder, pipe), (self.editor, FluxImg2ImgPipeline(**pipe.components))):
            made.save_pretrained(place)
            (place / "samovar.json").write_text(json.dumps(defaults))

    @contextlib.contextmanager
    def server(self, *options: str, editor: bool = False, **more: Any) -> Iterator[Any]:
        from server.running import running

        with running(self.editor if editor else self.folder, "--max-steps", "100000", *options, **more) as started:
            yield started


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


def peak_bytes(server: Any) -> int:
    """The most that a server ever held: what it took for a moment is seen too."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0])


def percentile(times: list[float], part: float) -> float:
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]


@contextlib.contextmanager
def endless(server: Any, until_step: int = 1, **values: Any) -> Iterator[float]:
    """A stream that has come to some step, and is left; gives the time that a step takes."""
    body = {"prompt": PROMPT, "num_inference_steps": LONG, "stream": True, "progress": True, **values}
    with server.client() as http, http.stream("POST", GENERATE, json=body) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        steps = []
        for event in lines:
            if event["type"] == "samovar.progress":
                steps.append(event["seconds"])
                if event["step"] == until_step:
                    break
        yield statistics.median(steps)


# ------------------------------------------------------------------------------------------------ the tests


def kill_worker(bench: Bench) -> Outcome:
    """1: kill -9 the worker with four requests in flight."""
    begun = time.monotonic()
    with bench.server() as server, ThreadPoolExecutor(4) as pool, server.client() as http:
        loading = time.monotonic() - begun
        clean = post(http, seed=5, num_inference_steps=20).json()["data"]
        flying = [pool.submit(timed, lambda: post(http, num_inference_steps=3000)) for _ in range(4)]
        seconds_until(lambda: server.status()["queued"] == 3)
        killed = time.monotonic()
        server.workers()[0].kill()
        not_ready = seconds_until(lambda: not is_ready(server))
        seconds_until(lambda: any(one.done() for one in flying))
        failed = time.monotonic() - killed
        (first, _), *_ = (one.result() for one in flying if one.done())
        ready = seconds_until(lambda: is_ready(server))
        statuses = sorted(one.result()[0].status_code for one in flying)
        same = post(http, seed=5, num_inference_steps=20).json()["data"] == clean
    code = first.json()["error"]["code"] if first.status_code != 200 else "none"
    holds = failed < 2 and not_ready < 1 and ready < 10 + loading and same and code == "worker_restarted"
    figures = (
        f"503 {code} after {failed:.2f} s; /ready 503 after {not_ready:.2f} s; ready again after {ready:.1f} s (to "
    )
    rest = f"start and load takes {loading:.1f} s); the four: {statuses}; the next picture the same bits: {same}"
    return Outcome(holds, figures + rest)


def hang_worker(bench: Bench) -> Outcome:
    """3: SIGSTOP the worker."""
    with bench.server("--step-timeout", "3") as server, ThreadPoolExecutor(1) as pool, server.client() as http:
        stuck = pool.submit(timed, lambda: post(http, num_inference_steps=LONG))
        seconds_until(lambda: server.status()["running"] == 1)
        stopped = time.monotonic()
        server.workers()[0].send_signal(signal.SIGSTOP)
        answer, _ = stuck.result()
        took = time.monotonic() - stopped
        seconds_until(lambda: is_ready(server))
        after = post(http).status_code
    holds = took < 3 + 1 and answer.status_code == 504 and after == 200
    return Outcome(holds, f"{answer.status_code} after {took:.2f} s at a time-out of 3 s; the next request: {after}")


def kill_server(bench: Bench) -> Outcome:
    """4: kill -9 the server."""
    before = set(os.listdir("/dev/shm"))
    with bench.server() as server:
        workers = server.workers()
        server.process.kill()
        started = time.monotonic()
        _, alive = psutil.wait_procs(workers, timeout=10)
        took = time.monotonic() - started
        server.process.wait()
        seconds_until(lambda: not (set(os.listdir("/dev/shm")) - before), 5)
    left = len(set(os.listdir("/dev/shm")) - before)
    figures = f"{len(alive)} workers alive after {took:.2f} s; /dev/shm: {left}"
    return Outcome(not alive and took < 3 and not left, figures)


def disconnect(bench: Bench) -> Outcome:
    """5: the client goes away at step 5 of many."""
    with bench.server() as server:
        size = {"size": "256x256"}
        with endless(server, until_step=5, **size) as step:
            before = server.status()["steps_computed"]
        took = seconds_until(lambda: server.status()["running"] == 0)
        time.sleep(3 * step)
        extra = server.status()["steps_computed"] - before
    figures = (
        f"{extra} steps end after it, the one at work included; free after {took:.3f} s, a step takes {step:.3f} s"
    )
    return Outcome(extra <= 1 and took < step + 0.1, figures)


def flood(bench: Bench) -> Outcome:
    """8: 200 at once on a queue of 16."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(bench.server("--max-queue", "16"))
        http = stack.enter_context(server.client(limits=httpx.Limits(max_connections=300)))
        pool = stack.enter_context(ThreadPoolExecutor(200))
        list(pool.map(lambda _: http.get("/live"), range(200)))  # Connections are there.
        with endless(server):
            futures = [pool.submit(timed, lambda: post(http)) for _ in range(199)]
            seconds_until(lambda: sum(future.done() for future in futures) >= 183)
            status = server.status()
        answers = [future.result() for future in futures]
        # The server's own times: one client with 200 threads keeps itself waiting for longer than that.
        own = [int(match.group(1)) for match in re.finditer(r"generations 429 (\d+) ms", server.text)]
    refused = [seconds for answer, seconds in answers if answer.status_code == 429]
    most = max(own, default=float("inf"))
    hints = all("retry-after" in answer.headers for answer, _ in answers if answer.status_code == 429)
    served = sum(answer.status_code == 200 for answer, _ in answers)
    exact = (status["queued"], status["running"], served, len(refused)) == (16, 1, 16, 183)
    figures = f"1 + {served} served, {len(refused)} times 429, each with Retry-After: {hints}; by the "
    seen = f"server's own clock {most:.0f} ms at most; the one client, with 200 threads, sees "
    median = f"{1e3 * statistics.median(refused):.0f} ms (median; not judged)" if refused else "none"
    return Outcome(exact and hints and len(own) == 183 and most < 50, figures + seen + median)


def deadline(bench: Bench) -> Outcome:
    """9: a deadline of 5 s behind a slow request."""
    with bench.server() as server, server.client() as http, endless(server):
        answer, took = timed(lambda: post(http, deadline=5))
    code = answer.json()["error"]["code"]
    return Outcome(abs(took - 5) <= 0.5 and code == "queue_timeout", f"{answer.status_code} {code} after {took:.2f} s")


def sizes(bench: Bench) -> Outcome:
    """12: sizes out of bounds."""
    with bench.server() as server, server.client() as http:
        post(http, size="17x17")
        before = server.resident_bytes()
        tries = [(size, n) for size in ("1x1", "1023x1023", "99999x99999", "65537x16", "7680x4320") for n in (1, 10)]
        answers = [timed(lambda size=size, n=n: post(http, size=size, n=n)) for size, n in tries for _ in range(20)]
        grown = (server.resident_bytes() - before) / 2**20
    most = 1e3 * max(seconds for _, seconds in answers)
    bad = sum(answer.status_code != 400 for answer, _ in answers)
    figures = f"{len(answers)} times 400, {most:.1f} ms at most; RSS {grown:+.1f} MiB"
    return Outcome(not bad and most < 20 and grown < 1, figures)


def bodies(bench: Bench) -> Outcome:
    """13: bodies of 1 MB and 50 MB."""
    with bench.server() as server, server.client(headers={"Content-Type": "application/json"}) as http:
        http.post(GENERATE, content=json.dumps({"prompt": "x" * 40_000}).encode())  # What is loaded once is there.
        before = peak_bytes(server)
        one, one_s = timed(lambda: http.post(GENERATE, content=json.dumps({"prompt": "x" * 1_000_000}).encode()))
        fifty = bytes(50 * 2**20)
        large, large_s = timed(lambda: http.post(GENERATE, content=fifty))
        grown = (peak_bytes(server) - before) / 2**20
    holds = (one.status_code, large.status_code) == (400, 413) and max(one_s, large_s) < 0.2 and grown < 8
    figures = f"{one.status_code} in {1e3 * one_s:.0f} ms, {large.status_code} in {1e3 * large_s:.0f} ms"
    return Outcome(holds, f"{figures}; peak of the RSS {grown:+.1f} MiB")


def dawdlers(bench: Bench) -> Outcome:
    """14: a hundred sockets that send a little and stop."""
    with bench.server() as server, contextlib.ExitStack() as stack:
        host, port = server.address.removeprefix("http://").split(":")
        sockets = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(100)]
        started = time.monotonic()
        for index, one in enumerate(sockets):
            one.sendall([b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"][index % 3])
        http = stack.enter_context(server.client())
        times = []
        while time.monotonic() - started < 20:
            times.append(timed(lambda: http.get("/live"))[1])
            time.sleep(0.02)
        for one in sockets:
            one.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                while one.recv(4096):
                    pass
        took = time.monotonic() - started
    p99 = 1e3 * percentile(times, 0.99)
    return Outcome(p99 < 50 and 29 <= took < 33, f"/live p99 {p99:.1f} ms; the last one closed after {took:.1f} s")


def soak(bench: Bench) -> Outcome:
    """18: four clients for a long time, random sizes and steps, one in ten goes away."""
    if not bench.soak_minutes:
        return Outcome(None, "not run: --soak-minutes 120")
    statuses: dict[int, int] = {}
    times: list[tuple[float, float]] = []  # When a request ended, and how long it took.
    with bench.server("--cache-backend", "tea_cache", "--quiet") as server, ThreadPoolExecutor(4) as pool:
        end = time.monotonic() + 60 * bench.soak_minutes
        memory: list[float] = []

        def client(number: int) -> None:
            chance = random.Random(number)
            with server.client() as http:
                while time.monotonic() < end:
                    size = f"{8 * chance.randint(1, 8)}x{8 * chance.randint(1, 8)}"
                    values = {"size": size, "num_inference_steps": chance.randint(1, 50), "seed": chance.randint(0, 99)}
                    if chance.random() < 0.1:
                        with contextlib.suppress(httpx.ReadTimeout):
                            body = {"prompt": PROMPT, **values}
                            http.post(GENERATE, json=body, timeout=httpx.Timeout(60, read=chance.random() / 5))
                        continue
                    answer, seconds = timed(lambda: post(http, **values))  # noqa: B023
                    statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                    times.append((time.monotonic(), seconds))

        futures = [pool.submit(client, number) for number in range(4)]
        while time.monotonic() < end:
            processes = [psutil.Process(server.process.pid), *server.workers()]
            memory.append(sum(process.memory_info().rss for process in processes) / 2**20)
            time.sleep(1)
        for future in futures:
            future.result()
    warm = memory[len(memory) // 4 :]
    half = len(warm) // 2
    grown = statistics.median(warm[half:]) - statistics.median(warm[:half])
    slope = grown / (bench.soak_minutes * 0.375 / 60)
    good = all(status in (200, 429) for status in statuses)
    first, last = (percentile(part, 0.99) for part in halves(times))
    # A short run says little about an hour: it would only show what is grossly wrong.
    is_steady = slope < 1 and last < 1.25 * first
    figures = f"{statuses} in {bench.soak_minutes:g} min; RSS {grown:+.1f} MiB between the halves after warm-up "
    if bench.soak_minutes < 30:
        is_steady = grown < 8 and last < 2 * first
        figures = f"a short one: {figures}"
    drift = f"({slope:+.1f} an hour); p99 {1e3 * first:.0f} ms, then {1e3 * last:.0f} ms ({last / first - 1:+.0%})"
    return Outcome(good and is_steady, figures + drift)


def halves(times: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """How long requests took in the first half and in the second, after a quarter to warm up."""
    begun, ended = min(times)[0], max(times)[0]
    middle = begun + 0.625 * (ended - begun)
    warm = [(when, seconds) for when, seconds in times if when > begun + 0.25 * (ended - begun)]
    return [s for when, s in warm if when <= middle], [s for when, s in warm if when > middle]


def terminate(bench: Bench) -> Outcome:
    """20: SIGTERM with one running and five waiting; a second SIGTERM."""
    with bench.server("--shutdown-timeout", "30") as server, ThreadPoolExecutor(6) as pool, server.client() as http:
        first = pool.submit(timed, lambda: post(http, num_inference_steps=1000))
        seconds_until(lambda: server.status()["running"] == 1)
        others = [pool.submit(timed, lambda: post(http, num_inference_steps=1000)) for _ in range(5)]
        seconds_until(lambda: server.status()["queued"] == 5)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        statuses = [other.result()[0].status_code for other in others]
        refused = time.monotonic() - started
        running = first.result()[0].status_code
        code = server.process.wait(60)
        took = time.monotonic() - started
    with bench.server() as server, endless(server):
        server.process.send_signal(signal.SIGTERM)
        seconds_until(lambda: not is_ready(server))
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        second = server.process.wait(60)
        at_once = time.monotonic() - started
    is_orderly = (statuses, running, code) == ([503] * 5, 200, 0) and took < 31
    holds = is_orderly and second == 128 + signal.SIGTERM and at_once < 2
    figures = f"the running one {running}, the five 503 after {refused:.2f} s, exit {code} after {took:.1f} s; "
    return Outcome(holds, f"{figures}a second one: exit {second} after {at_once:.2f} s")


def keys(bench: Bench) -> Outcome:
    """23: ten thousand wrong keys."""
    with bench.server(environment={"SAMOVAR_API_KEY": KEY}) as server, server.client() as http:
        tries = [None, "Bearer", f"Basic {KEY}", *(f"Bearer {KEY}{number}" for number in range(10_000))]
        opened = 0
        for value in tries:
            headers = {} if value is None else {"Authorization": value}
            opened += http.get("/v1/models", headers=headers).status_code != 401
        in_query = http.get(f"/v1/models?api_key={KEY}").status_code
        right = http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code
        live, metrics = http.get("/live").status_code, http.get("/metrics").status_code
    logged = KEY in server.text or server.text.count("GET /v1/models 401") < len(tries)  # A line for each, without it.
    holds = (opened, in_query, right, live, metrics, logged) == (0, 401, 200, 200, 401, False)
    figures = f"{len(tries)} wrong ones, {opened} got in; in the query {in_query}, right {right}, /live {live}"
    return Outcome(holds, f"{figures}, /metrics {metrics}; key in the log: {logged}")


def bomb(bench: Bench) -> Outcome:
    """24: a PNG of 50,000 x 50,000 in 3 MB."""
    from server.test_uploads import png_of

    content = png_of(50_000, 50_000, b"\x78\x01" + bytes(3_000_000))
    with bench.server(editor=True) as server, server.client() as http:
        small = {"image": ("a.png", png_of(9, 9, b"no"), "image/png")}
        http.post(EDIT, data={"prompt": PROMPT}, files=small)
        before = server.resident_bytes()
        files = {"image": ("a.png", content, "image/png")}
        answer, took = timed(lambda: http.post(EDIT, data={"prompt": PROMPT}, files=files))
        grown = (server.resident_bytes() - before) / 2**20
    code = answer.json()["error"]["code"]
    holds = answer.status_code == 400 and code == "image_above_limit" and grown < 10
    return Outcome(holds, f"{answer.status_code} {code} in {1e3 * took:.0f} ms; RSS {grown:+.1f} MiB")


def by_tests(*names: str) -> Callable[[Bench], Outcome]:
    """What is right or wrong, and has no figure: tests, by their names."""

    def run(bench: Bench) -> Outcome:
        files = sorted({name.partition("::")[0] for name in names})
        wanted = " or ".join(name.partition("::")[2] for name in names)
        command = [sys.executable, "-m", "pytest", *files, "-q", "--no-header", "-m", "not gpu", "-k", wanted]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        last = (result.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
        # Tests that were renamed, or that skip themselves here, have shown nothing.
        is_seen = re.search(r"\b[1-9]\d* passed", last) is not None and "skipped" not in last
        return Outcome(result.returncode == 0 and is_seen, f"{last} ({', '.join(files)})")

    return run


def on_a_gpu(bench: Bench) -> Outcome:
    return Outcome(None, "needs a GPU")


TESTS: dict[int, tuple[str, Callable[[Bench], Outcome]]] = {
    1: ("`kill -9` the worker mid-step, four requests in flight", kill_worker),
    2: ("20 kills in a row; the circuit opens after 5 in 60 s", by_tests(
        "tests/engine/test_supervisor.py::test_twenty_kills",
        "tests/engine/test_supervisor.py::test_the_circuit_opens")),
    3: ("SIGSTOP the worker", hang_worker),
    4: ("`kill -9` the server", kill_server),
    5: ("the client goes away mid-request", disconnect),
    6: ("500 requests taken back at random steps", by_tests("tests/engine/test_supervisor.py::test_five_hundred")),
    7: ("out of GPU memory, then not", on_a_gpu),
    8: ("200 at once on a queue of 16", flood),
    9: ("a deadline of 5 s behind a slow request", deadline),
    10: ("schemathesis, good and bad requests, 200 an operation", by_tests(
        "tests/server/test_app.py::test_schemathesis")),
    11: ("malformed bodies, over 150", by_tests("tests/server/test_app.py::test_malformed")),
    12: ("sizes out of bounds", sizes),
    13: ("bodies of 1 MB and 50 MB", bodies),
    14: ("100 slow or half-open sockets", dawdlers),
    15: ("NaN in the latents", by_tests("tests/engine/test_worker.py::test_latents_that_are_no_numbers")),
    16: ("pickled weights, and code that comes with a model", by_tests(
        "tests/engine/test_models.py::test_pickled", "tests/engine/test_models.py::test_code_that_comes")),
    17: ("paths and URLs of clients", by_tests(
        "tests/server/test_app.py::test_no_path", "tests/server/test_house.py::test_only_the_model",
        "tests/server/test_images.py::test_bad_forms")),
    18: ("soak: four clients, random requests, 10 % aborted", soak),
    19: ("requests do not touch each other", by_tests("tests/engine/test_supervisor.py::test_requests_do_not_touch")),
    20: ("SIGTERM with one running and five waiting, and a second one", terminate),
    21: ("a bad prompt in a list", by_tests("tests/test_omni.py::test_a_bad_prompt_of_a_list")),
    22: ("one of several ranks dies", by_tests("tests/engine/test_ranked.py::test_a_rank_that_dies")),
    23: ("keys: none, wrong, in the query, 10,000 tries", keys),
    24: ("a decompression bomb in an edit", bomb),
}  # fmt: skip


def table(outcomes: dict[int, Outcome]) -> str:
    words = {True: "holds", False: "**does not hold**", None: "not tried"}
    rows = [f"| {n} | {TESTS[n][0]} | {words[one.holds]} | {one.figures} |" for n, one in outcomes.items()]
    return "\n".join(["| # | test | | figures |", "|---|---|---|---|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of tests, such as 1,5,20")
    parser.add_argument("--soak-minutes", type=float, default=2.0, help="0 leaves it out (2)")
    parser.add_argument("--write", type=Path, help="a page for the result, such as docs/reliability.md")
    options = parser.parse_args()
    chosen = sorted(TESTS) if options.only is None else [int(number) for number in options.only.split(",")]
    outcomes: dict[int, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.soak_minutes)
        for number in chosen:
            outcomes[number] = TESTS[number][1](bench)
            print(table({number: outcomes[number]}).splitlines()[-1], flush=True)
    if options.write is not None:
        about = f"{date.today()}, {platform.machine()} with {os.cpu_count()} cores, Python {platform.python_version()}"
        head = "# Reliability\n\nWhat happens when things go wrong, on real servers with a tiny model on the CPU: " \
            f"`make reliability`.\n\n{about}.\n\n"  # fmt: skip
        options.write.write_text(head + table(outcomes) + "\n", encoding="utf-8")
    return 1 if any(one.holds is False for one in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
