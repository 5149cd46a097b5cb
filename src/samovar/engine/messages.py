"""Messages between a worker process and its parent.

Messages are pickled through a private pipe; images, videos and sounds travel in shared memory. The memory has no name:
its file descriptor is handed over, so nothing is left behind if either side dies, and no other process can reach it.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..core.errors import SamovarError
from .events import Event, Outcome
from .facts import PipelineFacts
from .request import Request
from .worker import Usage


class Run(NamedTuple):
    """To the worker: serve this request."""

    number: int
    request: Request


class Cancel(NamedTuple):
    """To the worker: nobody waits for this request any more."""

    number: int


class Ready(NamedTuple):
    """From the worker: the model is loaded and warm."""

    facts: PipelineFacts
    load_seconds: float
    usage: Usage
    max_batch: int = 1
    max_runs: int = 1
    """Requests that it can have at once."""


class Fatal(NamedTuple):
    """From the worker: the model cannot be loaded, or this process cannot go on."""

    error: SamovarError


class Update(NamedTuple):
    """From rank 0: something happened to a request."""

    number: int
    event: Event


class Finished(NamedTuple):
    """From each rank: the end of a request. Rank 0 sends the result; for it the others send None."""

    number: int
    outcome: Outcome | None
    usage: Usage


FromWorker = Ready | Fatal | Update | Finished

_RAW_MODES = ("L", "RGB", "RGBA")
"""Images that are their bytes; others are pickled."""
_PLAIN, _WITH_IMAGES = b"\0", b"\1"


def send(pipe: Connection, message: Any, process_id: int) -> None:
    """Send a message to the process at the other end."""
    body, pixels = io.BytesIO(), io.BytesIO()
    _Pickler(body, pixels).dump(message)
    if not pixels.tell():
        pipe.send_bytes(_PLAIN + body.getvalue())
        return
    handle = _shared_memory()
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(pixels.getbuffer())
        pipe.send_bytes(_WITH_IMAGES + body.getvalue())
        reduction.send_handle(pipe, handle, process_id)
    finally:
        os.close(handle)


def receive(pipe: Connection) -> Any:
    """The next message; EOFError or OSError at the end of the pipe."""
    data = pipe.recv_bytes()
    pixels = b""
    if data[:1] == _WITH_IMAGES:
        with open(reduction.recv_handle(pipe), "rb") as file:
            file.seek(0)
            pixels = file.read()
    return _Unpickler(io.BytesIO(data[1:]), pixels).load()


def _shared_memory() -> int:
    """Anonymous memory, or an anonymous file on systems without it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("samovar")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Pickler(pickle.Pickler):
    """Puts pixels and samples aside."""

    def __init__(self, body: io.BytesIO, pixels: io.BytesIO) -> None:
        super().__init__(body, protocol=pickle.HIGHEST_PROTOCOL)
        self._pixels = pixels

    def persistent_id(self, item: Any) -> tuple[str, tuple[int, ...], int, int] | None:
        if isinstance(item, Image.Image) and item.mode in _RAW_MODES:
            kind, shape, content = item.mode, item.size, item.tobytes()
        elif type(item) is np.ndarray and item.dtype.kind in "uif":
            kind, shape, content = item.dtype.str, item.shape, item.tobytes()
        else:
            return None
        first = self._pixels.tell()
        return kind, shape, first, first + self._pixels.write(content)


class _Unpickler(pickle.Unpickler):
    """Puts them back."""

    def __init__(self, body: io.BytesIO, pixels: bytes) -> None:
        super().__init__(body)
        self._pixels = memoryview(pixels)

    def persistent_load(self, found: tuple[str, tuple[int, ...], int, int]) -> Any:
        kind, shape, first, last = found
        content = self._pixels[first:last]
        if kind in _RAW_MODES:
            return Image.frombytes(kind, (shape[0], shape[1]), bytes(content))
        return np.frombuffer(content, kind).reshape(shape).copy()
