"""Is the coded copy of a weight still that of the weight?

The weight itself stays where it is on the host; what crosses the bus is a copy, coded once (see `coding`). It is coded
again if the weight was replaced, if torch counted a change of it, or if one of some bytes that are compared each time
has changed: torch does not count writes through `tensor.data`, which is how adapters are merged.
"""

from __future__ import annotations

import torch

from .coded_file import CodedFile
from .coding import Form, expected_ratio
from .host import flat_bytes, new_chunk
from .staging import Stage
from .weights import LEAST_PIECE, Piece

_SAMPLES = 32


class CodedCopy:
    """What crosses the bus in place of a piece."""

    def __init__(self, truth: torch.Tensor, tensors: tuple[torch.Tensor, ...], form: Form, data: torch.Tensor) -> None:
        self.form, self.data = form, data
        self._truth, self._tensors = truth, tensors
        self._looked_at = truth[:: max(truth.numel() // _SAMPLES, 1) | 1].numpy()
        self._seen = self._looked_at.tobytes()
        self._versions = self._read_versions()

    @property
    def address(self) -> int:
        """Where the weight is."""
        return self._truth.data_ptr()

    def is_of(self, truth: torch.Tensor) -> bool:
        """Whether it is a copy of these bytes, as they are now."""
        is_same_place = self._truth.data_ptr() == truth.data_ptr() and self._truth.numel() == truth.numel()
        return is_same_place and self.is_fresh()

    def is_fresh(self) -> bool:
        """Whether the weight is as it was, as far as a quick look tells."""
        return self._versions == self._read_versions() and self._looked_at.tobytes() == self._seen

    def renewed(self, stage: Stage) -> CodedCopy | None:
        """A copy of the weight as it is now; None if coding gains too little."""
        return _coded(self._truth, self._tensors, stage)

    def expire(self) -> None:
        """The weight has changed."""
        self._versions = []

    def _read_versions(self) -> list[int]:
        return [version_of(tensor) for tensor in self._tensors]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed, as far as torch counts; not at all for one that was made in inference mode."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def code(piece: Piece, stage: Stage, known: CodedCopy | None, file: CodedFile | None) -> CodedCopy | None:
    """The coded copy of a piece: the known one, if it still is that, or the file's. None if coding gains too little."""
    span = piece.spans[0][0]
    truth = flat_bytes(span)
    if known is not None and known.is_of(truth):
        return known
    if span.num_bytes < LEAST_PIECE or truth.device.type != "cpu" or span.start % 2 or span.num_bytes % 2:
        return None
    dtype = span.tensors[0].dtype
    found = file.take(truth, dtype) if file is not None and expected_ratio(dtype) < 1 else None
    if found is not None:
        return CodedCopy(truth, span.tensors, found.form, found.data)
    copy = _coded(truth, span.tensors, stage)
    if copy is not None and file is not None:
        file.put(truth, dtype, copy.data)
    return copy


def _coded(truth: torch.Tensor, tensors: tuple[torch.Tensor, ...], stage: Stage) -> CodedCopy | None:
    coded = stage.encode(truth.view(torch.int16), tensors[0].dtype)
    if coded is None:
        return None
    data = new_chunk(coded.form.num_bytes)[: coded.form.num_bytes]
    # New pages fill slowly from a device, and quickly from memory, with all cores.
    data.copy_(coded.data if coded.data.device.type == "cpu" else _pinned(coded.data))
    return CodedCopy(truth, tensors, coded.form, data)


def _pinned(data: torch.Tensor) -> torch.Tensor:
    """What is on a device, in pinned memory."""
    return torch.empty_like(data, device="cpu", pin_memory=True).copy_(data)
