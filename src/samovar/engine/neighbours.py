"""Does an image depend on the prompts beside it in a batch?

Some pipelines pad prompts to the longest of a batch, and do not mask what they add: a short prompt beside a long one
makes another image than alone. Nothing that they declare tells, so it is tried once, when such prompts first meet: the
first forward of a call for two of them is compared with that of a call for the shorter one alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..arch import find_denoisers
from ..core import nested
from ..core.errors import SamovarError
from ..hooks import HookOrder, ModelHook, install_hook

_HOOK = "samovar_first_output"
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
_COARSE_ROUNDING = 0.05
"""How much an output may differ by rounding alone, relative to its size."""


class _Enough(SamovarError):
    """Ends a call of the pipeline whose first forward is all that is wanted."""


def length_of(pipeline: Any, prompt: str) -> tuple[int, ...]:
    """What decides how far a prompt is padded beside others: its tokens, for each tokenizer, or else its letters."""
    tokenizers = [part for name, part in pipeline.components.items() if name.startswith("tokenizer") and callable(part)]
    counts = [len(each(prompt, truncation=False, verbose=False).input_ids) for each in tokenizers]
    return tuple(counts) or (len(prompt),)


class _FirstOutput(ModelHook):
    """Keeps what the first forward of this thread returns, and ends the call."""

    order = HookOrder.OUTERMOST

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._thread = threading.get_ident()

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if threading.get_ident() != self._thread:
            return output  # Of another lane.
        self.tensors = [each.detach().clone() for each in nested.tensors(output) if each.is_floating_point()]
        raise _Enough("The first forward has ended.")

    @contextlib.contextmanager
    def on(self, pipeline: Any) -> Iterator[None]:
        """Inside, it is on the denoisers of a pipeline."""
        with contextlib.ExitStack() as undo, contextlib.suppress(_Enough):
            for denoiser in find_denoisers(pipeline).values():
                install_hook(undo, denoiser, _HOOK, self)
            yield


def is_same_alone(pipeline: Any, call: Callable[..., Any], short: int, long: int) -> bool:
    """Whether the image of a request is the same beside another one as alone, but for rounding. `call` calls the
    pipeline for the requests of these numbers."""
    alone, beside = _FirstOutput(), _FirstOutput()
    with alone.on(pipeline):
        call(short)
    with beside.on(pipeline):
        call(short, long)
    own = _first_of_two(beside.tensors, len(alone.tensors))
    if not alone.tensors or [each.shape for each in own] != [each.shape for each in alone.tensors]:
        return False
    return all(map(_is_near, own, alone.tensors))


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    limit = _ROUNDING.get(one.dtype, _COARSE_ROUNDING)
    return bool((one.float() - other.float()).norm() <= limit * other.float().norm())


def _first_of_two(tensors: Sequence[torch.Tensor], parts: int) -> list[torch.Tensor]:
    """What a call returns for the first of two images: a row of each tensor, and of each copy for guidance; or, where
    each image has tensors of its own, these."""
    if len(tensors) == 2 * parts:
        return list(tensors[::2])
    halves = [each.reshape(len(each) // 2, 2, *each.shape[1:]) for each in tensors if len(each) % 2 == 0]
    return [each[:, 0] for each in halves]
