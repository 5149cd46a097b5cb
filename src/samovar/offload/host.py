"""Where are weights kept on the host, and how much of its memory may be pinned?

There is one host copy. Weights move, once, into chunks that have their own pages; they stay if they are in one already.
They keep their phase (see `weights`), except for small ones bound for a device that places them elsewhere. Shared pages
must not be pinned: CUDA refuses to copy a tensor that is partly on pinned pages, and malloc may put one at either end
of any weight. Memory that cannot be pinned is used as it is, with a warning.

Tensors in a chunk have a storage each, over their own bytes of it: `torch.save` writes whole storages.
"""

from __future__ import annotations

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
from .weights import LEAST_PIECE, LINE, Piece, Span

_PAGE = mmap.PAGESIZE
_PINNABLE = 0.85
"""The share of the host's memory that may be pinned by default."""
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

    def __init__(self, stage: Stage, limit_bytes: int | None) -> None:
        """At most `limit_bytes` are pinned; by default, most of the host's memory."""
        whole = host_limit()
        self.limit_bytes = limit_bytes if limit_bytes is not None or whole is None else int(whole * _PINNABLE)
        self._stage = stage
        self._untrimmed_bytes = 0
        self._pinned: dict[int, torch.UntypedStorage] = {}
        """Pinned chunks by address. They must not be freed before they are unpinned."""
        self._finalizer = weakref.finalize(self, _unpin, stage, self._pinned)
        self._finalizer.atexit = False  # The end of the process unpins everything, and faster.

    def adopt(self, pieces: Sequence[Piece], *, pinned: bool) -> list[torch.Tensor]:
        """The host bytes of each piece. Small spans, and spans that cannot be pinned in place, move into new chunks."""
        sources = []
        for num_bytes, _, spans in pieces:
            span = spans[0][0]
            if span.num_bytes < LEAST_PIECE:
                sources.append(new_chunk(num_bytes)[:num_bytes])
                for small, offset in spans:
                    self._move(small, sources[-1][offset:])
            elif not pinned or span.tensors[0].untyped_storage().data_ptr() in _chunks or _is_pinned(flat_bytes(span)):
                sources.append(flat_bytes(span))
            else:
                sources.append(new_chunk(span.phase + span.num_bytes)[span.phase :][: span.num_bytes])
                self._move(span, sources[-1])
        if self._untrimmed_bytes >= _TRIM_BYTES:
            self._untrimmed_bytes = 0
            _trim()
        return sources

    def _move(self, span: Span, target: torch.Tensor) -> None:
        move(span, _own_storage(target[: span.num_bytes]) if span.num_bytes else target[:0])
        self._untrimmed_bytes += span.num_bytes
        self._stage.stats.copied_bytes += span.num_bytes

    def pin(self, sources: Iterable[torch.Tensor]) -> None:
        """Pin the chunks that hold these bytes, as far as the limit allows."""
        starts = {source.untyped_storage().data_ptr() for source in sources if not _is_pinned(source)}
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

    def release(self, sources: Iterable[torch.Tensor]) -> None:
        """Unpin the chunks that hold these bytes, which nobody needs any more."""
        starts = {source.untyped_storage().data_ptr() for source in sources} & self._pinned.keys()
        if starts:
            self._stage.stats.pinned_bytes -= sum(self._pinned[start].nbytes() for start in starts)
            _unpin(self._stage, {start: self._pinned.pop(start) for start in starts})

    def close(self) -> None:
        """Unpin everything."""
        self._finalizer()


def _unpin(stage: Stage, pinned: dict[int, torch.UntypedStorage]) -> None:
    if pinned:
        stage.synchronize()  # No copy may still read from memory that is unpinned.
    for start in pinned:
        stage.unregister(start)
    pinned.clear()


def _is_pinned(source: torch.Tensor) -> bool:
    """Whether memory is pinned, by anyone."""
    return torch.cuda.is_available() and source.is_pinned()


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
