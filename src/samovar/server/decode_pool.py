"""Reads long bodies and images in processes of their own, each of which reads one and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import PIL.Image
from PIL.Image import Image

from . import decode_worker
from .decode_worker import JSON, Refused, Task
from .errors import ApiError, refusal
from .settings import Limits

_COUNT = 2
"""Bodies that are read at once. Others wait, in the order in which they came."""
_LARGE, _LARGE_OBJECT = 2**21, 2**17
"""Bytes of a form that can make it take seconds, and of JSON that no ordinary prompt has."""
_LONG_OBJECT = 2**15
"""Bytes of JSON that take two milliseconds to parse, whatever they are."""
_WALL_S = 30.0
"""The limit is on computing; a process that waits for the processor for this long has other troubles."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
Found = tuple[dict[str, Any], dict[str, list[Image]]]
"""The values of a body, and its images by name."""
Process = subprocess.Popen[bytes]


class DecodePool:
    """One process is kept ready; large bodies have one place of two, for they may take long."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._free, self._free_for_large = asyncio.Semaphore(_COUNT), asyncio.Semaphore(1)
        # Its own threads: no body can hold up the encoding of other clients' images.
        self._threads = ThreadPoolExecutor(_COUNT, "samovar decoding")
        self._spare: Process | None = None
        self._busy: set[Process] = set()
        self._is_closed = False
        self.num_waiting = 0

    def warm(self) -> None:
        """Start a process before it is needed."""
        if self._spare is not None and self._spare.poll() is not None:  # Somebody ended it.
            self._spare.communicate()
            self._spare = None
        if self._spare is None and not self._is_closed:
            limits = self._limits
            # A body in three copies; pixels as coefficients, in their own mode and in ours, with room between.
            memory = 3 * limits.max_upload_bytes + 32 * limits.max_pixels + 2**26
            # -P: the files beside that one are not modules.
            command = [sys.executable, "-P", str(Path(decode_worker.__file__)), str(memory)]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            self._spare = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null)

    async def read(self, content_type: str, parts: list[bytes], names: tuple[str, ...] = ()) -> Found:
        """What a body holds, whose files may have these names; its parts are released. Short JSON is read at once: a
        long one would stop everybody else. Cancelling the caller ends the reading too."""
        size = sum(map(len, parts))
        if content_type == JSON and size <= _LONG_OBJECT and b"data:" not in (body := b"".join(parts)).lower():
            try:
                return decode_worker.read_object(body), {}
            except Refused as error:
                raise refusal(error.param, error.message, error.code) from error
        limits = self._limits
        task = Task(content_type, limits.max_pixels, limits.max_prompt_characters, limits.max_body_s, names)
        async with self._place(is_large=size > (_LARGE_OBJECT if content_type == JSON else _LARGE)) as process:
            work = asyncio.get_running_loop().run_in_executor(self._threads, _ask, process, task, parts)
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # Nobody may be left to ask.
            try:
                return await asyncio.wait_for(asyncio.shield(work), _WALL_S)
            except TimeoutError:
                raise _too_slow(task) from None
            except ApiError:
                self._check_open()
                raise

    @contextlib.asynccontextmanager
    async def _place(self, *, is_large: bool) -> AsyncIterator[Process]:
        """Wait for a place; the process is killed behind it, if it has not ended."""
        async with contextlib.AsyncExitStack() as places:
            self.num_waiting += 1
            try:
                for place in [self._free_for_large] * is_large + [self._free]:
                    await places.enter_async_context(place)
            finally:
                self.num_waiting -= 1
            self._check_open()
            self.warm()
            process, self._spare = self._spare, None
            assert process is not None
            self._busy.add(process)
            self.warm()
            try:
                yield process
            finally:
                self._busy.discard(process)
                process.kill()

    def close(self) -> None:
        """End all processes, whatever they do."""
        self._is_closed = True
        for process in self._busy:
            process.kill()
        if self._spare is not None:
            self._spare.kill()
            self._spare.communicate()
            self._spare = None
        self._threads.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": "5"})


def _ask(process: Process, task: Task, parts: list[bytes]) -> Found:
    """Send a body and wait for the answer: in a thread. ApiError if it is refused, or if the process ended instead."""
    assert process.stdin is not None and process.stdout is not None  # noqa: PT018
    try:
        with process:  # Which closes its pipes, and waits.
            process.stdin.write(json.dumps(task).encode() + b"\n")
            parts.reverse()
            while parts:
                process.stdin.write(parts.pop())
            process.stdin.close()
            answer = json.loads(process.stdout.readline())
            if "message" in answer:
                raise refusal(answer["param"], answer["message"], answer["code"])
            images: dict[str, list[Image]] = {}
            for name, mode, size in answer["images"]:
                images.setdefault(name, []).append(_image(process.stdout, mode, tuple(size), task.max_pixels))
            return answer["values"], images
    except (OSError, ValueError, LookupError) as error:
        raise _end_error(process.wait(), task) from error


def _image(source: IO[bytes], mode: str, size: tuple[int, int], max_pixels: int) -> Image:
    if mode not in ("RGB", "RGBA") or size[0] * size[1] > max_pixels:
        raise ValueError(f"{mode} {size}")
    return PIL.Image.frombytes(mode, size, source.read(size[0] * size[1] * len(mode)))


def _end_error(code: int, task: Task) -> ApiError:
    """Why the process ended: for what was in the body, unless somebody else ended it."""
    if code == -signal.SIGPROF:
        return _too_slow(task)
    if code > 0 or -code in _CRASHES:
        message = "An image is damaged, or needs too much memory: its pixels cannot be decoded."
        return ApiError(400, message, param="image", code="invalid_image")
    message = "The process that read the body was ended. Try again."
    return ApiError(503, message, code="worker_restarted", headers={"Retry-After": "1"})


def _too_slow(task: Task) -> ApiError:
    message = f"The body took more than {task.cpu_s:g} s to read. Save the image again, as an ordinary PNG or JPEG."
    return ApiError(400, message, code="body_too_slow")
