"""Weights that are mapped from model files, read so that a changed file is refused.

safetensors maps a model's files privately: what is written to such memory is in memory alone, and the rest comes from
the file when it is touched. So weights are read through the mapping, which is right whatever was written to it. Beyond
the end of a file that was cut off there are no pages, and to touch one kills a process. So files are checked before
their weights are used, and the kernel is asked to copy, which reports a missing page as an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.errors import ModelError
from .layout import Span, flat_bytes

SLICE = 2**23
"""Bytes that one thread reads at a time."""
READERS = 4
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r..p ([0-9a-f]+) (\S+ \d+) +(/.*)")
_libc = ctypes.CDLL(None, use_errno=True)


class ModelFile:
    """A file that weights are mapped from, as it was when they were adopted."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.fd)
        self.stat = os.fstat(self.fd)

    def check(self) -> None:
        """Refuse a file that has changed. (If it was deleted or replaced, we still have the old one.)"""
        now = os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns) != (self.stat.st_size, self.stat.st_mtime_ns):
            raise ModelError(
                f"{self.path} was {'truncated' if now.st_size < self.stat.st_size else 'changed'} while its weights "
                "were in use: they are read from it again and again, and what it holds now is not what was loaded. "
                "Restore the file and load the pipeline again."
            )


@dataclass(frozen=True)
class Source:
    """The bytes of a span where they are."""

    memory: torch.Tensor
    file: ModelFile | None = None
    """The one that they are mapped from, if any."""

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()

    def read(self, start: int, target: torch.Tensor) -> None:
        """Copy bytes from `start` on to other memory."""
        if self.file is None:
            ctypes.memmove(target.data_ptr(), self.memory.data_ptr() + start, target.numel())  # Without Python's lock.
            return
        self.file.check()
        is_there = _copy(target.data_ptr(), self.memory.data_ptr() + start, target.numel())
        self.file.check()
        if not is_there:
            raise ModelError(f"A weight could not be read from {self.file.path}. Load the model again.")


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _copy(target: int, source: int, count: int) -> bool:
    """Copy memory, without Python's lock; False if some of it is not there."""
    if sys.platform == "linux" and count:
        local, remote = _Range(target, count), _Range(source, count)
        done = _libc.process_vm_readv(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if done >= 0 or ctypes.get_errno() == errno.EFAULT:
            return bool(done == count)
    ctypes.memmove(target, source, count)  # A container may forbid the call.
    return True


class Unpinned(NamedTuple):
    """The bytes of a piece that are read from where they are each time they are sent."""

    num_bytes: int
    parts: tuple[tuple[int, Source], ...]
    """Where in the piece each begins."""

    @property
    def files(self) -> list[ModelFile]:
        """Those that it is read from."""
        return [source.file for _, source in self.parts if source.file is not None]

    def read(self, start: int, target: torch.Tensor, threads: ThreadPoolExecutor) -> None:
        """Copy bytes from `start` on to other memory."""
        end = start + target.numel()
        slices = []
        for offset, source in self.parts:
            first, last = max(start, offset), min(end, offset + source.num_bytes)
            for at in range(first, last, SLICE):
                slices.append((source, at - offset, target[at - start : min(at + SLICE, last) - start]))
        list(threads.map(lambda item: item[0].read(*item[1:]), slices))


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    inode: str
    """With its device, as the kernel names them here. Some file systems have other names for `stat`."""
    path: str


class Files:
    """The files that weights are mapped from."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], ModelFile] = {}
        """By the start of the mapping and the inode."""
        self._mappings: list[_Mapping] | None = None
        """Those that were read for `reading_once`."""

    @contextlib.contextmanager
    def reading_once(self) -> Iterator[None]:
        """Inside, nobody maps files, so the mappings are read once: that takes milliseconds."""
        outer, self._mappings = self._mappings, self._mappings or _private_mappings()
        try:
            yield
        finally:
            self._mappings = outer

    def find(self, span: Span) -> Source:
        """Where the bytes of a span on the host are."""
        mappings = _private_mappings() if self._mappings is None else self._mappings
        index = bisect_right(mappings, span.start, key=lambda mapping: mapping.start) - 1
        mapping = mappings[index] if index >= 0 and span.num_bytes else None
        if mapping is None or span.start + span.num_bytes > mapping.end or (file := self._opened(mapping)) is None:
            return Source(flat_bytes(span))
        if mapping.offset + span.start - mapping.start + span.num_bytes > file.stat.st_size:
            raise ModelError(f"{file.path} was truncated after its weights were loaded. Load the model again.")
        return Source(flat_bytes(span), file)

    def _opened(self, mapping: _Mapping) -> ModelFile | None:
        """The file of a mapping; None if its name leads to another file by now."""
        file = self._open.get((mapping.start, mapping.inode))
        if file is None:
            try:
                file = ModelFile(mapping.path)
                with mmap.mmap(file.fd, 1, access=mmap.ACCESS_COPY) as memory:
                    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                    inodes = [other.inode for other in _private_mappings() if other.start == address]
            except (OSError, ValueError):
                return None
            if inodes != [mapping.inode]:
                return None
            self._open[mapping.start, mapping.inode] = file
        return file


def _private_mappings() -> list[_Mapping]:
    """The private mappings of files in this process, by address; empty where the system does not tell."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            matches = [_MAPPING.match(line.rstrip("\n")) for line in file if "/" in line]
    except OSError:
        return []
    return [
        _Mapping(int(match[1], 16), int(match[2], 16), int(match[3], 16), match[4], match[5])
        for match in matches
        if match is not None
    ]
