"""How are coded weights kept between processes? In one file for each component.

A tensor is found by a hash of its raw bytes, so a file serves whatever holds the same weights, and never gives others.
A file that is cut off, damaged or of other weights costs a warning and the time to code again; one that is not ours is
left alone. A new file takes the place of the old one when all of it is written, and a full disk loses nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ..core.errors import ModelError
from .coding import Coded, Form
from .host import new_chunk

_MAGIC = b"samovar coded 2\n"
_ALIGNED = 4096
_RESIDUES = 262_147
"""Checksums tell words apart by their position modulo this: a prime, so that rows that are swapped show."""


def checksum(data: torch.Tensor) -> torch.Tensor:
    """A number on the same device that tells whether bytes have changed.

    Words have half the bits of the sum, so that each bit of them counts: the highest bit of a sum is the same after any
    two changes of it.
    """
    if data.storage_offset() % 4 or data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    words = data.view(torch.int32)
    columns = max(min(words.numel(), _RESIDUES), 1)
    rows = words.numel() // columns
    sums = words[: rows * columns].view(rows, columns).sum(0, dtype=torch.int64)
    rest = words[rows * columns :]
    sums[: rest.numel()] += rest
    weights = torch.arange(1, 2 * columns, 2, device=words.device) * -7046029254386353131
    return (sums * weights).sum()


def hash_of(data: torch.Tensor) -> str:
    """What only equal bytes in host memory have in common."""
    return hashlib.sha256(data.numpy().data).hexdigest()


def _key(truth: torch.Tensor, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {hash_of(truth)}"


class CodedFile:
    """The coded weights of one component, as far as a file has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[str, dict[str, Any]] = {}
        """By key, where in the file a tensor is, its length and its hash."""
        self._data_at = 0
        self._is_foreign = False
        self._missing = 0
        self._written: dict[str, torch.Tensor] = {}
        """By key, what a new file will hold."""
        self._file: IO[bytes] | None = None
        try:
            self._file = path.open("rb")
            self._read_index(self._file)
        except FileNotFoundError:
            pass
        except (OSError, ModelError) as error:
            self._warn(f"cannot be used: {error}")

    def _read_index(self, file: IO[bytes]) -> None:
        if file.read(len(_MAGIC)) != _MAGIC:
            self._is_foreign = True
            raise ModelError("it holds no coded weights of this version, and is left as it is")
        length = int.from_bytes(file.read(8), "little")
        self._data_at = _rounded(len(_MAGIC) + 8 + length)
        try:
            found: dict[str, Any] = json.loads(file.read(min(length, os.fstat(file.fileno()).st_size)))
        except (ValueError, RecursionError) as error:
            raise ModelError("its index is damaged") from error
        if not isinstance(found, dict) or not all(map(_is_entry, found.values())):
            raise ModelError("its index is damaged")
        expected = self._data_at + max((_rounded(entry["at"] + entry["bytes"]) for entry in found.values()), default=0)
        if os.fstat(file.fileno()).st_size != expected:
            raise ModelError(f"it was cut off: {os.fstat(file.fileno()).st_size} of {expected} bytes are there")
        self._found = found

    def take(self, truth: torch.Tensor, dtype: torch.dtype) -> Coded | None:
        """The coded form of some raw bytes, in a new chunk, if the file has it."""
        key = _key(truth, dtype)
        entry = self._found.get(key)
        coded = None if entry is None else self._read(entry)
        if coded is not None:
            self._written[key] = coded.data
        return coded

    def _read(self, entry: dict[str, Any]) -> Coded | None:
        assert self._file is not None
        data = new_chunk(entry["bytes"])[: entry["bytes"]]
        try:
            self._file.seek(self._data_at + entry["at"])
            self._file.readinto(data.numpy())  # type: ignore[attr-defined]
            if hash_of(data) != entry["hash"]:
                raise ModelError("some of its weights are damaged")
            return Coded(Form.read(data), data)
        except (OSError, ModelError) as error:
            self._warn(f"cannot be used: {error}")
            return None

    def put(self, truth: torch.Tensor, dtype: torch.dtype, data: torch.Tensor) -> None:
        """Keep what had to be coded."""
        self._missing += 1
        self._written[_key(truth, dtype)] = data

    def close(self) -> None:
        """Write a new file if anything was missing, and let go of everything."""
        if self._file is not None:
            self._file.close()
        if self._missing and self._found:
            self._warn(f"is not of these weights: {self._missing} tensors were coded anew, and it is replaced")
        if self._missing and self._written and not self._is_foreign:
            try:
                self._write()
            except OSError as error:
                self._warn(f"could not be written, so the weights will be coded again next time: {error}")
        self._written, self._found, self._missing = {}, {}, 0

    def _write(self) -> None:
        index, at = {}, 0
        parts = {key: self._written[key] for key in sorted(self._written)}
        for key, data in parts.items():
            index[key] = {"at": at, "bytes": data.numel(), "hash": hash_of(data)}
            at = _rounded(at + data.numel())
        text = json.dumps(index).encode()
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=self.path.name, delete=False) as file:
            try:
                file.write(_MAGIC + len(text).to_bytes(8, "little") + text)
                _write_all(file, list(parts.values()))
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise

    def _warn(self, what: str) -> None:
        warnings.warn(f"The file of coded weights {self.path} {what}.", stacklevel=2)


def _is_entry(entry: Any) -> bool:
    """Whether an entry of an index says where a tensor is, and nothing that cannot be."""
    if not isinstance(entry, dict) or any(type(entry.get(name)) is not int for name in ("at", "bytes")):
        return False
    return bool(entry["at"] >= 0 and entry["bytes"] >= 0 and isinstance(entry.get("hash"), str))


def _write_all(file: IO[bytes], parts: Sequence[torch.Tensor]) -> None:
    """Each part begins at a multiple of the block, and the last one ends at one."""
    for part in parts:
        file.write(bytes(_rounded(file.tell()) - file.tell()))
        file.write(part.numpy().data)
    file.write(bytes(_rounded(file.tell()) - file.tell()))


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
