"""Can a step be computed for some images of a batch only? Their rows of every input are taken, and the model is called
with a smaller batch.

Which inputs have a row for each image is seen by their length alone. So the first time for each form of inputs the
whole batch is computed beside it: where the rows differ by more than rounding, batches stay whole.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ..core import nested
from ..core.errors import ModelError
from ..trace.passes import Outlook
from .forecast import take_apart
from .inputs import Inputs
from .model import Forward
from .pace import numbers_in
from .rows import RowHistory, Tensors

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_ROUNDING = 0.03
"""Largest difference of a row that is computed in another batch, relative to its size; of 16-bit numbers."""
_MOST_FORMS = 32
_logger = logging.getLogger(__name__)


class SomeRows:
    """Computes some images of a batch."""

    def __init__(self) -> None:
        self._fits: dict[Hashable, bool] = {}
        """By form of inputs: whether the rows of some images are what they are in the whole batch."""

    def compute(
        self, inputs: Inputs, forward: Forward, history: RowHistory, outlook: Outlook, due: Sequence[bool]
    ) -> Tensors | None:
        """What a step gives: computed for the images that are due, forecast for others; None to compute them all."""
        count, length = len(due), len(next(iter(numbers_in(history.newest))))
        images = _rounded_up(due)
        if len(images) == count or self._fits.get(inputs.signature, True) is False:
            return None
        rows = torch.tensor([image + first for first in range(0, length, count) for image in images])
        whole: Tensors | None = None
        try:
            if inputs.signature not in self._fits:
                whole = take_apart(forward(*inputs.spare()))[1]
            some = take_apart(forward(*_taken(inputs, rows, length)))[1]
            full = None if some is None else _put(some, rows, length, outlook)
            if whole is not None:
                self._learn(inputs.signature, full is not None and _are_near(some or (), whole, rows))
        except (RuntimeError, ValueError, TypeError, ModelError) as error:
            if isinstance(error, torch.OutOfMemoryError) or inputs.signature in self._fits:
                raise
            full = None
            self._learn(inputs.signature, False)
            _logger.debug("batches are computed whole: %s", error)
        return full if self._fits[inputs.signature] else whole

    def _learn(self, form: Hashable, fits: bool) -> None:
        self._fits[form] = fits
        if len(self._fits) > _MOST_FORMS:
            self._fits.pop(next(iter(self._fits)))


def _rounded_up(due: Sequence[bool]) -> list[int]:
    """The images that are due, and others up to a power of two: few sizes are compiled or recorded."""
    wanted = [image for image, is_due in enumerate(due) if is_due]
    others = [image for image, is_due in enumerate(due) if not is_due]
    size = 1 << (len(wanted) - 1).bit_length()
    return sorted([*wanted, *others[: size - len(wanted)]])


def _taken(inputs: Inputs, rows: torch.Tensor, length: int) -> tuple[Any, Any]:
    """The arguments with these rows of all tensors of that length."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        is_row_by_row = tensor.dim() > 0 and tensor.shape[0] == length
        return tensor.index_select(0, rows.to(tensor.device)) if is_row_by_row else tensor

    args, kwargs = nested.map_tensors(take, (inputs.args, inputs.kwargs))
    return args, kwargs


def _put(some: Tensors, rows: torch.Tensor, length: int, outlook: Outlook) -> list[torch.Tensor | None] | None:
    """The outputs of all images; None if they have other forms than those of some."""
    full: list[torch.Tensor | None] = []
    for index, part in enumerate(some):
        forecast = outlook.value(index)
        if part is None or forecast is None:
            full.append(part)
            continue
        if part.shape != (len(rows), *forecast.shape[1:]) or len(forecast) != length:
            return None
        full.append(forecast.index_copy(0, rows.to(part.device), part.to(forecast.dtype)))
    return full


def _are_near(some: Tensors, whole: Tensors, rows: torch.Tensor) -> bool:
    """Whether rows are those of the whole batch, but for rounding. This waits for the device."""
    for part, full in zip(some, whole, strict=True):
        if part is None or full is None or not part.is_floating_point():
            continue
        expected = full.index_select(0, rows.to(full.device)).flatten(1).double()
        missed = (part.flatten(1).double() - expected).norm(dim=1)
        if not bool((missed <= _ROUNDING.get(part.dtype, _COARSE_ROUNDING) * expected.norm(dim=1)).all()):
            return False
    return True
