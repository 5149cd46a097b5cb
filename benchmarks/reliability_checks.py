"""What happens when a process dies, hangs or is flooded, and when a client asks for what it must not have."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
from reliability_bench import (
    GENERATE,
    LONG,
    PROMPT,
    Bench,
    Outcome,
    endless,
    is_ready,
    peak_bytes,
    percentile,
    post,
    seconds_until,
    timed,
)

EDIT, KEY = "/v1/images/edits", "correct-horse"


def kill_worker(bench: Bench) -> Outcome:
    """1: kill -9 the worker with four requests in flight."""
    begun = time.monotonic()
    with bench.server() as server, ThreadPoolExecutor(4) as pool, server.client() as http:
        loading = time.monotonic() - begun
        clean = post(http, seed=5, num_inference_steps=20).json()["data"]
        before = bench.device_mib()
        flying = [pool.submit(timed, lambda: post(http, num_inference_steps=1000)) for _ in range(4)]
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
        seconds_until(lambda: bench.device_mib() <= before, 5)  # The driver may still clean up.
        grown = bench.device_mib() - before
    code = first.json()["error"]["code"] if first.status_code != 200 else "none"
    holds = failed < 2 and not_ready < 1 and ready < 10 + loading and same and code == "worker_restarted"
    figures = (
        f"503 {code} after {failed:.2f} s; /ready 503 after {not_ready:.2f} s; ready again after {ready:.1f} s (to "
    )
    rest = f"start and load takes {loading:.1f} s); the four: {statuses}; the next picture the same bits: {same}"
    device = f"; GPU memory {grown:+.0f} MiB" if bench.device == "cuda" else ""
    return Outcome(holds, figures + rest + device)


def kill_in_batch(bench: Bench) -> Outcome:
    """26: kill -9 one of two workers, which has a batch of three, while others wait."""
    replicas = ("--devices", "0,0") if bench.device == "cuda" else ("--replicas", "2")
    options = ("--max-batch", "3", "--cache", "auto", "--max-queue", "32", *replicas, *bench.adapters)
    values = {"lora": "pixel", "num_inference_steps": 400, "cache": False}
    with bench.server(*options) as server, ThreadPoolExecutor(12) as pool, server.client() as http:
        flying = [pool.submit(post, http, seed=seed % 3, **values) for seed in range(12)]
        seconds_until(lambda: any(each["running"] == 3 for each in server.status()["replicas"]))
        victim = next(each for each in server.status()["replicas"] if each["running"] == 3)
        psutil.Process(victim["worker_ids"][0]).kill()
        answers = [one.result() for one in flying]
        seconds_until(lambda: all(each["is_ready"] for each in server.status()["replicas"]))
        again = post(http, seed=0, **values).status_code
    lost = [answer for answer in answers if answer.status_code != 200]
    codes = {answer.json()["error"]["code"] for answer in lost}
    made = sum(answer.status_code == 200 for answer in answers)
    holds = len(lost) <= 3 and codes == {"worker_restarted"} and made == 12 - len(lost) and again == 200
    figures = f"of 12 requests on two workers {len(lost)} got {', '.join(sorted(codes))}, {made} were served"
    return Outcome(holds, f"{figures}; the next one: {again}")


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
    holds = is_orderly and second == -signal.SIGTERM and at_once < 2  # A second one is left to the system.
    figures = f"the running one {running}, the five 503 after {refused:.2f} s, exit {code} after {took:.1f} s; "
    return Outcome(holds, f"{figures}a second one: ended by signal {-second} after {at_once:.2f} s")


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
    from server.attacks import png_of

    content = png_of(50_000, 50_000, b"\x78\x01" + bytes(3_000_000))
    with bench.server(model=bench.editor) as server, server.client() as http:
        small = {"image": ("a.png", png_of(9, 9, b"no"), "image/png")}
        http.post(EDIT, data={"prompt": PROMPT}, files=small)
        before = server.resident_bytes()
        files = {"image": ("a.png", content, "image/png")}
        answer, took = timed(lambda: http.post(EDIT, data={"prompt": PROMPT}, files=files))
        grown = (server.resident_bytes() - before) / 2**20
    code = answer.json()["error"]["code"]
    holds = answer.status_code == 400 and code == "image_above_limit" and grown < 10
    return Outcome(holds, f"{answer.status_code} {code} in {1e3 * took:.0f} ms; RSS {grown:+.1f} MiB")
