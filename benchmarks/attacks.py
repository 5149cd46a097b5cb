"""Latencies of other clients before and during attacks on a server, in one run.

    python benchmarks/attacks.py [--seconds 8] [--clients 8] [--only NAME] [--json FILE]

A real server with a tiny model that edits. Somebody asks for /live and for a small edit, over and over; then attackers
join, from a process of their own: bodies of a megabyte, chunks of a byte, pictures that take long to decode, unfinished
forms, idle connections. The goal is that the 99th percentile at most doubles.

Attackers and others share the machine's cores with the server. How much of it is that? In turn with the server another
one is asked, which nobody attacks: it answers at once, or after computing for as long as an edit does. And there are
two rows of clients who do nothing but ask for /live, with and without waiting for answers.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import json
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from reliability_bench import Bench, percentile

from server.attacks import FORM_TYPE, form, jpeg_of_scans, png_chunk, png_of

GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"
LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
SMALL = png_of(24, 16, zlib.compress(bytes(4 * 16)))
MIB = 2**20
SPAWN = multiprocessing.get_context("spawn")
Address = tuple[str, int]


def request(path: str, kind: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def chunked(body: bytes) -> bytes:
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % each for each in body)


def attacks() -> dict[str, tuple[bytes, bool]]:
    """What each attacker sends, and whether it waits for the answer."""
    long_name = json.dumps({"prompt": "x", "quality": "auto" * 250_000}).encode()
    brackets = b'{"prompt":[' + b"{}," * (MIB // 3 - 20) + b"0]}"
    return {
        "no attack: /live": (LIVE, True),
        "no attack: /live without waiting": (LIVE, False),
        "a megabyte in `quality`": (request(GENERATE, "application/json", long_name), True),
        "a megabyte of brackets": (request(GENERATE, "application/json", brackets), True),
        "chunks of one byte": (chunked(b"x" * 100_000), True),
        "60,000 scans": (request(EDIT, FORM_TYPE, form(jpeg_of_scans(2048, 2048, 60_000))), True),
        "two million chunks": (
            request(EDIT, FORM_TYPE, form(png_of(9, 9, before=png_chunk(b"teXt") * 2_000_000))),
            True,
        ),
        "unfinished forms": (request(EDIT, FORM_TYPE, form(bytes(28 * MIB))[:-20], 32 * MIB), False),
        "idle connections": (b"", False),
        "100 header lines": (b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 95 + b"Host: localhost\r\n\r\n", True),
    }


def attack(address: Address, content: bytes, waits: bool, stop: Any) -> int:
    """Send it again and again; returns how often."""
    count, kept, parent = 0, contextlib.ExitStack(), os.getppid()
    with kept:
        while not stop.is_set() and os.getppid() == parent:
            with contextlib.suppress(OSError):
                one = socket.create_connection(address, timeout=20)
                if not content and count < 400:
                    kept.enter_context(one)
                    count += 1
                    continue
                with one:
                    one.sendall(content)
                    count += 1
                    if waits:
                        one.recv(65536)
                    elif len(content) > MIB:
                        stop.wait(2.0)
            if not content:
                stop.wait(0.05)
    return count


def attackers(name: str, address: Address, clients: int, stop: Any, sent: Any) -> None:
    """The process of the attackers."""
    content, waits = attacks()[name]
    with ThreadPoolExecutor(clients) as pool:
        sent.put(None)
        sent.put(sum(pool.map(lambda _: attack(address, content, waits, stop), range(clients))))


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """A server that nobody attacks: it computes for as many milliseconds as the path says."""

    def do_GET(self) -> None:
        end = time.thread_time() + float(self.path[1:]) / 1e3
        while time.thread_time() < end:
            pass
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def elsewhere(port: Any) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        port.put(server.server_address[1])
        server.serve_forever()


def asking(address: Address, method: str, path: str, body: bytes = b"") -> Callable[[], int]:
    """By a connection of its own each time, as an attacker's would be."""

    def ask() -> int:
        one = http.client.HTTPConnection(*address, timeout=120)
        with contextlib.closing(one):
            one.request(method, path, body, {"Content-Type": FORM_TYPE} if body else {})
            answer = one.getresponse()
            answer.read()
            return answer.status

    return ask


def measure(asks: dict[str, Callable[[], int]], seconds: float) -> tuple[dict[str, list[float]], Counter[int]]:
    """Milliseconds of each, in turn, and how the first one was answered."""
    times: dict[str, list[float]] = {name: [] for name in asks}
    statuses, end, first = Counter[int](), time.monotonic() + seconds, next(iter(asks))
    while time.monotonic() < end:
        for name, ask in asks.items():
            begun = time.perf_counter()
            try:
                status = ask()
            except (OSError, http.client.HTTPException):
                status = 0
            times[name].append(1e3 * (time.perf_counter() - begun))
            statuses[status] += name == first
            time.sleep(0.005)
    return times, +statuses


@contextlib.contextmanager
def attacked(name: str, address: Address, clients: int, found: dict[str, Any]) -> Iterator[int]:
    """Inside, attackers are at work, in the process whose number it gives; afterwards their rate is known."""
    stop, sent = SPAWN.Event(), SPAWN.Queue()
    process = SPAWN.Process(target=attackers, args=(name, address, clients, stop, sent), daemon=True)
    process.start()
    sent.get()  # They have started.
    time.sleep(0.5)
    begun = time.monotonic()
    try:
        yield process.pid or 0
    finally:
        seconds = 0.5 + time.monotonic() - begun
        stop.set()
        found["attacks_per_s"] = sent.get() / seconds
        process.join()


def tree(pid: int) -> list[int]:
    """A process and its children."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def computed(*pids: int) -> float:
    """Seconds of computing of processes, in the kernel too."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # Replaced meanwhile; then it counts as its parent's.
            total += sum(psutil.Process(pid).cpu_times()[:4])
    return total


def computed_by(server: Any, attackers: int) -> dict[str, float]:
    """Seconds of computing of all who take part, and of others on this machine, if they are not nice."""
    machine = psutil.cpu_times()
    found = {
        "server": computed(*tree(server.process.pid)),
        "attackers": computed(attackers),
        "clients": computed(*{*tree(os.getpid())} - {*tree(server.process.pid), attackers}),
    }
    return {**found, "others": machine.user + machine.system + machine.softirq - sum(found.values())}


def run(server: Any, other: Address, seconds: float, clients: int, only: str) -> list[dict[str, Any]]:
    host, port = server.address.removeprefix("http://").split(":")
    address = (host, int(port))
    small = form(SMALL, {b"num_inference_steps": b"1", b"strength": b"1.0"})
    edit = asking(address, "POST", EDIT, small)
    before = computed(*tree(server.process.pid))
    count = len(measure({"edit": edit}, seconds)[0]["edit"])
    edit_ms = 1e3 * (computed(*tree(server.process.pid)) - before) / count
    asked = {
        "/live": {"/live": asking(address, "GET", "/live"), "elsewhere": asking(other, "GET", "/0")},
        "edit": {"edit": edit, "elsewhere": asking(other, "GET", f"/{edit_ms}")},
    }
    print(f"an edit computes for {edit_ms:.0f} ms", flush=True)
    rows = []
    for name in attacks():
        if only not in name:
            continue
        row: dict[str, Any] = {"attack": name}
        for what, asks in asked.items():
            found: dict[str, Any] = {}
            quiet, _ = measure(asks, seconds / 2)
            with attacked(name, address, clients, found) as process:
                earlier = computed_by(server, process)
                under, statuses = measure(asks, seconds)
                later = computed_by(server, process)
            found["cores"] = {who: (later[who] - earlier[who]) / seconds for who in later}
            for who, key in ((what, ""), ("elsewhere", "elsewhere_")):
                found[f"{key}quiet_ms"] = [percentile(quiet[who], part) for part in (0.5, 0.99)]
                found[f"{key}attacked_ms"] = [percentile(under[who], part) for part in (0.5, 0.99)]
            row[what] = {**found, "statuses": dict(statuses), "count": len(under[what])}
        rows.append(row)
        print(f"{name:33}", "   ".join(in_words(what, row[what]) for what in asked), flush=True)
    return rows


def in_words(what: str, found: dict[str, Any]) -> str:
    """The 99th percentiles, for people."""
    ours, others = (
        "{:.1f} -> {:.1f} ms".format(*(found[f"{key}{when}_ms"][1] for when in ("quiet", "attacked")))
        for key in ("", "elsewhere_")
    )
    cores = ", ".join(f"{who} {share:.2f}" for who, share in found["cores"].items())
    shares = f"{found['attacks_per_s']:.0f}/s; cores: {cores}"
    return f"{what} p99 {ours} (elsewhere {others}; {shares}) {found['statuses']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--only", default="", help="attacks whose names have this in them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ports = SPAWN.Queue()
    idle = SPAWN.Process(target=elsewhere, args=(ports,), daemon=True)
    idle.start()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), "cpu", 0.0)
        with bench.server("--quiet", model=bench.editor) as server:
            rows = run(server, ("127.0.0.1", ports.get()), options.seconds, options.clients, options.only)
    idle.terminate()
    if options.json:
        facts = {"date": str(date.today()), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                 "torch": version("torch"), "diffusers": version("diffusers"), "command": "benchmarks/attacks.py",
                 "seconds": options.seconds, "clients": options.clients}  # fmt: skip
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
