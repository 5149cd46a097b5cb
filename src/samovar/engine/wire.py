"""How do messages travel between our processes? Pickled through a private pipe, and pictures in memory that both share.

The memory has no name: it is a file descriptor that is handed over, so nothing is left anywhere if either side dies.
Nothing here ever listens on a socket that others could reach.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from PIL import Image

_RAW_MODES = ("L", "RGB", "RGBA")
"""Pictures whose bytes are all there is to them; others are pickled."""
_PLAIN, _WITH_PICTURES = b"\0", b"\1"


def send(pipe: Connection, message: Any, process_id: int) -> None:
    """Send a message to the process at the other end."""
    body, pictures = io.BytesIO(), io.BytesIO()
    _Pickler(body, pictures).dump(message)
    if not pictures.tell():
        pipe.send_bytes(_PLAIN + body.getvalue())
        return
    handle = _shared_memory()
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(pictures.getbuffer())
        pipe.send_bytes(_WITH_PICTURES + body.getvalue())
        reduction.send_handle(pipe, handle, process_id)
    finally:
        os.close(handle)


def receive(pipe: Connection) -> Any:
    """The next message; EOFError or OSError at the end of the pipe."""
    data = pipe.recv_bytes()
    pictures = b""
    if data[:1] == _WITH_PICTURES:
        handle = reduction.recv_handle(pipe)
        with open(handle, "rb") as file:
            file.seek(0)
            pictures = file.read()
    return _Unpickler(io.BytesIO(data[1:]), pictures).load()


def _shared_memory() -> int:
    """Memory without a name; a file without one where the system has no such memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("samovar")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Pickler(pickle.Pickler):
    """Puts the pixels of pictures aside."""

    def __init__(self, body: io.BytesIO, pictures: io.BytesIO) -> None:
        super().__init__(body, protocol=pickle.HIGHEST_PROTOCOL)
        self._pictures = pictures

    def persistent_id(self, item: Any) -> tuple[str, tuple[int, int], int, int] | None:
        if not isinstance(item, Image.Image) or item.mode not in _RAW_MODES:
            return None
        first = self._pictures.tell()
        return item.mode, item.size, first, first + self._pictures.write(item.tobytes())


class _Unpickler(pickle.Unpickler):
    """Finds them again."""

    def __init__(self, body: io.BytesIO, pictures: bytes) -> None:
        super().__init__(body)
        self._pictures = memoryview(pictures)

    def persistent_load(self, found: tuple[str, tuple[int, int], int, int]) -> Image.Image:
        mode, size, first, last = found
        return Image.frombytes(mode, size, bytes(self._pictures[first:last]))
