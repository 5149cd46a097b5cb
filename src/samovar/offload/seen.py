"""Whether weights on the host have changed: torch's counts, and some of their bytes.

torch does not count writes through `tensor.data`, which is how adapters are merged. So a few bytes are compared each
time, and more of them once a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from .layout import flat_bytes, spans_of

_FEW, _MORE = 32, 256
"""Bytes of each tensor that are looked at each time, and once a run."""
_version = attrgetter("_version")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was changed, as far as torch counts; not at all for one that was made in inference mode."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # `is_inference` does not tell of a buffer that only took such data.
        return [_version_of(tensor) for tensor in tensors]


def _version_of(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        return 0


class Seen:
    """Some tensors on the host as they were."""

    def __init__(self, tensors: Sequence[torch.Tensor], wrappers: Sequence[torch.Tensor] = ()) -> None:
        """`wrappers`: where torch counts changes of what has no memory of its own."""
        self._counted = [*tensors, *wrappers]
        memories = [flat_bytes(span) for span in spans_of(tensors)]
        self._looked_at = [
            [memory[:: max(memory.numel() // count, 1) | 1].numpy() for memory in memories] for count in (_FEW, _MORE)
        ]
        self._versions = versions_of(self._counted)
        self._bytes = [[part.tobytes() for part in parts] for parts in self._looked_at]

    def is_same(self, *, thorough: bool = False) -> bool:
        """Whether nobody has changed them, as far as this shows."""
        now = [part.tobytes() for part in self._looked_at[thorough]]
        return versions_of(self._counted) == self._versions and now == self._bytes[thorough]
