"""Coded copies of weights: what crosses the bus in place of them, and the files that keep it between processes.

A weight itself stays where it is on the host; its copy is coded once (see `coding`). It is coded again if the weight
was replaced, if torch counted a change of it, or if one of some bytes that are compared each time, and of more that are
compared once a run, has changed: torch does not count writes through `tensor.data`, which is how adapters are merged.

A file has the copies of one component, in the format of safetensors. A copy is found by a hash of the raw weight, so a
file serves whatever holds the same weights, and never gives others. A damaged file, or one of other weights, costs a
warning and the time to code again; one that is not ours is left alone. A new file takes the place of the old one when
all of it is written, and a full disk loses nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from ..core.errors import ModelError
from ..hooks import current_run
from .coding import Coded, Form
from .host import new_chunk
from .staging import Stage
from .weights import LEAST_PIECE, Piece, flat_bytes

_FEW, _MORE = 32, 256
"""Bytes of a weight that are looked at each time, and once a run. Those of a file that is mapped are read for it."""
_RESIDUES = 1_048_573
"""Checksums tell words apart by their position modulo this: a prime, so that rows that are swapped show."""
_OURS = {"format": "samovar coded weights"}


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed, as far as torch counts; not at all for one that was made in inference mode."""
    try:
        return tensor._version
    except RuntimeError:  # `is_inference` does not tell of a buffer that only took such data.
        return 0


class Samples:
    """Some bytes of host memory, compared with what they were: few at each look, more once a run."""

    def __init__(self, memories: Sequence[torch.Tensor], more: int) -> None:
        """`memories`: bytes. `more`: how many of each are looked at once a run."""
        self._looked_at = [
            [memory[:: max(memory.numel() // count, 1) | 1].numpy() for memory in memories] for count in (_FEW, more)
        ]
        self._seen = [[part.tobytes() for part in parts] for parts in self._looked_at]

    def are_same(self, *, is_new_run: bool) -> bool:
        """Whether all that is looked at is as it was."""
        return [part.tobytes() for part in self._looked_at[is_new_run]] == self._seen[is_new_run]


class Copy:
    """What crosses the bus in place of a piece: coded, or without a form as it is, shared with other processes."""

    def __init__(
        self, memories: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], form: Form | None, data: torch.Tensor
    ) -> None:
        """`memories`: the bytes that it is a copy of."""
        self.form, self.data = form, data
        self._memories, self._tensors = memories, tensors
        self._samples = Samples(memories, _MORE)
        self._versions: list[int] | None = list(map(version_of, tensors))
        self._last_run: weakref.ref[Any] | None = None

    @property
    def address(self) -> int:
        """Where the weight is."""
        return self._memories[0].data_ptr()

    def is_of(self, truth: torch.Tensor) -> bool:
        """Whether it is a copy of these bytes, as they are now."""
        return self.address == truth.data_ptr() and self._memories[0].numel() == truth.numel() and self.is_fresh()

    def is_fresh(self) -> bool:
        """Whether the weight is as it was, as far as counts and samples tell."""
        run = current_run()
        is_new_run = run is not None and (self._last_run is None or self._last_run() is not run)
        if is_new_run:
            self._last_run = weakref.ref(run)
        if self._versions is not None and not self._samples.are_same(is_new_run=is_new_run):
            self.expire()
        return self._versions == list(map(version_of, self._tensors))

    def expire(self) -> None:
        """The weight has changed."""
        self._versions = None


def code(piece: Piece, stage: Stage, known: Copy | None, file: CodedFile | None) -> Copy | None:
    """The coded copy of a piece: the known one, if it still is that, or the file's. None if coding gains too little."""
    span = piece.spans[0][0]
    truth = flat_bytes(span)
    if known is not None and known.is_of(truth):
        return known
    is_words = span.tensors[0].dtype is torch.bfloat16 and span.start % 2 == 0 and span.num_bytes % 2 == 0
    if span.num_bytes < LEAST_PIECE or truth.device.type != "cpu" or not is_words:
        return None
    key = "" if file is None else hash_of(truth)
    coded = None if file is None else file.take(key)
    if coded is None:
        coded = _coded(truth, stage)
        if coded is not None and file is not None:
            file.put(key, coded.data)
    return None if coded is None else Copy([truth], span.tensors, *coded)


def _coded(truth: torch.Tensor, stage: Stage) -> Coded | None:
    coded = stage.encode(truth.view(torch.int16))
    if coded is None:
        return None
    data = new_chunk(coded.form.num_bytes)[: coded.form.num_bytes]
    # New pages fill slowly from a device, and quickly from memory, with all cores.
    data.copy_(coded.data if coded.data.device.type == "cpu" else _pinned(coded.data))
    return Coded(coded.form, data)


def _pinned(data: torch.Tensor) -> torch.Tensor:
    """What is on a device, in pinned memory."""
    return torch.empty_like(data, device="cpu", pin_memory=True).copy_(data)


def hash_of(data: torch.Tensor) -> str:
    """What only equal bytes in host memory have in common."""
    return hashlib.sha256(data.numpy().data).hexdigest()


def checksum(data: torch.Tensor) -> torch.Tensor:
    """A number on the same device that tells whether bytes have changed. It takes 24 MiB beside them at most.

    Words have half the bits of the sum, so that each bit of them counts: the highest bit of a sum is the same after any
    two changes of it.
    """
    if data.storage_offset() % 4 or data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    words = data.view(torch.int32)
    sums = torch.zeros(max(min(words.numel(), _RESIDUES), 1), dtype=torch.int64, device=data.device)
    for part in torch.split(words, sums.numel()):  # To sum them at once, torch would make a copy twice as large.
        sums[: part.numel()] += part
    weights = torch.arange(1, 2 * sums.numel(), 2, device=words.device) * -7046029254386353131
    return (sums * weights).sum()


class CodedFile:
    """The coded weights of one component, by the hash of each raw one, as far as a file has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        self._hashes: dict[str, str] = {}
        """Of the coded weights in the file, by the hash of the raw ones."""
        self._written: dict[str, torch.Tensor] = {}
        """What a new file will hold."""
        self._missing = 0
        self._is_foreign = False
        if not path.exists():
            return
        try:
            self._file = safe_open(path, "pt")
            self._hashes = dict(self._file.metadata() or {})
            if not _OURS.items() <= self._hashes.items():
                raise ModelError("it holds no coded weights")
        except (OSError, SafetensorError, ModelError) as error:
            self._file, self._hashes, self._is_foreign = None, {}, True
            self._warn(f"cannot be used, and is left as it is: {error}. Delete it to have it made again")

    def take(self, key: str) -> Coded | None:
        """The coded form of a weight, in a new chunk, if the file has it."""
        if key not in self._hashes:
            return None
        try:
            found = self._file.get_tensor(key)
            data = new_chunk(found.numel())[: found.numel()].copy_(found)
            if hash_of(data) != self._hashes[key]:
                raise ModelError("some of its weights are damaged")
            form = Form.read(data)
        except (OSError, SafetensorError, ModelError) as error:
            self._warn(f"cannot be used: {error}")
            return None
        self._written[key] = data
        return Coded(form, data)

    def put(self, key: str, data: torch.Tensor) -> None:
        """Keep what had to be coded."""
        self._missing += 1
        self._written[key] = data

    def close(self) -> None:
        """Write a new file if anything was missing, and let go of everything."""
        if self._missing and self._file is not None:
            self._warn(f"is not of these weights: {self._missing} tensors were coded anew, and it is replaced")
        self._file = None
        if self._missing and not self._is_foreign:
            try:
                self._write()
            except OSError as error:
                self._warn(f"could not be written, so the weights will be coded again next time: {error}")
        self._written, self._hashes, self._missing = {}, {}, 0

    def _write(self) -> None:
        """Beside it, and then in its place. The library would have a second copy of everything in memory."""
        parts = dict(sorted(self._written.items()))
        header: dict[str, Any] = {"__metadata__": _OURS | {key: hash_of(data) for key, data in parts.items()}}
        end = 0
        for key, data in parts.items():
            start, end = end, end + data.numel()
            header[key] = {"dtype": "U8", "shape": [data.numel()], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=self.path.name, delete=False) as file:
            try:
                _fill(file, text + b" " * (-len(text) % 8), parts.values())
                os.replace(file.name, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise

    def _warn(self, what: str) -> None:
        warnings.warn(f"The file of coded weights {self.path} {what}.", stacklevel=2)


def _fill(file: IO[bytes], header: bytes, parts: Iterable[torch.Tensor]) -> None:
    file.write(len(header).to_bytes(8, "little") + header)
    for data in parts:
        file.write(data.numpy().data)
    file.flush()
    os.fsync(file.fileno())
