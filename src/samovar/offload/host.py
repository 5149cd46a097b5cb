"""Where do weights lie on the host, and how much of its memory may be pinned?

One copy, made once at most: a flat chunk for each block, with pages of its own, to which its weights are moved. They
begin where in a cache line they did, but for small ones that are copied to a device which puts them elsewhere. They
stay where they are if those pages are theirs alone already. Pages that are shared must not be pinned: CUDA refuses to
copy what lies partly on pinned ones, and that may be anybody's tensor. malloc may put one at either end of any weight,
however large. Memory that cannot be pinned is used as it is, with a warning that says what that costs.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import warnings
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from .sizes import format_bytes
from .staging import Stage
from .weights import LEAST_PIECE, LINE, Layout, Span, room_for

_PAGE = mmap.PAGESIZE
_SHARE = 0.85
"""The part of the host's memory that may be pinned: the rest is for everybody else."""
_THREADS = 4
_TRIM_BYTES = 2**28
"""Once so much was moved, malloc is asked to give back what it keeps of the old places."""


@dataclass
class HostStats:
    """Bytes of the host copy."""

    in_place_bytes: int = 0
    copied_bytes: int = 0
    pinned_bytes: int = 0
    pageable_bytes: int = 0


def host_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process may use in all: the machine's, or its control group's if that is less."""
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


def file_ranges(maps: str) -> list[tuple[int, int]]:
    """The address ranges that are pages of files, in order, from what /proc/self/maps says."""
    ranges = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) > 4 and fields[4] != "0":
            start, _, end = fields[0].partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


class HostMemory:
    """The host's side of offloaded weights."""

    def __init__(self, stage: Stage, limit_bytes: int | None) -> None:
        """With `limit_bytes`, no more than that is pinned."""
        whole = host_limit()
        self.limit_bytes = limit_bytes if limit_bytes is not None or whole is None else int(whole * _SHARE)
        self.stats = HostStats()
        self._stage = stage
        self._untrimmed_bytes = 0
        self._pinned: dict[int, int] = {}
        """Page-aligned start and end of what is pinned."""
        self._starts: list[int] = []
        self._kept: list[torch.Tensor] = []
        """Pinned memory must not be freed before it is unpinned."""
        self._files: list[tuple[int, int]] = []
        self._finalizer = weakref.finalize(self, _unpin, stage, self._pinned, self._kept)
        self._finalizer.atexit = False  # The end of the process unpins everything, and faster.

    def look_around(self) -> None:
        """Find out which memory is that of files; to be done before `adopt`, once for many."""
        self._files = file_ranges(_read(Path("/proc/self/maps")))

    def adopt(self, spans: Sequence[Span], layout: Layout, *, pinned: bool) -> list[torch.Tensor]:
        """The bytes to copy for each piece, in place or copied; tensors that were copied then lie in the copy."""
        rooms = [0 if self._stays(span, pinned) else room_for(span.num_bytes, span.phase) for span in spans]
        is_small = [span.num_bytes < LEAST_PIECE for span in spans]
        used = layout.pieces[0] if any(is_small) else 0
        chunk = new_chunk(used + sum(room for room, small in zip(rooms, is_small, strict=True) if not small))
        pieces = [chunk[:used] for _ in layout.pieces]  # The first, if there are small ones; the others follow.
        for span, (piece, offset), room, small in zip(spans, layout.places, rooms, is_small, strict=True):
            if not room:
                pieces[piece] = _flat(span)
                self.stats.in_place_bytes += span.num_bytes
                continue
            start = offset if small else used + span.phase
            copy = chunk[start : start + span.num_bytes]
            if not small:
                pieces[piece] = copy
                used += room
            _move(span, copy)
            self.stats.copied_bytes += span.num_bytes
        self._untrimmed_bytes += chunk.numel()
        if self._untrimmed_bytes >= _TRIM_BYTES:
            self._untrimmed_bytes = 0
            _trim()
        return pieces

    def _stays(self, span: Span, pinned: bool) -> bool:
        if span.num_bytes < LEAST_PIECE:
            return False
        return not pinned or (_has_own_pages(span) and not self._is_file(span)) or self._is_pinned(_flat(span))

    def _is_file(self, span: Span) -> bool:
        after = bisect.bisect_right(self._files, (span.start, 2**64))
        return any(end > span.start for _, end in self._files[max(after - 1, 0) : after]) or (
            after < len(self._files) and self._files[after][0] < span.start + span.num_bytes
        )

    def pin(self, pieces: Iterable[torch.Tensor]) -> None:
        """Pin what is not pinned yet, neighbours together, as much as the limit allows."""
        wanted = [piece for piece in pieces if piece.numel() and not self._is_pinned(piece)]
        ranges = _page_ranges(wanted)
        allowed, left = [], float("inf") if self.limit_bytes is None else self.limit_bytes - self.stats.pinned_bytes
        for start, end in ranges:
            if end - start <= left:
                allowed.append((start, end))
                left -= end - start
        with ThreadPoolExecutor(_THREADS) as threads:
            problems = list(threads.map(lambda range_: self._stage.register(range_[0], range_[1] - range_[0]), allowed))
        done = {range_ for range_, problem in zip(allowed, problems, strict=True) if problem is None}
        self._pinned.update(done)
        self._starts = sorted(self._pinned)
        self.stats.pinned_bytes += sum(end - start for start, end in done)
        self._kept.extend(piece for piece in wanted if self._is_pinned(piece))
        pageable = sum(end - start for start, end in ranges if (start, end) not in done)
        self.stats.pageable_bytes += pageable
        if pageable:
            self._warn(pageable, next((problem for problem in problems if problem), None))

    def _is_pinned(self, piece: torch.Tensor) -> bool:
        start, end = piece.data_ptr(), piece.data_ptr() + piece.numel()
        before = bisect.bisect_right(self._starts, start) - 1
        return (before >= 0 and end <= self._pinned[self._starts[before]]) or _pinned_by_torch(piece)

    def _warn(self, pageable: int, problem: str | None) -> None:
        reason = problem or f"no more than {format_bytes(self.limit_bytes or 0)} may be pinned (host_memory)"
        warnings.warn(
            f"{format_bytes(pageable)} of weights could not be pinned: {reason}. They are copied from pageable memory, "
            "about three times as slowly, and the GPU waits for them. Allow more host memory, or offload less.",
            stacklevel=2,
        )

    def close(self) -> None:
        """Unpin everything."""
        self._starts = []
        self._finalizer()


def _unpin(stage: Stage, pinned: dict[int, int], kept: list[torch.Tensor]) -> None:
    if pinned:
        stage.synchronize()  # Nothing may still be copied from what is unpinned.
    for start in pinned:
        stage.unregister(start)
    pinned.clear()
    kept.clear()


def _page_ranges(pieces: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """The pages that pieces lie on; those that share one are one range, for it cannot be pinned twice."""
    ranges: list[tuple[int, int]] = []
    for start, num_bytes in sorted((piece.data_ptr(), piece.numel()) for piece in pieces):
        first, last = start // _PAGE * _PAGE, -(-(start + num_bytes) // _PAGE) * _PAGE
        if ranges and first < ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
        else:
            ranges.append((first, last))
    return ranges


def _has_own_pages(span: Span) -> bool:
    """Whether the memory that a span is part of is whole pages, so that nothing else is on them."""
    storage = span.tensors[0].untyped_storage()
    return storage.data_ptr() % _PAGE == 0 and storage.nbytes() % _PAGE == 0


def _trim() -> None:
    """Let malloc give free pages back to the system, where it can: it keeps those between others that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def new_chunk(num_bytes: int) -> torch.Tensor:
    """Zeroed memory on pages of its own, large pages if the system has them: they are quicker to fill and to pin. There
    is a little more of it than was asked for, up to the end of the last page."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    num_bytes = -(-num_bytes // _PAGE) * _PAGE
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= 2**21:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def move_to_host(span: Span, phase: int) -> None:
    """Let tensors, wherever they are, lie in memory of the host of their own, which begins so far into a cache line."""
    memory = torch.empty(span.num_bytes + 2 * LINE, dtype=torch.uint8)
    _move(span, memory[-memory.data_ptr() % LINE + phase :][: span.num_bytes])


def _move(span: Span, target: torch.Tensor) -> None:
    """Let the tensors of a span lie in other memory, as far apart as they do."""
    target.copy_(_flat(span))
    for tensor, start in [(tensor, span.offset(tensor)) for tensor in span.tensors]:
        tensor.data = _view(target, start, tensor)


def _flat(span: Span) -> torch.Tensor:
    """The bytes of a span, as they lie."""
    first = span.tensors[0].data
    flat = torch.empty(0, dtype=torch.uint8, device=first.device)
    if not span.num_bytes:
        return flat
    storage = first.untyped_storage()
    return flat.set_(storage, first.data_ptr() - storage.data_ptr(), (span.num_bytes,), (1,))


def _view(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    start = (flat.storage_offset() + offset) // like.element_size()
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(flat.untyped_storage(), start, like.shape, like.stride())


def _pinned_by_torch(piece: torch.Tensor) -> bool:
    return torch.cuda.is_available() and piece.is_pinned()
