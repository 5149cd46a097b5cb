"""A real server in its own process on a free port, as a user would start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

PATIENCE_S = 600.0
"""Nothing here takes long on an idle machine; on a busy one it may."""
PROMPT = "a cat"


class RunningServer:
    """A process, its address, and what it wrote."""

    def __init__(
        self, model: str | Path, *options: str, device: str = "cpu", environment: dict[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", "samovar", "serve", str(model), "--port", "0", "--device", device, *options]
        self.log: list[str] = []
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        self.address = ""
        self._listening, self._ready = threading.Event(), threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if (found := re.search(r"http://[\w.:-]+", line)) and not self.address:
                self.address = found[0]
                self._listening.set()
            if line.startswith("samovar serves") or '"message": "ready"' in line:
                self._ready.set()
        self._listening.set()
        self._ready.set()

    def wait_listening(self) -> RunningServer:
        assert self._listening.wait(PATIENCE_S), self.text
        assert self.address, self.text
        return self

    def wait_ready(self) -> RunningServer:
        assert self._ready.wait(PATIENCE_S), self.text
        assert self.process.poll() is None, self.text
        return self

    @property
    def text(self) -> str:
        return "".join(self.log)

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=PATIENCE_S, **settings)

    def status(self, **headers: str) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(
            f"{self.address}/v1/samovar/status", headers=headers, timeout=PATIENCE_S
        ).json()
        return found

    def workers(self) -> list[psutil.Process]:
        """The processes that hold a model."""
        found = [psutil.Process(number) for number in self.status()["worker_ids"]]
        return found + [child for worker in found for child in worker.children(recursive=True)]

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(PATIENCE_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        self._reader.join(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


@contextmanager
def running(model: str | Path, *options: str, **more: Any) -> Iterator[RunningServer]:
    """A server that is ready, and ends with the block."""
    server = RunningServer(model, *options, **more)
    try:
        yield server.wait_ready()
    finally:
        server.end(signal.SIGKILL)


def until(condition: Any, what: str, seconds: float = PATIENCE_S) -> None:
    """Wait for something that another process does."""
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)
