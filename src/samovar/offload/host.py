"""Where are weights kept on the host, and how much of its memory may be pinned?

There is one host copy. The weights of a block move, once, into a flat chunk with its own pages. They keep their phase
(see `weights`), except for small ones bound for a device that places them elsewhere. Weights that are in such a chunk
already stay there. Shared pages must not be pinned: CUDA refuses to copy a tensor that is only partly on pinned pages,
malloc may put one at either end of any weight, and pages of a file are not ours. Memory that cannot be pinned is used
as it is, with a warning that states the cost.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import warnings
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from .sizes import format_bytes
from .staging import Stage
from .weights import LEAST_PIECE, LINE, Layout, Span, room_for

_PAGE = mmap.PAGESIZE
_PINNABLE = 0.85
"""The share of the host's memory that may be pinned by default."""
_THREADS = 4
_TRIM_BYTES = 2**28
"""After moving this many bytes, malloc is asked to return the old memory to the system."""
_chunks: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""By address, the memory that `new_chunk` mapped and some tensor still uses."""


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

    def __init__(self, stage: Stage, limit_bytes: int | None) -> None:
        """At most `limit_bytes` are pinned; by default, most of the host's memory."""
        whole = host_limit()
        self.limit_bytes = limit_bytes if limit_bytes is not None or whole is None else int(whole * _PINNABLE)
        self._stage = stage
        self._untrimmed_bytes = 0
        self._pinned: dict[int, int] = {}
        """Start and end of each pinned range of pages."""
        self._starts: list[int] = []
        self._kept: list[torch.Tensor] = []
        """Pinned memory must not be freed before it is unpinned."""
        self._finalizer = weakref.finalize(self, _unpin, stage, self._pinned, self._kept)
        self._finalizer.atexit = False  # The end of the process unpins everything, and faster.

    def adopt(self, spans: Sequence[Span], layout: Layout, *, pinned: bool) -> list[torch.Tensor]:
        """The host bytes of each piece. Tensors that cannot be pinned where they are move into a new chunk."""
        is_small = [span.num_bytes < LEAST_PIECE for span in spans]
        used = layout.pieces[0] if any(is_small) else 0
        rooms = [
            0 if small or self._stays(span, pinned) else room_for(span.num_bytes, span.phase)
            for span, small in zip(spans, is_small, strict=True)
        ]
        chunk = new_chunk(used + sum(rooms))
        pieces = [chunk[:used] for _ in layout.pieces]  # Small spans share the first; each other span replaces its own.
        for span, (piece, offset), room, small in zip(spans, layout.places, rooms, is_small, strict=True):
            if small:
                self._move(span, chunk[offset:][: span.num_bytes])
            elif room:
                pieces[piece] = chunk[used + span.phase :][: span.num_bytes]
                self._move(span, pieces[piece])
                used += room
            else:
                pieces[piece] = _flat(span)
        self._untrimmed_bytes += chunk.numel()
        if self._untrimmed_bytes >= _TRIM_BYTES:
            self._untrimmed_bytes = 0
            _trim()
        return pieces

    def _stays(self, span: Span, pinned: bool) -> bool:
        return not pinned or span.tensors[0].untyped_storage().data_ptr() in _chunks or self._is_pinned(_flat(span))

    def _move(self, span: Span, target: torch.Tensor) -> None:
        self._stage.stats.copied_bytes += span.num_bytes
        _move(span, target)

    def pin(self, pieces: Iterable[torch.Tensor]) -> None:
        """Pin what is not pinned yet, neighbours together, as far as the limit allows."""
        wanted = [piece for piece in pieces if piece.numel() and not self._is_pinned(piece)]
        ranges = _page_ranges(wanted)
        left = float("inf")
        if self.limit_bytes is not None:
            left = self.limit_bytes - sum(end - start for start, end in self._pinned.items())
        allowed = []
        for start, end in ranges:
            if end - start <= left:
                allowed.append((start, end))
                left -= end - start
        with ThreadPoolExecutor(_THREADS) as threads:
            problems = list(threads.map(lambda range_: self._stage.register(range_[0], range_[1] - range_[0]), allowed))
        done = {range_ for range_, problem in zip(allowed, problems, strict=True) if problem is None}
        self._pinned.update(done)
        self._starts = sorted(self._pinned)
        self._kept.extend(piece for piece in wanted if self._is_pinned(piece))
        self._stage.stats.pinned_bytes += sum(end - start for start, end in done)
        pageable = sum(end - start for start, end in ranges if (start, end) not in done)
        self._stage.stats.pageable_bytes += pageable
        if pageable:
            self._warn(pageable, next((problem for problem in problems if problem), None))

    def _is_pinned(self, piece: torch.Tensor) -> bool:
        start, end = piece.data_ptr(), piece.data_ptr() + piece.numel()
        before = bisect.bisect_right(self._starts, start) - 1
        is_ours = before >= 0 and end <= self._pinned[self._starts[before]]
        return is_ours or (torch.cuda.is_available() and piece.is_pinned())

    def _warn(self, pageable: int, problem: str | None) -> None:
        reason = problem or f"host_memory allows {format_bytes(self.limit_bytes or 0)}"
        warnings.warn(
            f"{format_bytes(pageable)} of weights could not be pinned: {reason}. Copies from pageable memory are about "
            "three times as slow, and the GPU waits for them. Raise host_memory, or offload less.",
            stacklevel=2,
        )

    def close(self) -> None:
        """Unpin everything."""
        self._starts = []
        self._finalizer()


def _unpin(stage: Stage, pinned: dict[int, int], kept: list[torch.Tensor]) -> None:
    if pinned:
        stage.synchronize()  # No copy may still read from memory that is unpinned.
    for start in pinned:
        stage.unregister(start)
    pinned.clear()
    kept.clear()


def _page_ranges(pieces: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """The pages of some pieces. Pieces that share a page form one range, as a page cannot be pinned twice."""
    ranges: list[tuple[int, int]] = []
    for start, num_bytes in sorted((piece.data_ptr(), piece.numel()) for piece in pieces):
        first, last = start // _PAGE * _PAGE, -(-(start + num_bytes) // _PAGE) * _PAGE
        if ranges and first < ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
        else:
            ranges.append((first, last))
    return ranges


def _trim() -> None:
    """Have malloc return free pages to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def new_chunk(num_bytes: int) -> torch.Tensor:
    """Zeroed memory of whole pages, rounded up; huge pages if the system has them, as these fill and pin faster."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    num_bytes = -(-num_bytes // _PAGE) * _PAGE
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= 2**21:
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    _chunks[chunk.data_ptr()] = memory
    return chunk


def move_to_host(span: Span, phase: int) -> None:
    """Move tensors from any device into their own host memory, which begins at `phase` in a cache line."""
    memory = torch.empty(span.num_bytes + 2 * LINE, dtype=torch.uint8)
    _move(span, memory[-memory.data_ptr() % LINE + phase :][: span.num_bytes])


def _move(span: Span, target: torch.Tensor) -> None:
    """Move the tensors of a span into other memory, with the same distances between them."""
    target.copy_(_flat(span))
    for tensor, offset in [(tensor, span.offset(tensor)) for tensor in span.tensors]:
        start = (target.storage_offset() + offset) // tensor.element_size()
        empty = torch.empty(0, dtype=tensor.dtype)
        tensor.data = empty.set_(target.untyped_storage(), start, tensor.shape, tensor.stride())


def _flat(span: Span) -> torch.Tensor:
    """The bytes of a span, in place."""
    first = span.tensors[0].data
    flat = torch.empty(0, dtype=torch.uint8, device=first.device)
    if not span.num_bytes:
        return flat
    storage = first.untyped_storage()
    return flat.set_(storage, first.data_ptr() - storage.data_ptr(), (span.num_bytes,), (1,))
