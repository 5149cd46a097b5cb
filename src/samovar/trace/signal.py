"""What reaches the first attention of a block? The modulated input, which decides whether a step is skipped.

It is read from a shadow of the block whose attention ends the call. So a decision runs no block and, where the block's
weights are elsewhere, loads none: the shadow has copies of the few that lead to the attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..arch.blocks import attention_modules
from ..arch.modules import unwrapped
from ..core import nested
from ..hooks.intercept import never_compiled
from .forward import Given
from .model_state import ModelState
from .shadow import TrialFailed, bring_weights, draws_random_numbers, shadow_of, subclass, trial

_PROJECTIONS = (torch.nn.Linear, torch.nn.Conv1d)


class _Reached(Exception):
    """The shadow has reached its attention."""

    def __init__(self, path: str, value: torch.Tensor) -> None:
        super().__init__(path)
        self.path, self.value = path, value


class ModulatedInput:
    """Reads the signal from the arguments of a block.

    It is the first argument of an attention (or, in blocks without attention, of a projection) that has the form of the
    stream and is not the stream itself.
    """

    class Known(NamedTuple):
        """What holds for a block whatever its weights are."""

        path: str | None
        idle: frozenset[str]

    def __init__(
        self,
        given: Given,
        stream: torch.Tensor,
        *,
        other: tuple[Given, torch.Tensor] | None = None,
        known: Known | None = None,
    ) -> None:
        """`stream` is the argument that carries the sample. `other`: the same at another step, to check against."""
        self._block = unwrapped(given.module)
        self._form = stream.shape
        self._raw: torch.Tensor | None = None
        self._made_of = ModelState(self._block.modules())
        self._copies_arguments = False
        self.is_checked = False
        """Whether it was compared with the real attention's input."""
        self.path: str | None = None
        """Where it is read within the block; None if the block's input has to do."""
        self.idle: frozenset[str] = frozenset()
        """Parts of the block that run before its attention and have no effect on the signal."""
        self._twin = self._made(given, stream)
        if self._twin is None:
            return
        first = self._run(given, stream)
        if first is None:
            self._twin = None
            return
        self.path = first.path
        if known is not None and known.path == self.path:
            self._silence(given, stream, lambda path, part, output: path in known.idle)
        elif other is not None:
            reached = self._run(*other)
            if reached is not None:
                expected = [(given, stream, first.value), (*other, reached.value)]
                self._silence(given, stream, lambda path, part, output: self._is_idle(part, output, expected))

    @property
    def known(self) -> Known:
        """What another reader of the same block can use."""
        return self.Known(self.path, self.idle)

    def __call__(self, given: Given, stream: torch.Tensor) -> torch.Tensor:
        """The signal of a call of the block."""
        reached = self._run(given, stream) if self._twin is not None else None
        return stream if reached is None or reached.path != self.path else reached.value

    def close(self) -> None:
        """Free the shadow and its copies of weights without waiting for the garbage collector."""
        self._twin = None

    @property
    def attention(self) -> torch.nn.Module | None:
        """The real module whose input the signal is."""
        return None if self.path is None else self._block.get_submodule(self.path)

    def agrees_with(self, value: torch.Tensor, args: Any, kwargs: Any) -> bool:
        """Whether the real module was given exactly this value."""
        return any(t.shape == value.shape and torch.equal(t, value) for t in nested.tensors((args, kwargs)))

    def is_current(self) -> bool:
        """Whether the block still has the modules, weights and adapters that its shadow was made from."""
        return self._made_of.holds()

    def _made(self, given: Given, stream: torch.Tensor) -> torch.nn.Module | None:
        try:
            with trial(()):
                twin = shadow_of(self._block)
        except TrialFailed:  # It has parts that cannot be copied.
            return None
        for path, part in _stops(twin).items():
            part.__class__ = subclass(type(part), self._stopping(type(part).forward, path))
        if any(tensor.device != stream.device for tensor in self._block.parameters()):
            originals = dict(self._block.named_modules())
            for path, module in twin.named_modules():
                module.register_forward_pre_hook(bring_weights(originals[path], stream.device))
        before, self._raw = given.copied(), stream

        def run() -> None:
            with contextlib.suppress(_Reached):
                never_compiled(twin.__call__)(*before.args, **before.kwargs)

        try:
            with trial(given):
                if draws_random_numbers(run):  # It would draw them at every step, and then differ from the block.
                    return None
        except TrialFailed:
            return None
        # A block that writes into its arguments on the way gets copies of them.
        self._copies_arguments = not nested.equal((before.args, before.kwargs), (given.args, given.kwargs))
        return twin

    def _stopping(self, forward: Any, path: str) -> Any:
        def stop(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.path is None or self.path == path:
                value = _stream_among((*args, *kwargs.values()), self._form)
                if value is not None and (self.path is not None or not self._is_raw(value)):
                    raise _Reached(path, value)
            return forward(module, *args, **kwargs)

        return stop

    def _is_raw(self, value: torch.Tensor) -> bool:
        raw = self._raw
        return raw is not None and value.shape == raw.shape and torch.equal(value, raw)

    def _run(self, given: Given, stream: torch.Tensor) -> _Reached | None:
        if self._copies_arguments:
            given = given.copied()
        assert self._twin is not None
        self._raw = stream
        try:
            with torch.no_grad():
                self._twin(*given.args, **given.kwargs)
        except _Reached as reached:
            return reached.with_traceback(None)  # Its frames hold it, and tensors.
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
        finally:
            self._raw = None
        return None

    def _silence(
        self, given: Given, stream: torch.Tensor, is_idle: Callable[[str, torch.nn.Module, Any], bool]
    ) -> None:
        """Make those parts of the shadow return zeros at once whose output does not reach the signal."""
        assert self._twin is not None
        for path, output in self._outputs(given, stream).items():
            part = self._twin.get_submodule(path)
            if is_idle(path, part, output):
                part.__class__ = _returning(type(part), output, 0.0)
                self.idle |= {path}

    def _outputs(self, given: Given, stream: torch.Tensor) -> dict[str, Any]:
        """Outputs of the shadow's children that can be replaced by other numbers."""
        assert self._twin is not None
        outputs: dict[str, Any] = {}

        def note(path: str) -> Any:
            return lambda module, args, output: outputs.setdefault(path, output)

        handles = [part.register_forward_hook(note(path)) for path, part in self._twin.named_children()]
        self._run(given, stream)
        for handle in handles:
            handle.remove()
        return {
            path: output
            for path, output in outputs.items()
            if nested.is_transparent(output) and all(tensor.is_floating_point() for tensor in nested.tensors(output))
        }

    def _is_idle(
        self, part: torch.nn.Module, output: Any, expected: list[tuple[Given, torch.Tensor, torch.Tensor]]
    ) -> bool:
        """Whether the signal stays the same, at all known steps, whatever number a part returns."""
        speaking = type(part)
        try:
            for number in (torch.nan, 1e3):
                part.__class__ = _returning(speaking, output, number)
                found = [(self._run(given, stream), value) for given, stream, value in expected]
                if not all(reached is not None and torch.equal(reached.value, value) for reached, value in found):
                    return False
            return True
        finally:
            part.__class__ = speaking


def _stops(twin: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Where the signal may be read: at attentions and the projections in them; without any, at all projections."""
    attentions = attention_modules(twin)
    return {
        path: part
        for path, part in twin.named_modules()
        if path in attentions
        or (
            isinstance(part, _PROJECTIONS)
            and (not attentions or path.startswith(tuple(f"{attention}." for attention in attentions)))
        )
    }


def _stream_among(given: Sequence[Any], form: torch.Size) -> torch.Tensor | None:
    """The argument that holds the stream: by shape, by size, or as part of a longer one."""
    tensors = [value for value in given if isinstance(value, torch.Tensor) and value.is_floating_point()]
    same_shape = (value for value in tensors if value.shape == form)
    same_size = (value for value in tensors if value.numel() == form.numel())
    longer = (v for v in tensors if v.shape[-1:] == form[-1:] and v.numel() > form.numel())
    return next((value for found in (same_shape, same_size, longer) for value in found), None)


def _returning(cls: type[torch.nn.Module], output: Any, number: float) -> type[torch.nn.Module]:
    """A class whose forward returns an output of this form, filled with a number."""

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full((), number, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    value = nested.map_tensors(fill, output)
    return subclass(cls, lambda self, *args, **kwargs: value)
