"""Is a weight in a file or in memory alone, and how are its bytes read?

safetensors maps a model's files privately: pages come from the file until somebody writes to them, and then they are in
memory alone. So a weight that is a mapping need not be copied in order to be kept. Its bytes are read from the file,
which is faster than touching the pages and leaves no trace of them in memory, unless pages were written to: the kernel
tells (/proc/self/pagemap), exactly and at the moment of reading. Where it does not, the mapping itself is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import re
import struct
import sys
import tempfile
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.errors import ModelError
from .weights import Span

_PAGE = mmap.PAGESIZE
_SLICE = 2**23
"""Bytes that one thread reads at a time."""
READERS = 4
_PROBE_BYTES = 2**28
_CLEAN = bytes(bits for bits in range(256) if not bits & 0x40 and (not bits & 0x80 or bits & 0x20))
"""The highest byte of a page's entry in the page table, if the page was not written to. Bit 7: it is in memory; 6: it
is swapped out; 5: it is a page of the file."""
_SCAN, _FILE, _PRESENT, _SWAPPED = 0xC0606610, 4, 8, 16
"""PAGEMAP_SCAN, and its kinds of pages."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r..p ([0-9a-f]+) (\S+ \d+) +(/.*)")


class ModelFile:
    """A file that weights are mapped from, as it was when they were adopted."""

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else descriptor
        self._close = weakref.finalize(self, os.close, self.fd)
        self.stat = os.fstat(self.fd)

    @property
    def identity(self) -> tuple[int, ...]:
        """What changes when the file is replaced or written to."""
        return self.stat.st_dev, self.stat.st_ino, self.stat.st_size, self.stat.st_mtime_ns

    def check(self) -> None:
        """Refuse a file that has changed. (If it was deleted or replaced, we still have the old one.)"""
        now = os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns) != (self.stat.st_size, self.stat.st_mtime_ns):
            raise ModelError(
                f"{self.path} was {'truncated' if now.st_size < self.stat.st_size else 'changed'} while its weights "
                "were in use: they are read from it again and again, and what it holds now is not what was loaded. "
                "Restore the file and load the pipeline again."
            )

    def read(self, target: memoryview, offset: int) -> None:
        """Fill memory from a place in the file."""
        while target:
            count = os.preadv(self.fd, [target], offset)
            if not count:
                self.check()
                raise ModelError(f"{self.path} ends at byte {offset}, in the middle of a weight. Load the model again.")
            target, offset = target[count:], offset + count


@dataclass(frozen=True)
class Truth:
    """The bytes of a span where they are."""

    memory: torch.Tensor
    file: ModelFile | None = None
    offset: int = 0
    """Where in the file they begin."""

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()

    def is_clean(self) -> bool:
        """Whether the file certainly holds what the memory does."""
        return not self.num_bytes or (
            self.file is not None and not may_be_written(self.memory.data_ptr(), self.num_bytes)
        )

    @property
    def anonymous_bytes(self) -> int:
        """Bytes that are in memory alone, as far as one can see."""
        is_in_file = self.is_clean() or (self.file is not None and not can_see_writes(os.getpid()))
        return 0 if is_in_file else self.num_bytes

    def read(self, start: int, target: torch.Tensor) -> None:
        """Copy bytes from `start` on to other memory, from wherever they are now."""
        if self.file is not None:
            self.file.check()  # Before its pages are touched: beyond its end they do not exist.
        address, count = self.memory.data_ptr() + start, target.numel()
        if self.file is None or may_be_written(address, count):
            ctypes.memmove(target.data_ptr(), address, count)  # Without Python's lock.
        else:
            view = (ctypes.c_char * count).from_address(target.data_ptr())
            self.file.read(memoryview(view).cast("B"), self.offset + start)
        if self.file is not None:
            self.file.check()


class Truths:
    """What copies were made of. Asked before each use, so it asks the kernel once for all that is in one file."""

    def __init__(self, truths: Sequence[Truth]) -> None:
        self.truths = truths
        self._ranges = []
        for file in {id(truth.file) for truth in truths}:
            places = [(t.memory.data_ptr(), t.num_bytes) for t in truths if id(t.file) == file and t.num_bytes]
            start = min((place for place, _ in places), default=0)
            end = max((place + num_bytes for place, num_bytes in places), default=0)
            self._ranges.append((start, end - start))

    def is_clean(self) -> bool:
        """Whether nobody has written to any of them."""
        if not any(may_be_written(*place) for place in self._ranges if place[1]):
            return True
        return all(truth.is_clean() for truth in self.truths)  # Or it was somebody else's, between ours.


class Bounced(NamedTuple):
    """The bytes of a piece that are read from where they are each time they are sent."""

    num_bytes: int
    parts: tuple[tuple[int, Truth], ...]
    """Where in the piece each begins."""

    def read(self, start: int, target: torch.Tensor, threads: ThreadPoolExecutor) -> None:
        """Copy bytes from `start` on to other memory."""
        end = start + target.numel()
        slices = []
        for offset, truth in self.parts:
            first, last = max(start, offset), min(end, offset + truth.num_bytes)
            for at in range(first, last, _SLICE):
                slices.append((truth, at - offset, target[at - start : min(at + _SLICE, last) - start]))
        if len(slices) == 1 or end - start <= _SLICE:
            for truth, at, part in slices:
                truth.read(at, part)
        else:
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
        """Those that were read inside of `reading_once`."""
        self._is_read_once = False

    def __iter__(self) -> Iterator[ModelFile]:
        return iter(self._open.values())

    @contextlib.contextmanager
    def reading_once(self) -> Iterator[None]:
        """Inside, nobody but `add` maps files, so the mappings are read once: that takes milliseconds."""
        outer, self._is_read_once = self._is_read_once, True
        try:
            yield
        finally:
            self._is_read_once = outer
            self._mappings = self._mappings if outer else None

    def add(self, memory: torch.Tensor, file: ModelFile) -> None:
        """Know a file without a name by what is mapped from it."""
        self._mappings = None
        for mapping in private_mappings():
            if mapping.start <= memory.data_ptr() < mapping.end:
                self._open[mapping.start, mapping.inode] = file

    def find(self, spans: Iterable[tuple[Span, torch.Tensor]]) -> list[Truth]:
        """Where the bytes of each span, given with its memory, are."""
        mappings = private_mappings() if self._mappings is None else self._mappings
        self._mappings = mappings if self._is_read_once else None
        starts = [mapping.start for mapping in mappings]
        found = []
        for span, memory in spans:
            index = bisect_right(starts, span.start) - 1
            mapping = mappings[index] if index >= 0 and span.num_bytes else None
            file = None
            if mapping is not None and span.start + span.num_bytes <= mapping.end:
                file = self._opened(mapping)
            offset = mapping.offset + span.start - mapping.start if file is not None and mapping is not None else 0
            if file is not None and offset + span.num_bytes > file.stat.st_size:
                raise ModelError(f"{file.path} was truncated after its weights were loaded. Load the model again.")
            found.append(Truth(memory, file, offset))
        return found

    def _opened(self, mapping: _Mapping) -> ModelFile | None:
        """The file of a mapping; None if its name leads to another file by now."""
        file = self._open.get((mapping.start, mapping.inode))
        if file is None:
            try:
                file = ModelFile(mapping.path)
                with mmap.mmap(file.fd, 1, access=mmap.ACCESS_COPY) as memory:
                    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                    inodes = [other.inode for other in private_mappings() if other.start == address]
            except (OSError, ValueError):
                return None
            if inodes != [mapping.inode]:
                return None
            self._open[mapping.start, mapping.inode] = file
        return file


def private_mappings() -> list[_Mapping]:
    """The private mappings of files in this process, by address; empty where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return []
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


def disk_speed(file: ModelFile) -> float | None:
    """Bytes per second of reading a file that is not in memory; None if it is too small to tell."""
    num_bytes = min(file.stat.st_size, _PROBE_BYTES)
    if num_bytes < _PROBE_BYTES // 8:
        return None
    os.posix_fadvise(file.fd, 0, num_bytes, os.POSIX_FADV_DONTNEED)
    target = bytearray(num_bytes)
    slices = [(memoryview(target)[at : at + _SLICE], at) for at in range(0, num_bytes, _SLICE)]
    started = time.perf_counter()
    with ThreadPoolExecutor(READERS) as threads:
        list(threads.map(lambda part: file.read(*part), slices))
    return num_bytes / (time.perf_counter() - started)


# ---------------------------------------------------------------------------------------------------- written pages


def may_be_written(address: int, num_bytes: int) -> bool:
    """Whether pages of a private mapping were written to, so that the file does not hold them. In doubt, True."""
    if not can_see_writes(os.getpid()):
        return True
    return _any_written(_pagemap(os.getpid()), address, num_bytes)


@functools.cache
def _pagemap(pid: int) -> int:
    """This process' page table as a file. A fork needs its own."""
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


def _any_written(pagemap: int, address: int, num_bytes: int, *, quickly: bool | None = None) -> bool:
    first, last = address // _PAGE, (address + num_bytes - 1) // _PAGE
    if can_watch(os.getpid()) if quickly is None else quickly:
        import fcntl

        found = ctypes.create_string_buffer(24)
        wanted = (_FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT)  # Not of the file, and in memory or swapped out.
        start, end, place = first * _PAGE, (last + 1) * _PAGE, ctypes.addressof(found)
        return bool(
            fcntl.ioctl(pagemap, _SCAN, bytearray(struct.pack("12Q", 96, 0, start, end, 0, place, 1, 1, *wanted)))
        )
    entries = bytearray(8 * (last - first + 1))
    if os.preadv(pagemap, [entries], 8 * first) != len(entries):
        return True
    return bool(entries[7::8].translate(None, _CLEAN))


@functools.cache
def can_see_writes(pid: int) -> bool:
    """Whether the kernel tells which pages were written to."""
    return _is_right(pid, quickly=False)


@functools.cache
def can_watch(pid: int) -> bool:
    """Whether it tells so in microseconds (Linux 6.7), so that one can ask before each use."""
    return _is_right(pid, quickly=True)


def _is_right(pid: int, *, quickly: bool) -> bool:
    """Tried on a file of two pages."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        pagemap = _pagemap(pid)
        with tempfile.TemporaryFile() as file:
            file.write(b"a" * 2 * _PAGE)
            file.flush()
            with mmap.mmap(file.fileno(), 2 * _PAGE, access=mmap.ACCESS_COPY) as memory:
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                touched = memory[0] + memory[_PAGE]
                before = _any_written(pagemap, address, 2 * _PAGE, quickly=quickly)
                memory[_PAGE] = touched % 256
                after = [_any_written(pagemap, address + at, _PAGE, quickly=quickly) for at in (0, _PAGE)]
    except (OSError, BufferError, ValueError):
        return False
    return [before, *after] == [False, False, True]
