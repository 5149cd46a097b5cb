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


def send(pipe: Connection, message: Any, process_id: int) -> None:
    """Send a message to the process at the other end."""
    body, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(body, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(message)
    pixels = [buffer.raw() for buffer in buffers]
    if not pixels:
        pipe.send((body.getvalue(), []))
        return
    handle = _shared_memory()
    try:
        with open(handle, "wb", closefd=False) as file:
            file.writelines(pixels)
        pipe.send((body.getvalue(), [each.nbytes for each in pixels]))
        reduction.send_handle(pipe, handle, process_id)
    finally:
        os.close(handle)


def receive(pipe: Connection) -> Any:
    """The next message; EOFError or OSError at the end of the pipe."""
    body, sizes = pipe.recv()
    if not sizes:
        return pickle.loads(body)
    with open(reduction.recv_handle(pipe), "rb") as file:
        file.seek(0)
        return pickle.loads(body, buffers=[bytearray(file.read(size)) for size in sizes])


def _shared_memory() -> int:
    """Anonymous memory, or an anonymous file on systems without it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("samovar")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Pickler(pickle.Pickler):
    """Puts the pixels of images aside, as numpy does with those of arrays."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, Image.Image) and item.mode in _RAW_MODES:
            return _image, (item.mode, item.size, pickle.PickleBuffer(item.tobytes()))
        return NotImplemented


def _image(mode: str, size: tuple[int, int], pixels: bytearray) -> Image.Image:
    return Image.frombytes(mode, size, bytes(pixels))
