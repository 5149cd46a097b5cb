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
        if self.path in (None, path):
            value = _stream_among((*args, *kwargs.values()), self._form)
            is_raw = self.path is None and value is not None and value.shape == raw.shape and torch.equal(value, raw)
            if value is not None and not is_raw:
                raise _Reached(path, value)
        return forward(*args, **kwargs)

    def _find(self, given: Given) -> None:
        """Where the signal is read, and which parts of the block have no effect on it."""
        outputs: dict[str, Any] = {}
        before, found = given.copied(), list[_Reached | None]()
        with contextlib.ExitStack() as handles:
            for name, part in self._twin.named_children():
                note = partial(lambda name, _, args, output: outputs.setdefault(name, output), name)
                handles.enter_context(part.register_forward_hook(note))
            is_random = draws_random_numbers(lambda: found.append(self._run(before)))
        if is_random or found[0] is None:  # It would draw them at every step, and then differ from the block.
            return
        # A block that writes into its arguments on the way gets copies of them.
        self._copies_arguments = not nested.equal((before.args, before.kwargs), (given.args, given.kwargs))
        self.path = found[0].path
        for name, output in outputs.items():
            if nested.is_transparent(output) and all(tensor.is_floating_point() for tensor in nested.tensors(output)):
                part = self._twin.get_submodule(name)
                # If what it returns matters at another step after all, the signal is NaN, and the step is computed.
                self._twin._modules[name] = _Constant(nested.map_tensors(_nan, output))
                reached = self._run(given)
                if reached is None or not torch.equal(reached.value, found[0].value):
                    self._twin._modules[name] = part
                else:
                    free(part)

    def _run(self, given: Given) -> _Reached | None:
        if self._copies_arguments:
            given = given.copied()
        try:
            with torch.no_grad():
                self._twin(*given.args, **given.kwargs)
        except _Reached as reached:
            return reached.with_traceback(None)  # Its frames hold it, and tensors.
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
        return None


class _Constant(torch.nn.Module):
    """Stands for a part of a block that has no effect on its modulated input."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.value


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_full((), torch.nan).expand(tensor.shape)


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

    def rank(tensor: torch.Tensor) -> int:
        is_longer = tensor.shape[-1:] == form[-1:] and tensor.numel() > form.numel()
        return (tensor.shape == form, tensor.numel() == form.numel(), is_longer, True).index(True)

    tensors = [value for value in given if isinstance(value, torch.Tensor) and value.is_floating_point()]
    found = min(tensors, key=rank, default=None)
    return None if found is None or rank(found) == 3 else found
