"""Compressed copies of weights, which cross the bus in place of them, and the files that keep these between processes.

A weight itself stays where it is on the host; its copy is made once (see `coding`), and again when the weight is seen
to have changed.

A file has the copies of one component, in the format of safetensors. A copy is found by a hash of the raw weight, so a
file serves whatever holds the same weights, and never gives others. A damaged file, or one of other weights, costs a
warning and the time to compress again; one that is not ours is left alone. A new file takes the place of the old one
when all of it is written, and a full disk loses nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from ..core.errors import ModelError
from .coding import Coded, Form
from .device import Stage
from .layout import Piece, flat_bytes
from .pinned import new_chunk

_OURS = {"format": "samovar coded weights"}


def compress(piece: Piece, stage: Stage, file: CodedFile | None) -> Coded | None:
    """The compressed copy of a piece, from a file if that has it. None if compressing gains too little."""
    span = piece.spans[0][0]
    is_words = span.tensors[0].dtype is torch.bfloat16 and span.start % 2 == 0 and span.num_bytes % 2 == 0
    if not piece.is_large or not is_words:
        return None
    raw = flat_bytes(span)
    key = "" if file is None else hash_of(raw)
    coded = None if file is None else file.take(key)
    if coded is None:
        coded = _coded(raw, stage)
        if coded is not None and file is not None:
            file.put(key, coded.data)
    return coded


def _coded(raw: torch.Tensor, stage: Stage) -> Coded | None:
    coded = stage.encode(raw.view(torch.int16))
    if coded is None:
        return None
    data = new_chunk(coded.form.num_bytes)[: coded.form.num_bytes]
    # New pages fill slowly from a device, and quickly from memory, with all cores.
    is_here = coded.data.device.type == "cpu"
    data.copy_(coded.data if is_here else torch.empty_like(coded.data, device="cpu", pin_memory=True).copy_(coded.data))
    return Coded(coded.form, data)


def hash_of(data: torch.Tensor) -> str:
    """What only equal bytes in host memory have in common."""
    return hashlib.sha256(data.numpy().data).hexdigest()


class CodedFile:
    """The coded weights of one component, by the hash of each raw one, as far as a file has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        self._hashes: dict[str, str] = {}
        """Of the coded weights in the file, by the hash of the raw ones."""
        self._written: dict[str, torch.Tensor] = {}
        """What a new file will hold."""
        self._missing = 0
        self._is_foreign = False
        if not path.exists():
            return
        try:
            self._file = safe_open(path, "pt")
            self._hashes = dict(self._file.metadata() or {})
            if not _OURS.items() <= self._hashes.items():
                raise ModelError("it holds no coded weights")
        except (OSError, SafetensorError, ModelError) as error:
            self._file, self._hashes, self._is_foreign = None, {}, True
            self._warn(f"cannot be used, and is left as it is: {error}. Delete it to have it made again")

    def take(self, key: str) -> Coded | None:
        """The coded form of a weight, in a new chunk, if the file has it."""
        if key not in self._hashes:
            return None
        try:
            found = self._file.get_tensor(key)
            data = new_chunk(found.numel())[: found.numel()].copy_(found)
            if hash_of(data) != self._hashes[key]:
                raise ModelError("some of its weights are damaged")
            form = Form.read(data)
        except (OSError, SafetensorError, ModelError) as error:
            self._warn(f"cannot be used: {error}")
            return None
        self._written[key] = data
        return Coded(form, data)

    def put(self, key: str, data: torch.Tensor) -> None:
        """Keep what had to be coded."""
        self._missing += 1
        self._written[key] = data

    def close(self) -> None:
        """Write a new file if anything was missing, and let go of everything."""
        if self._missing and self._file is not None:
            self._warn(f"is not of these weights: {self._missing} tensors were coded anew, and it is replaced")
        self._file = None
        if self._missing and not self._is_foreign:
            try:
                self._write()
            except OSError as error:
                self._warn(f"could not be written, so the weights will be coded again next time: {error}")
        self._written, self._hashes, self._missing = {}, {}, 0

    def _write(self) -> None:
        """Beside it, and then in its place. The library would have a second copy of everything in memory."""
        parts = dict(sorted(self._written.items()))
        header: dict[str, Any] = {"__metadata__": _OURS | {key: hash_of(data) for key, data in parts.items()}}
        end = 0
        for key, data in parts.items():
            start, end = end, end + data.numel()
            header[key] = {"dtype": "U8", "shape": [data.numel()], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=self.path.name, delete=False) as file:
            try:
                _fill(file, text + b" " * (-len(text) % 8), parts.values())
                os.replace(file.name, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise

    def _warn(self, what: str) -> None:
        warnings.warn(f"The file of coded weights {self.path} {what}.", stacklevel=2)


def _fill(file: IO[bytes], header: bytes, parts: Iterable[torch.Tensor]) -> None:
    file.write(len(header).to_bytes(8, "little") + header)
    for data in parts:
        file.write(data.numpy().data)
    file.flush()
    os.fsync(file.fileno())
