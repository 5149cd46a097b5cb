"""How do weights that are in no file get into one? Written, checked, and mapped in place of the memory they were in.

The file has no name once it is mapped, so nothing is left of it when the process ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from ..core.errors import SettingError
from .sizes import format_bytes
from .weights import LINE, Span

_SLICE = 2**24


def spill(spans: Sequence[tuple[Span, torch.Tensor]], folder: str | Path) -> tuple[int, list[torch.Tensor]]:
    """Write spans, given with their memory, to a file. Its descriptor, and the same bytes as private mappings of it.

    Nothing has changed if this fails. Each span begins where in a cache line it did.
    """
    offsets, used = [], 0
    for span, _ in spans:
        offsets.append(-(-used // LINE) * LINE + span.phase)
        used = offsets[-1] + span.num_bytes
    try:
        descriptor, name = tempfile.mkstemp(prefix="samovar-", suffix=".spill", dir=folder)
    except OSError as error:
        raise _refused(folder, used, error) from error
    try:
        os.unlink(name)
        for (_, memory), offset in zip(spans, offsets, strict=True):
            _write(descriptor, memory, offset)
        os.fsync(descriptor)
        os.ftruncate(descriptor, used)
        mapped = mmap.mmap(descriptor, used, access=mmap.ACCESS_COPY)
    except OSError as error:
        os.close(descriptor)
        raise _refused(folder, used, error) from error
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    copies = [whole[offset:][: span.num_bytes] for (span, _), offset in zip(spans, offsets, strict=True)]
    if not all(torch.equal(copy, memory) for copy, (_, memory) in zip(copies, spans, strict=True)):
        os.close(descriptor)
        raise _refused(folder, used, OSError("what was read back differs from what was written"))
    return descriptor, copies


def _write(descriptor: int, memory: torch.Tensor, offset: int) -> None:
    view = memoryview(bytearray()) if not memory.numel() else memoryview(memory.numpy().data)
    while view:
        count = os.pwrite(descriptor, view[:_SLICE], offset)
        view, offset = view[count:], offset + count


def _refused(folder: str | Path, num_bytes: int, error: OSError) -> SettingError:
    return SettingError(
        f"{format_bytes(num_bytes)} of weights could not be written to spill_folder={str(folder)!r}: "
        f"{error.strerror or error}. They are where they were. Name a folder with more room, or raise host_memory.",
        param="spill_folder",
    )
