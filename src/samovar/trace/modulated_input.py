"""The modulated input of a block: what reaches its first attention, by which steps are judged.

It is read from a twin of the block whose attention ends the call. So a decision runs no block and, where the block's
weights are elsewhere, loads none: the twin has copies of the few that lead to the attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..arch.blocks import attention_modules
from ..arch.modules import unwrapped
from ..core import nested
from .forward import Given
from .model_state import ModelState
from .twin import Forward, TrialFailed, draws_random_numbers, free, trial, twin_of

_PROJECTIONS = (torch.nn.Linear, torch.nn.Conv1d)


class _Reached(Exception):
    """The twin has reached its attention."""

    def __init__(self, path: str, value: torch.Tensor) -> None:
        super().__init__(path)
        self.path, self.value = path, value


class ModulatedInput:
    """Reads the signal from the arguments of a block.

    It is the first argument of an attention (or, in blocks without attention, of a projection) that has the form of the
    stream and is not the stream itself.
    """

    def __init__(self, given: Given, stream: torch.Tensor) -> None:
        """`stream` is the argument that carries the sample."""
        self._block = unwrapped(given.module)
        self._made_of = ModelState(self._block.modules())
        self._form = stream.shape
        self._copies_arguments = False
        self.is_checked = False
        """Whether it was compared with the real attention's input."""
        self.path: str | None = None
        """Where it is read within the block; None if the block's input has to do."""
        is_elsewhere = any(tensor.device != stream.device for tensor in self._block.parameters())
        stops = {part: partial(self._stop, path, stream) for path, part in _stops(self._block).items()}
        try:
            self._twin = twin_of(self._block, stops, device=stream.device if is_elsewhere else None)
            with trial(given):
                self._find(given)
        except TrialFailed:
            self.path = None

    def __call__(self, given: Given, stream: torch.Tensor) -> torch.Tensor:
        """The signal of a call of the block."""
        reached = None if self.path is None else self._run(given)
        return stream if reached is None else reached.value

    def close(self) -> None:
        """Free the twin and its copies of weights without waiting for the garbage collector."""
        if self.path is not None:
            free(self._twin)
            self.path = None

    @property
    def attention(self) -> torch.nn.Module | None:
        """The real module whose input the signal is."""
        return None if self.path is None else self._block.get_submodule(self.path)

    def agrees_with(self, value: torch.Tensor, args: Any, kwargs: Any) -> bool:
        """Whether the real module was given exactly this value."""
        return any(t.shape == value.shape and torch.equal(t, value) for t in nested.tensors((args, kwargs)))

    def is_current(self) -> bool:
        """Whether the block still has the modules, weights and adapters that its twin was made from."""
        return self._made_of.holds()

    def _stop(self, path: str, raw: torch.Tensor, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Called in place of a module where the signal may be read."""
        value = _stream_among((*args, *kwargs.values()), self._form) if self.path in (None, path) else None
        # What is the stream itself may be read only where something else was found first.
        if value is not None and (self.path is not None or value.shape != raw.shape or not torch.equal(value, raw)):
            raise _Reached(path, value)
        return forward(*args, **kwargs)

    def _find(self, given: Given) -> None:
        """Where the signal is read."""
        before, found = given.copied(), list[_Reached | None]()
        is_random = draws_random_numbers(lambda: found.append(self._run(before)))
        if is_random or found[0] is None:  # It would draw them at every step, and then differ from the block.
            return
        # A block that writes into its arguments on the way gets copies of them.
        self._copies_arguments = not nested.equal((before.args, before.kwargs), (given.args, given.kwargs))
        self.path = found[0].path

    def _run(self, given: Given) -> _Reached | None:
        if self._copies_arguments:
            given = given.copied()
        with contextlib.suppress(Exception), torch.no_grad():
            try:
                self._twin(*given.args, **given.kwargs)
            except _Reached as reached:
                return reached.with_traceback(None)  # Its frames hold it, and tensors.
        return None


def _stops(block: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Where the signal may be read: at attentions and the projections in them; without any, at all projections."""
    attentions = attention_modules(block)
    inside = tuple(f"{attention}." for attention in attentions) or ("",)
    return {
        path: unwrapped(part)
        for path, part in block.named_modules()
        if path in attentions or (isinstance(part, _PROJECTIONS) and path.startswith(inside))
    }


def _stream_among(given: Sequence[Any], form: torch.Size) -> torch.Tensor | None:
    """The argument that holds the stream: by shape, by size, or as part of a longer one."""

    def fit(tensor: torch.Tensor) -> tuple[bool, bool, bool]:
        is_longer = tensor.shape[-1:] == form[-1:] and tensor.numel() > form.numel()
        return tensor.shape == form, tensor.numel() == form.numel(), is_longer

    tensors = [value for value in given if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return max(filter(lambda tensor: any(fit(tensor)), tensors), key=fit, default=None)
