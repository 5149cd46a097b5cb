"""Who reads long bodies and forms? A few processes, kept ready, and replaced when a body was too much for one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import PIL.Image
from PIL.Image import Image

from . import body_reader
from .api_errors import ApiError, refusal
from .body_reader import FRAME, JSON, Refused, Task
from .settings import Limits

_COUNT = 2
"""Bodies that are read at once. Others wait, in the order in which they came."""
_LARGE, _LARGE_OBJECT = 2**21, 2**17
"""Bytes of a form that can make it take seconds, and of JSON that no ordinary prompt has."""
_LONG_OBJECT = 2**15
"""Bytes of JSON that take two milliseconds to parse, whatever they are."""
_WALL_S = 30.0
"""The limit is on computing; a process that waits for the processor for this long has other troubles."""
Files = dict[str, list[Image]]
"""The images of a form, by name."""
Answer = tuple[dict[str, Any], Files] | ApiError
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class BodyReaders:
    """Reads bodies in processes of their own."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._idle: list[_Reader] = []
        self._busy: set[_Reader] = set()
        self._free, self._free_for_large = asyncio.Semaphore(_COUNT), asyncio.Semaphore(1)
        # Its own threads: no body can hold up the encoding of other clients' images.
        self._threads = ThreadPoolExecutor(_COUNT, "samovar body reader")
        self._is_closed = False
        self.num_waiting = 0

    def warm(self) -> None:
        """Start the processes before they are needed."""
        while not self._is_closed and len(self._idle) + len(self._busy) < _COUNT:
            self._idle.append(_Reader(self._limits))

    def read_at_once(self, parts: list[bytes], names: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """A JSON object that is short and has no images in it; else None. Long ones take too long to parse in this
        process: others would not be served meanwhile."""
        if sum(map(len, parts)) > _LONG_OBJECT:
            return None
        try:
            values = body_reader.read_object(b"".join(parts))
        except Refused as error:
            raise refusal(error.param, error.message, error.code) from error
        return None if body_reader.has_data(values, names) else values

    async def read_object(self, parts: list[bytes], names: tuple[str, ...] = ()) -> tuple[dict[str, Any], Files]:
        """A JSON object, and the images in it, whose fields may have these names."""
        values = self.read_at_once(parts, names)
        return await self._read(JSON, parts, names) if values is None else (values, {})

    async def read_image(self, content: bytes, name: str) -> Image:
        """The image of a file."""
        return (await self._read(body_reader.IMAGE, [content], (name,)))[1][name][0]

    async def read_form(
        self, content_type: str, parts: list[bytes], names: tuple[str, ...] = Task._field_defaults["files"]
    ) -> tuple[dict[str, str], Files]:
        """The texts and the images of a form, whose files may have these names."""
        return await self._read(content_type, parts, names)

    async def _read(
        self, content_type: str, parts: list[bytes], names: tuple[str, ...] = ()
    ) -> tuple[dict[str, Any], Files]:
        """What a body holds; its parts are released. Cancelling the caller ends the reading too."""
        limits, size = self._limits, sum(map(len, parts))
        most = limits.max_pixels, limits.max_prompt_characters, limits.max_body_s
        task = Task(content_type, size, *most, names)
        async with self._place(task.num_bytes > (_LARGE_OBJECT if content_type == JSON else _LARGE)):
            self._check_open()
            self.warm()
            reader = self._idle.pop()
            self._busy.add(reader)
            try:
                answer = await self._ask(reader, task, parts)
            except BaseException:  # Too slow, too large, or nobody waits any more.
                reader.end()
                self._busy.discard(reader)
                self.warm()
                self._check_open()
                raise
            self._busy.discard(reader)
            self._idle.append(reader)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    @contextlib.asynccontextmanager
    async def _place(self, is_large: bool) -> AsyncIterator[None]:
        """Wait for a process. Large bodies have one of them, for they may take long; there is one for the others."""
        async with contextlib.AsyncExitStack() as places:
            self.num_waiting += 1
            try:
                for place in [self._free_for_large] * is_large + [self._free]:
                    await places.enter_async_context(place)
            finally:
                self.num_waiting -= 1
            yield

    async def _ask(self, reader: _Reader, task: Task, parts: list[bytes]) -> Answer:
        work = asyncio.get_running_loop().run_in_executor(self._threads, reader.ask, task, parts)
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # Nobody may be left to ask.
        try:
            return await asyncio.wait_for(asyncio.shield(work), _WALL_S)
        except TimeoutError:
            raise ApiError(400, _too_slow(self._limits), code="body_too_slow") from None

    def close(self) -> None:
        """End all processes, whatever they do."""
        self._is_closed = True
        for reader in self._busy:
            reader.end()
        for reader in self._idle:
            reader.join()
        self._idle.clear()
        self._threads.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": "5"})


class _Reader:
    """One process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # A body in three copies; pixels as coefficients, in their own mode and in ours, with room between.
        memory = 3 * limits.max_upload_bytes + 32 * limits.max_pixels + 2**26
        # -P: the files beside that one are not modules.
        command = [sys.executable, "-P", str(Path(body_reader.__file__)), str(memory)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def ask(self, task: Task, parts: list[bytes]) -> Answer:
        """Send a body and wait for the answer: in a thread. Raises ApiError if the process ended instead."""
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None and sink is not None  # noqa: PT018
        try:
            header = json.dumps(task).encode()
            sink.write(FRAME.pack(len(header)) + header)
            for part in _emptied(parts):
                sink.write(part)
            sink.flush()
            files: Files = {}
            while True:
                (length,) = FRAME.unpack(_exactly(source, FRAME.size))
                answer: dict[str, Any] = json.loads(_exactly(source, length))
                if "message" in answer:
                    return refusal(answer["param"], answer["message"], answer["code"])
                if "values" in answer:
                    return answer["values"], files
                mode, (width, height) = answer["mode"], answer["size"]
                if mode not in ("RGB", "RGBA") or width * height > task.max_pixels:
                    raise ValueError(f"{mode} {width}x{height}")
                pixels = _exactly(source, width * height * len(mode))
                files.setdefault(answer["name"], []).append(PIL.Image.frombytes(mode, (width, height), pixels))
        except (OSError, ValueError, LookupError) as error:
            raise self._end_error(self.join()) from error

    def end(self) -> None:
        """Never waits; a thread that asks it notices, and joins it."""
        self._process.kill()

    def join(self) -> int:
        """Wait for its end, and return the exit code."""
        self._process.kill()  # Does nothing if it has ended.
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # What it did not read is lost.
                pipe.close()  # type: ignore[union-attr]
        return self._process.wait()

    def _end_error(self, code: int) -> ApiError:
        """Why the process ended: for what was in the body, unless somebody else ended it."""
        if code == -signal.SIGPROF:
            return ApiError(400, _too_slow(self._limits), code="body_too_slow")
        if code > 0 or -code in _CRASHES:
            message = "An image is damaged, or needs too much memory: its pixels cannot be decoded."
            return ApiError(400, message, param="image", code="invalid_image")
        message = "The process that read the body was ended. Try again."
        return ApiError(503, message, code="worker_restarted", headers={"Retry-After": "1"})


def _exactly(source: IO[bytes], length: int) -> bytes:
    data = source.read(length)
    if len(data) < length:
        raise OSError("the process ended")
    return data


def _emptied(parts: list[bytes]) -> Iterable[bytes]:
    """Each part, which is then released."""
    parts.reverse()
    while parts:
        yield parts.pop()


def _too_slow(limits: Limits) -> str:
    return f"The body took more than {limits.max_body_s:g} s to read. Save the image again, as an ordinary PNG or JPEG."
