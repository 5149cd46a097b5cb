"""How do bytes that are not in pinned memory get to the device without making the host wait?

They pass through a few pinned buffers. A thread fills one, from memory or from a file, and starts the copy from it to
the device; meanwhile it fills the next. A buffer is filled again when the device has read it.

A device's marks mean nothing before they are recorded, so while the thread has work, everything that goes to the queue
of copies goes through it, in order: copies from pinned memory, waits, and marks, which are futures until it gets there.
When it has none, the queue is used directly.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from .ring import Mark
from .truth import READERS, Bounced


class Target(Protocol):
    """Device memory that is copied into."""

    flat: torch.Tensor
    is_freed: bool


class CopyQueue:
    """The order of copies while some of them are read first."""

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        send: Callable[[torch.Tensor, torch.Tensor], None],
        mark: Callable[[], Mark],
        finish: Callable[[Mark], None],
    ) -> None:
        """`send` starts a copy to the device, `mark` is the point where all of them are done, `finish` waits for it."""
        self._buffers: deque[tuple[torch.Tensor, Mark]] = deque((buffer, None) for buffer in buffers)
        self._buffer_bytes = min(buffer.numel() for buffer in buffers)
        self._send, self._mark, self._finish = send, mark, finish
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samovar-copies")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="samovar-reads")
        self._jobs: deque[tuple[Target | None, Future[Any]]] = deque()
        """Those whose errors nobody has seen, each with the memory that it fills."""

    @property
    def is_idle(self) -> bool:
        return not self._jobs or self._jobs[-1][1].done()

    def put(self, job: Callable[[], Any], memory: Target | None = None) -> Future[Any]:
        """Do something after everything that was put here before."""
        done = self._thread.submit(job)
        self._jobs.append((memory, done))
        return done

    def send(self, memory: Target, offset: int, source: Bounced) -> None:
        """Read bytes and copy them to the device, a buffer at a time."""
        for start in range(0, source.num_bytes, self._buffer_bytes):
            count = min(self._buffer_bytes, source.num_bytes - start)
            target = memory.flat[offset + start : offset + start + count]
            self.put(functools.partial(self._bounce, memory, target, source, start), memory)

    def _bounce(self, memory: Target, target: torch.Tensor, source: Bounced, start: int) -> None:
        if memory.is_freed:
            return
        buffer, mark = self._buffers[0]
        if mark is not None:
            self._finish(mark)
        filled = buffer[: target.numel()]
        source.read(start, filled, self._readers)
        self._send(target, filled)
        self._buffers.popleft()
        self._buffers.append((buffer, self._mark()))

    def check(self) -> None:
        """Raise the first error of what was done, unless the memory that it concerns is freed."""
        while self._jobs and self._jobs[0][1].done():
            memory, done = self._jobs.popleft()
            error = done.exception()
            if error is not None and not (memory is not None and memory.is_freed):
                raise error

    def drain(self) -> None:
        """Block the host until everything is on its way. Errors are left for `check`."""
        if self._jobs:
            self._jobs[-1][1].exception()

    def close(self) -> None:
        self._thread.shutdown()
        self._readers.shutdown()
