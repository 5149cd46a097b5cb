"""The host copy of weights, in memory that the device copies from at full speed.

There is one host copy. Weights move, once, into chunks that have their own pages; they stay if they are in one already.
They keep their phase (see `layout`), except for small ones bound for a device that places them elsewhere. Shared pages
must not be pinned: CUDA refuses to copy a tensor that is partly on pinned pages, and malloc may put one at either end
of any weight. Memory that cannot be pinned is used as it is, with a warning.

Tensors in a chunk have a storage each, over their own bytes of it: `torch.save` writes whole storages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .device import Stage
from .files import Files, Unpinned
from .host_tiers import NUM_BUFFERS, PINNABLE
from .layout import LINE, Piece, Span, flat_bytes, move, spans_of
from .sizes import format_bytes

Source = torch.Tensor | Unpinned
"""The host bytes of a piece."""
_PAGE = mmap.PAGESIZE
_THREADS = 4
_TRIM_BYTES = 2**28
"""After moving this many bytes, malloc is asked to return the old memory to the system."""
_chunks: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""By the address of each storage in it, the memory that `new_chunk` mapped and some tensor still uses."""


def host_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process may use: the machine's memory, or its control group's limit if that is less."""
    limits = []
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(root / name)
        if text.isdigit():
            limits.append(int(text))
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=None)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class HostMemory:
    """The host copy of offloaded weights."""

    def __init__(self, stage: Stage, limit_bytes: int | None = None) -> None:
        """At most `limit_bytes` are pinned; by default, most of the host's memory."""
        whole = host_limit()
        self.limit_bytes = limit_bytes if limit_bytes is not None or whole is None else int(whole * PINNABLE)
        self._stage = stage
        self._untrimmed_bytes = 0
        self._buffers: list[torch.Tensor] = []
        self._files = Files()
        self._phases: Any = WeakTensorKeyDictionary()
        """By tensor: where in a cache line its data began before we moved it."""
        self._pinned: dict[int, mmap.mmap] = {}
        """Pinned chunks by address. They must not be freed before they are unpinned."""
        self._finalizer = weakref.finalize(self, _close, stage, self._pinned)
        self._finalizer.atexit = False  # The end of the process unpins everything, and faster.

    def follow(self, buffer_bytes: int) -> None:
        """Provide the buffers that what is not pinned passes through."""
        if buffer_bytes != sum(buffer.numel() for buffer in self._buffers[:1]):
            self._stage.pass_through(())
            self.release(self._buffers)
            self._buffers = [new_chunk(buffer_bytes)[:buffer_bytes] for _ in range(NUM_BUFFERS if buffer_bytes else 0)]
            self.pin(self._buffers)
            self._stage.pass_through(self._buffers)

    def adopting(self) -> contextlib.AbstractContextManager[None]:
        """Around the adoption of many weights, so that it is quick."""
        return self._files.reading_once()

    def note_phases(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember where in a cache line tensors begin, before they are moved."""
        for tensor in tensors:
            self._phases.setdefault(tensor, Span(tensor.data_ptr(), 0, (tensor,)).phase)

    def phase_before(self, span: Span) -> int:
        """Where in a line a span is to begin on the host."""
        phase: int = self._phases.get(span.tensors[0], span.phase)
        return phase

    def in_place(self, piece: Piece) -> Unpinned:
        """The bytes of a piece where they are."""
        parts = [(offset - piece.start, self._files.find(span)) for span, offset in piece.spans]
        return Unpinned(parts[-1][0] + parts[-1][1].num_bytes, tuple(parts))

    def take_in(self, piece: Piece) -> torch.Tensor:
        """The bytes of a piece in a chunk, into which it moves if it is in none. Pinning it is up to the caller."""
        span = piece.spans[0][0]
        if not piece.is_large:
            memory = new_chunk(piece.num_bytes)[: piece.num_bytes]
            for small, offset in piece.spans:
                self._move(small, memory[offset:])
            return memory
        if span.tensors[0].untyped_storage().data_ptr() not in _chunks and not _is_pinned(flat_bytes(span)):
            self._move(span, new_chunk(span.phase + span.num_bytes)[span.phase :][: span.num_bytes])
            if self._untrimmed_bytes >= _TRIM_BYTES:
                self._untrimmed_bytes = 0
                trim_heap()
            (span,) = spans_of(span.tensors)
        return flat_bytes(span)

    def _move(self, span: Span, target: torch.Tensor) -> None:
        file = self._files.find(span).file
        if file is not None:
            file.check()
        move(span, _own_storage(target[: span.num_bytes]) if span.num_bytes else target[:0])
        self._untrimmed_bytes += span.num_bytes
        self._stage.stats.copied_bytes += span.num_bytes

    def anonymous_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of these tensors that are in memory alone, and in no file; more than there are if all of them are."""
        sources = list(map(self._files.find, spans_of(tensors)))
        is_in_files = any(source.file is not None for source in sources)
        return sum(source.num_bytes for source in sources if source.file is None) if is_in_files else sys.maxsize

    def pin(self, sources: Iterable[Source]) -> None:
        """Pin the chunks that hold these bytes, as far as the limit allows."""
        chunks = _chunks_of(source for source in sources if isinstance(source, torch.Tensor) and not _is_pinned(source))
        wanted = {start: chunk for start, chunk in chunks.items() if start not in self._pinned}
        left = float("inf") if self.limit_bytes is None else self.limit_bytes - _sum(self._pinned)
        allowed: dict[int, mmap.mmap] = {}
        for start, chunk in wanted.items():
            if len(chunk) <= left:
                allowed[start] = chunk
                left -= len(chunk)
        with ThreadPoolExecutor(_THREADS) as threads:
            problems = list(threads.map(self._stage.register, allowed, map(len, allowed.values())))
        done = {start: allowed[start] for start, problem in zip(allowed, problems, strict=True) if problem is None}
        pageable_bytes = _sum(wanted) - _sum(done)
        self._pinned.update(done)
        self._stage.stats.pinned_bytes += _sum(done)
        self._stage.stats.pageable_bytes += pageable_bytes
        if pageable_bytes:
            problem = next((problem for problem in problems if problem), None)
            reason = problem or f"host_memory allows {format_bytes(self.limit_bytes or 0)}"
            warnings.warn(
                f"Some weights could not be pinned: {reason}. Copies from pageable memory "
                "are about three times as slow, and the GPU waits for them. Raise host_memory, or offload less.",
                stacklevel=2,
            )

    def release(self, sources: Iterable[Source], used: Iterable[Source] = ()) -> None:
        """Unpin the chunks that hold these bytes, which nobody needs any more, but for those that are `used`."""
        starts = _chunks_of(sources).keys() & self._pinned.keys() - _chunks_of(used).keys()
        gone = {start: self._pinned.pop(start) for start in starts}
        self._stage.stats.pinned_bytes -= _sum(gone)
        _unpin(self._stage, gone)

    def close(self) -> None:
        """Unpin everything."""
        self._finalizer()


def _close(stage: Stage, pinned: dict[int, mmap.mmap]) -> None:
    stage.pass_through(())
    _unpin(stage, pinned)


def _unpin(stage: Stage, pinned: dict[int, mmap.mmap]) -> None:
    if pinned:
        stage.synchronize()  # No copy may still read from memory that is unpinned.
    for start in pinned:
        stage.unregister(start)
    pinned.clear()


def _sum(chunks: Mapping[int, mmap.mmap]) -> int:
    return sum(map(len, chunks.values()))


def _chunks_of(sources: Iterable[Source]) -> dict[int, mmap.mmap]:
    """The chunks that some sources are in, by address."""
    places = (source.untyped_storage().data_ptr() for source in sources if isinstance(source, torch.Tensor))
    return {_whole(chunk).data_ptr(): chunk for chunk in map(_chunks.get, places) if chunk is not None}


def _is_pinned(source: torch.Tensor) -> bool:
    """Whether memory is pinned, by anyone."""
    return torch.cuda.is_available() and source.is_pinned()


def trim_heap() -> None:
    """Have malloc return free pages to the system, where the C library can."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # Not in every libc.
        trim(0)


def new_chunk(num_bytes: int) -> torch.Tensor:
    """Zeroed memory of whole pages, rounded up; huge pages if the system has them, as these fill and pin faster."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    num_bytes = -(-num_bytes // _PAGE) * _PAGE
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= 2**21:
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = _whole(memory)
    _chunks[chunk.data_ptr()] = memory
    return chunk


def _whole(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _own_storage(part: torch.Tensor) -> torch.Tensor:
    """The same bytes of a chunk, as a storage of their own. It begins at a cache line, so at an element of any type."""
    memory = _chunks[part.untyped_storage().data_ptr()]
    line, phase = divmod(int(part.storage_offset()), LINE)
    own = torch.frombuffer(memory, dtype=torch.uint8, offset=line * LINE, count=phase + part.numel())
    _chunks[own.data_ptr()] = memory
    return own[phase:]
