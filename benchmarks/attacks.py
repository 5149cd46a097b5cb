"""How long do others wait while a server is attacked? Their latencies before and during each attack, in one run.

    python benchmarks/attacks.py [--seconds 8] [--clients 8] [--json FILE]

A real server with a tiny model that edits. Somebody asks for /live and for a small edit, over and over; then attackers
join: bodies of a megabyte, chunks of a byte, pictures that take long to decode, unfinished forms, idle connections. The
goal is that the 99th percentile at most doubles. Attackers and others share the machine's cores with the server, which
is counted against it: the control, where as many clients ask for /live as fast as they can, shows how much that is.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from reliability_bench import Bench, percentile

from server.attacks import FORM_TYPE, form, jpeg_of_scans, png_chunk, png_of

GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"
SMALL = png_of(24, 16, zlib.compress(bytes(4 * 16)))
MIB = 2**20


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
        "control: /live": (b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n", True),
        "a megabyte in `quality`": (request(GENERATE, "application/json", long_name), True),
        "a megabyte of brackets": (request(GENERATE, "application/json", brackets), True),
        "chunks of one byte": (chunked(b"x" * 100_000), False),
        "60,000 scans": (request(EDIT, FORM_TYPE, form(jpeg_of_scans(2048, 2048, 60_000))), True),
        "two million chunks": (
            request(EDIT, FORM_TYPE, form(png_of(9, 9, before=png_chunk(b"teXt") * 2_000_000))),
            True,
        ),
        "unfinished forms": (request(EDIT, FORM_TYPE, form(bytes(28 * MIB))[:-20], 32 * MIB), False),
        "idle connections": (b"", False),
        "100 header lines": (b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 95 + b"Host: localhost\r\n\r\n", True),
    }


def attack(address: tuple[str, int], content: bytes, waits: bool, stop: threading.Event) -> int:
    """Send it again and again; returns how often."""
    count, kept = 0, contextlib.ExitStack()
    with kept:
        while not stop.is_set():
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


def measure(ask: Callable[[], int], seconds: float, statuses: Counter[int]) -> list[float]:
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        try:
            statuses[ask()] += 1
        except (OSError, http.client.HTTPException):
            statuses[0] += 1
        times.append(1e3 * (time.perf_counter() - begun))
        time.sleep(0.01)
    return times


def run(server: Any, seconds: float, clients: int) -> list[dict[str, Any]]:
    host, port = server.address.removeprefix("http://").split(":")
    small = form(SMALL, {b"num_inference_steps": b"1", b"strength": b"1.0"})

    def ask_for(method: str, path: str, body: bytes = b"") -> Callable[[], int]:
        """By a connection of its own each time, as an attacker's would be."""

        def ask() -> int:
            one = http.client.HTTPConnection(host, int(port), timeout=120)
            with contextlib.closing(one):
                one.request(method, path, body, {"Content-Type": FORM_TYPE} if body else {})
                answer = one.getresponse()
                answer.read()
                return answer.status

        return ask

    asks = {"/live": ask_for("GET", "/live"), "edit": ask_for("POST", EDIT, small)}
    rows = []
    for name, (content, waits) in attacks().items():
        row: dict[str, Any] = {"attack": name}
        for what, ask in asks.items():
            stop, statuses = threading.Event(), Counter[int]()
            quiet = measure(ask, seconds / 2, Counter())
            with ThreadPoolExecutor(clients) as pool:
                sent = [pool.submit(attack, (host, int(port)), content, waits, stop) for _ in range(clients)]
                time.sleep(0.5)
                try:
                    under = measure(ask, seconds, statuses)
                finally:
                    stop.set()
            row[what] = {"quiet_ms": [percentile(quiet, p) for p in (0.5, 0.99)],
                         "attacked_ms": [percentile(under, p) for p in (0.5, 0.99)],
                         "statuses": dict(statuses),
                         "attacks_per_s": sum(each.result() for each in sent) / seconds}  # fmt: skip
        rows.append(row)
        told = "   ".join(
            "{} p50 {:6.1f} -> {:6.1f}, p99 {:6.1f} -> {:6.1f} ms {}".format(
                what, *(row[what][when][part] for part in (0, 1) for when in ("quiet_ms", "attacked_ms")),
                row[what]["statuses"],
            ) for what in asks
        )  # fmt: skip
        print(f"{name:26} {told}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), "cpu", 0.0)
        with bench.server("--quiet", model=bench.editor) as server:
            rows = run(server, options.seconds, options.clients)
    if options.json:
        facts = {"date": str(date.today()), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                 "seconds": options.seconds, "clients": options.clients}  # fmt: skip
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
