"""Is the coded copy of a weight still that of the weight?

The weight itself stays where it is on the host; what crosses the bus is a copy, coded once (see `coding`). It is coded
again if the weight was replaced, if torch counted a change of it, or if one of some bytes that are compared each time
has changed: torch does not count writes through `tensor.data`, which is how adapters are merged.
"""

from __future__ import annotations

import torch

from .coding import Form
from .host import flat_bytes, new_chunk
from .staging import Stage
from .weights import Piece

_SAMPLES = 64


class CodedCopy:
    """What crosses the bus in place of a piece."""

    def __init__(self, truth: torch.Tensor, tensors: tuple[torch.Tensor, ...], form: Form, data: torch.Tensor) -> None:
        self.form, self.data = form, data
        self._truth, self._tensors = truth, tensors
        self._looked_at = truth[:: max(truth.numel() // _SAMPLES, 1) | 1]
        self._seen = self._looked_at.clone()
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
        return self._versions == self._read_versions() and torch.equal(self._looked_at, self._seen)

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


def code(piece: Piece, stage: Stage, known: CodedCopy | None) -> CodedCopy | None:
    """The coded copy of a piece of one large span: the known one, if it still is. None if coding gains too little."""
    span = piece.spans[0][0]
    truth = flat_bytes(span)
    if known is not None and known.is_of(truth):
        return known
    if len(piece.spans) > 1 or truth.device.type != "cpu" or span.start % 2 or span.num_bytes % 2:
        return None
    coded = stage.encode(truth.view(torch.int16), span.tensors[0].dtype)
    if coded is None:
        return None
    data = new_chunk(coded.form.num_bytes)[: coded.form.num_bytes]
    data.copy_(coded.data)
    return CodedCopy(truth, span.tensors, coded.form, data)
