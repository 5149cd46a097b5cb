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
from collections.abc import Iterable
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
        self._pinned: dict[int, torch.UntypedStorage] = {}
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
        memories = [source for source in sources if isinstance(source, torch.Tensor) and not _is_pinned(source)]
        found = [_whole(held) for memory in memories if (held := _chunk_of(memory)) is not None]
        wanted = {chunk.data_ptr(): chunk.untyped_storage() for chunk in found if chunk.data_ptr() not in self._pinned}
        left = float("inf") if self.limit_bytes is None else self.limit_bytes - _sum(self._pinned.values())
        allowed = []
        for chunk in wanted.values():
            if chunk.nbytes() <= left:
                allowed.append(chunk)
                left -= chunk.nbytes()
        with ThreadPoolExecutor(_THREADS) as threads:
            problems = list(threads.map(lambda c: self._stage.register(c.data_ptr(), c.nbytes()), allowed))
        done = {c.data_ptr(): c for c, problem in zip(allowed, problems, strict=True) if problem is None}
        self._pinned.update(done)
        pageable_bytes = _sum(wanted.values()) - _sum(done.values())
        self._stage.stats.pinned_bytes += _sum(done.values())
        self._stage.stats.pageable_bytes += pageable_bytes
        if pageable_bytes:
            problem = next((problem for problem in problems if problem), None)
            reason = problem or f"host_memory allows {format_bytes(self.limit_bytes or 0)}"
            warnings.warn(
                f"{format_bytes(pageable_bytes)} of weights could not be pinned: {reason}. Copies from pageable memory "
                "are about three times as slow, and the GPU waits for them. Raise host_memory, or offload less.",
                stacklevel=2,
            )

    def release(self, sources: Iterable[Source], used: Iterable[Source] = ()) -> None:
        """Unpin the chunks that hold these bytes, which nobody needs any more, but for those that are `used`."""
        chunks = {id(chunk): chunk for source in sources if (chunk := _chunk_of(source)) is not None}
        for source in used:
            chunks.pop(id(_chunk_of(source)), None)
        starts = [start for chunk in chunks.values() if (start := _whole(chunk).data_ptr()) in self._pinned]
        if starts:
            gone = {start: self._pinned.pop(start) for start in starts}
            self._stage.stats.pinned_bytes -= _sum(gone.values())
            _unpin(self._stage, gone)

    def close(self) -> None:
        """Unpin everything."""
        self._finalizer()


def _close(stage: Stage, pinned: dict[int, torch.UntypedStorage]) -> None:
    stage.pass_through(())
    _unpin(stage, pinned)


def _unpin(stage: Stage, pinned: dict[int, torch.UntypedStorage]) -> None:
    if pinned:
        stage.synchronize()  # No copy may still read from memory that is unpinned.
    for start in pinned:
        stage.unregister(start)
    pinned.clear()


def _sum(chunks: Iterable[torch.UntypedStorage]) -> int:
    return sum(chunk.nbytes() for chunk in chunks)


def _chunk_of(source: Source) -> mmap.mmap | None:
    """The chunk that a source is in, if any."""
    return None if isinstance(source, Unpinned) else _chunks.get(source.untyped_storage().data_ptr())


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
