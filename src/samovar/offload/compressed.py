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
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .coding import Coded, Form
from .device import Stage
from .layout import Piece, flat_bytes
from .pinned import new_chunk

_OURS = ("format", "samovar coded weights")


def compress(piece: Piece, stage: Stage, file: CodedFile | None) -> Coded | None:
    """The compressed copy of a piece, from a file if that has it. None if compressing gains too little."""
    span = piece.spans[0][0]
    is_words = span.tensors[0].dtype is torch.bfloat16 and span.start % 2 == 0 and span.num_bytes % 2 == 0
    if not piece.is_large or not is_words:
        return None
    raw = flat_bytes(span)
    key = "" if file is None else hash_of(raw)
    found = None if file is None else file.take(key)
    if found is not None:
        return found
    coded = stage.encode(raw.view(torch.int16))
    if coded is None:
        return None
    # New pages fill slowly from a device, and quickly from memory, with all cores.
    is_here = coded.data.device.type == "cpu"
    here = coded.data if is_here else torch.empty_like(coded.data, device="cpu", pin_memory=True).copy_(coded.data)
    data = _in_chunk(here)
    if file is not None:
        file.put(key, data)
    return Coded(coded.form, data)


def _in_chunk(data: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own that can be pinned."""
    return new_chunk(data.numel())[: data.numel()].copy_(data)


def hash_of(data: torch.Tensor) -> str:
    """What only equal bytes in host memory have in common."""
    return hashlib.sha256(data.numpy().data).hexdigest()


class CodedFile:
    """The coded weights of one component, by the hash of each raw one, as far as a file has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hashes: dict[str, str] = {}
        """Of the coded weights in the file, by the hash of the raw ones."""
        self._written: dict[str, torch.Tensor] = {}
        """What a new file will hold."""
        self._missing, self._is_foreign = 0, False
        self._file: Any = None
        if not path.exists():
            return
        try:
            self._file = safe_open(path, "pt")
            hashes, problem = self._file.metadata() or {}, "it holds no coded weights"
        except (OSError, SafetensorError) as error:
            hashes, problem = {}, str(error)
        if _OURS in hashes.items():
            self._hashes = hashes
        else:
            self._is_foreign = True
            self._warn(f"cannot be used, and is left as it is: {problem}. Delete it to have it made again")

    def take(self, key: str) -> Coded | None:
        """The coded form of a weight, in a new chunk, if the file has it."""
        if key not in self._hashes:
            return None
        data = _in_chunk(self._file.get_tensor(key))
        if hash_of(data) != self._hashes[key]:
            self._warn("is damaged: a tensor is coded anew")
            return None
        self._written[key] = data
        return Coded(Form.read(data), data)

    def put(self, key: str, data: torch.Tensor) -> None:
        """Keep what had to be coded."""
        self._missing += 1
        self._written[key] = data

    def close(self) -> None:
        """Write a new file if anything was missing, and let go of everything."""
        if self._missing and self._hashes:
            self._warn(f"is not of these weights: {self._missing} tensors were coded anew, and it is replaced")
        if self._missing and not self._is_foreign:
            hashes = {key: hash_of(data) for key, data in self._written.items()}
            whole = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            try:
                save_file(self._written, whole, metadata=dict([_OURS]) | hashes)
                whole.replace(self.path)
            except (OSError, SafetensorError) as error:
                self._warn(f"could not be written, so the weights will be coded again next time: {error}")
            finally:
                with contextlib.suppress(OSError):
                    whole.unlink()
        self._file, self._written, self._hashes, self._missing = None, {}, {}, 0

    def _warn(self, what: str) -> None:
        warnings.warn(f"The file of coded weights {self.path} {what}.", stacklevel=2)
