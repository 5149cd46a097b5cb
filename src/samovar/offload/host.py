"""Where are weights kept on the host, and how much of its memory may be pinned?

There is one host copy. Weights move, once, into chunks that have their own pages; they stay if they are in one already.
They keep their phase (see `weights`), except for small ones bound for a device that places them elsewhere. Shared pages
must not be pinned: CUDA refuses to copy a tensor that is partly on pinned pages, and malloc may put one at either end
of any weight. Memory that cannot be pinned is used as it is, with a warning.

Tensors in a chunk have a storage each, over their own bytes of it: `torch.save` writes whole storages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .shared import shared_copy
from .sizes import format_bytes
from .spill import spill
from .staging import Stage
from .tiers import BOUNCE_BUFFERS, PINNABLE, Tier, TierPlan
from .truth import READERS, Bounced, Files, ModelFile, Truth, Truths, can_watch, disk_speed
from .weights import LEAST_PIECE, LINE, Piece, Span, spans_of

_PAGE = mmap.PAGESIZE
_THREADS = 4
_SAMPLES = 64
"""Bytes of each piece that are looked at for changes that torch does not count."""
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

    def __init__(self, stage: Stage, limit_bytes: int | None) -> None:
        """At most `limit_bytes` are pinned; by default, most of the host's memory."""
        whole = host_limit()
        self.limit_bytes = limit_bytes if limit_bytes is not None or whole is None else int(whole * PINNABLE)
        self._stage = stage
        self._untrimmed_bytes = 0
        self.spill_folder: str | Path | None = None
        """Where weights that are over the budget and in no file are written to."""
        self.shares = False
        """Whether copies of what is in files are shared with other processes."""
        self._buffers: list[torch.Tensor] = []
        self._buffer_bytes = 0
        self._files = Files()
        self._derived: weakref.WeakKeyDictionary[mmap.mmap, list[Truth]] = weakref.WeakKeyDictionary()
        """For chunks that hold copies of what is in files, where they come from."""
        self._copies: weakref.WeakValueDictionary[Any, mmap.mmap] = weakref.WeakValueDictionary()
        """The same chunks by the addresses of what they are copies of."""
        self._pinned: dict[int, torch.UntypedStorage] = {}
        """Pinned chunks by address. They must not be freed before they are unpinned."""
        self._finalizer = weakref.finalize(self, _close, stage, self._pinned)
        self._finalizer.atexit = False  # The end of the process unpins everything, and faster.

    def adopting(self) -> contextlib.AbstractContextManager[None]:
        """Around the adoption of many weights, so that it is quick."""
        return self._files.reading_once()

    def truths(self, pieces: Sequence[Piece]) -> list[list[tuple[int, Truth]]]:
        """For each piece, its spans as they are in memory or in files, each with its offset."""
        found = iter(self._files.find([(span, flat_bytes(span)) for piece in pieces for span, _ in piece.spans]))
        return [[(offset - piece.start, next(found)) for _, offset in piece.spans] for piece in pieces]

    def adopt(self, pieces: Sequence[Piece], *, pinned: bool, tier: Tier = "pinned") -> list[torch.Tensor | Bounced]:
        """The host bytes of each piece.

        What is in files stays there and is copied into new chunks. Other small spans, and other spans that cannot be
        pinned in place, move into new chunks. In other tiers than "pinned", everything stays where it is.
        """
        sources: list[torch.Tensor | Bounced] = []
        truths = self.truths(pieces)
        if tier != "pinned" and self._buffers:
            return [Bounced(_length(piece), tuple(parts)) for piece, parts in zip(pieces, truths, strict=True)]
        for (num_bytes, _, spans), parts in zip(pieces, truths, strict=True):
            span = spans[0][0]
            if pinned and can_watch(os.getpid()) and all(truth.is_clean() for _, truth in parts):
                sources.append(self._derive(parts))
            elif span.num_bytes < LEAST_PIECE:
                memory = new_chunk(num_bytes)[:num_bytes]
                for small, offset in spans:
                    self._move(small, memory[offset:])
                sources.append(memory)
            elif not pinned or span.tensors[0].untyped_storage().data_ptr() in _chunks or _is_pinned(flat_bytes(span)):
                sources.append(flat_bytes(span))
            else:
                memory = new_chunk(span.phase + span.num_bytes)[span.phase :][: span.num_bytes]
                self._move(span, memory)
                sources.append(memory)
        if self._untrimmed_bytes >= _TRIM_BYTES:
            self._untrimmed_bytes = 0
            trim_heap()
        return sources

    def _derive(self, parts: Sequence[tuple[int, Truth]]) -> torch.Tensor:
        """A chunk with a copy of what is in files."""
        num_bytes = parts[-1][0] + parts[-1][1].num_bytes
        key = tuple((offset, truth.memory.data_ptr(), truth.num_bytes) for offset, truth in parts)
        known = self._copies.get(key)
        if known is not None:
            return _whole(known)[:num_bytes]
        copied = sum(truth.num_bytes for _, truth in parts)

        def fill(memory: torch.Tensor) -> None:
            with ThreadPoolExecutor(READERS) as threads:
                Bounced(num_bytes, tuple(parts)).read(0, memory, threads)
            self._stage.stats.copied_bytes += copied

        shared = shared_copy(parts, num_bytes, fill) if self.shares and num_bytes else None
        memory = new_chunk(num_bytes) if shared is None else _whole(shared)
        if shared is not None:
            _chunks[memory.data_ptr()] = shared
            self._stage.stats.shared_bytes += copied
        else:
            fill(memory[:num_bytes])
        if num_bytes:
            chunk = self._copies[key] = _chunks[memory.data_ptr()]
            self._derived[chunk] = [truth for _, truth in parts]
        return memory[:num_bytes]

    def release(self, sources: Iterable[torch.Tensor | Bounced], used: Iterable[torch.Tensor | Bounced] = ()) -> None:
        """Unpin the chunks that hold these bytes, which nobody needs any more, but for those that are `used`."""
        chunks = {id(chunk): chunk for source in sources if (chunk := _chunk_of(source)) is not None}
        for source in used:
            chunks.pop(id(_chunk_of(source)), None)
        starts = [start for chunk in chunks.values() if (start := _whole(chunk).data_ptr()) in self._pinned]
        if starts:
            self._stage.stats.pinned_bytes -= sum(self._pinned[start].nbytes() for start in starts)
            _unpin(self._stage, {start: self._pinned.pop(start) for start in starts})

    def copied_from(self, sources: Iterable[torch.Tensor | Bounced]) -> Truths:
        """What these are copies of, as far as that is in files."""
        chunks = [chunk for source in sources if (chunk := _chunk_of(source)) is not None]
        return Truths([truth for chunk in chunks for truth in self._derived.get(chunk, ())])

    def fingerprint(self, source: torch.Tensor | Bounced) -> Any:
        """What a source holds, as far as a quick look tells. What is in files is not looked at: nobody wrote to it."""
        truths = (
            [truth for _, truth in source.parts] if isinstance(source, Bounced) else self.copied_from([source]).truths
        )
        memories = [truth.memory for truth in truths if not truth.is_clean()]
        if isinstance(source, torch.Tensor) and not truths:
            memories = [source]
        return [memory[:: max(memory.numel() // _SAMPLES, 1) | 1].numpy().tobytes() for memory in memories]

    def anonymous_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of these tensors that are in memory alone, and in no file."""
        truths = self._files.find((span, flat_bytes(span)) for span in spans_of(tensors))
        return sum(truth.anonymous_bytes for truth in truths)

    def spill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move what is in memory alone into a file."""
        spans = [(span, flat_bytes(span)) for span in spans_of(tensors)]
        truths = self._files.find(spans)
        anonymous = [pair for pair, truth in zip(spans, truths, strict=True) if truth.anonymous_bytes]
        if anonymous and self.spill_folder is not None:
            descriptor, copies = spill(anonymous, self.spill_folder)
            self._files.add(copies[0], ModelFile(f"A file in {self.spill_folder}", descriptor))
            for (span, _), copy in zip(anonymous, copies, strict=True):
                _point_at(span, copy)

    def disk_speed(self) -> float | None:
        """Measured bytes per second of reading the largest file; None if there is none that tells."""
        file = max(self._files, key=lambda file: file.stat.st_size, default=None)
        return None if file is None else disk_speed(file)

    def follow(self, tiers: TierPlan, spill_folder: str | Path | None, *, shares: bool) -> None:
        """Provide the buffers that what is not pinned passes through."""
        self.spill_folder, self.shares = spill_folder, shares
        num_bytes = tiers.buffer_bytes
        if num_bytes == self._buffer_bytes:
            return
        self._stage.bounce_through(())
        self.release(self._buffers, ())
        self._buffers = [new_chunk(num_bytes)[:num_bytes] for _ in range(BOUNCE_BUFFERS if num_bytes else 0)]
        self._buffer_bytes = num_bytes
        self.pin(self._buffers)
        self._stage.bounce_through(self._buffers)

    def _move(self, span: Span, target: torch.Tensor) -> None:
        move(span, _own_storage(target[: span.num_bytes]) if span.num_bytes else target[:0])
        self._untrimmed_bytes += span.num_bytes
        self._stage.stats.copied_bytes += span.num_bytes

    def pin(self, sources: Iterable[torch.Tensor | Bounced]) -> None:
        """Pin the chunks that hold these bytes, as far as the limit allows."""
        memories = [source for source in sources if isinstance(source, torch.Tensor)]
        starts = {memory.untyped_storage().data_ptr() for memory in memories if not _is_pinned(memory)}
        found = [_whole(_chunks[start]) for start in starts if start in _chunks]
        chunks = {chunk.data_ptr(): chunk.untyped_storage() for chunk in found}
        wanted = [chunk for start, chunk in chunks.items() if start not in self._pinned]
        left = float("inf")
        if self.limit_bytes is not None:
            left = self.limit_bytes - sum(chunk.nbytes() for chunk in self._pinned.values())
        allowed = []
        for chunk in wanted:
            if chunk.nbytes() <= left:
                allowed.append(chunk)
                left -= chunk.nbytes()
        with ThreadPoolExecutor(_THREADS) as threads:
            problems = list(threads.map(lambda c: self._stage.register(c.data_ptr(), c.nbytes()), allowed))
        done = {c.data_ptr(): c for c, problem in zip(allowed, problems, strict=True) if problem is None}
        self._pinned.update(done)
        pinned_bytes = sum(chunk.nbytes() for chunk in done.values())
        pageable_bytes = sum(chunk.nbytes() for chunk in wanted) - pinned_bytes
        self._stage.stats.pinned_bytes += pinned_bytes
        self._stage.stats.pageable_bytes += pageable_bytes
        if pageable_bytes:
            problem = next((problem for problem in problems if problem), None)
            reason = problem or f"host_memory allows {format_bytes(self.limit_bytes or 0)}"
            warnings.warn(
                f"{format_bytes(pageable_bytes)} of weights could not be pinned: {reason}. Copies from pageable memory "
                "are about three times as slow, and the GPU waits for them. Raise host_memory, or offload less.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Unpin everything."""
        self._finalizer()


def _close(stage: Stage, pinned: dict[int, torch.UntypedStorage]) -> None:
    stage.bounce_through(())
    _unpin(stage, pinned)


def _unpin(stage: Stage, pinned: dict[int, torch.UntypedStorage]) -> None:
    if pinned:
        stage.synchronize()  # No copy may still read from memory that is unpinned.
    for start in pinned:
        stage.unregister(start)
    pinned.clear()


def _chunk_of(source: torch.Tensor | Bounced) -> mmap.mmap | None:
    """The chunk that a source is in, if any."""
    return None if isinstance(source, Bounced) else _chunks.get(source.untyped_storage().data_ptr())


def _length(piece: Piece) -> int:
    """Bytes of a piece from the start of its first span to the end of its last."""
    span, offset = piece.spans[-1]
    return offset - piece.start + span.num_bytes


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


def move_to_host(span: Span, phase: int) -> None:
    """Move tensors from any device into their own host memory, which begins at `phase` in a cache line."""
    memory = torch.empty(span.num_bytes + 2 * LINE, dtype=torch.uint8, device="cpu")
    move(span, memory[-memory.data_ptr() % LINE + phase :][: span.num_bytes])


def move(span: Span, target: torch.Tensor) -> None:
    """Move the tensors of a span into other memory, with the same distances between them."""
    target.copy_(flat_bytes(span))
    _point_at(span, target)


def _point_at(span: Span, target: torch.Tensor) -> None:
    """Have the tensors of a span use other memory that holds the same bytes."""
    for tensor, offset in [(tensor, span.offset(tensor)) for tensor in span.tensors]:
        start = (target.storage_offset() + offset) // tensor.element_size()
        empty = torch.empty(0, dtype=tensor.dtype, device=target.device)
        tensor.data = empty.set_(target.untyped_storage(), start, tensor.shape, tensor.stride())


def flat_bytes(span: Span) -> torch.Tensor:
    """The bytes of a span, in place."""
    first = span.tensors[0].data
    flat = torch.empty(0, dtype=torch.uint8, device=first.device)
    if not span.num_bytes:
        return flat
    storage = first.untyped_storage()
    return flat.set_(storage, first.data_ptr() - storage.data_ptr(), (span.num_bytes,), (1,))
