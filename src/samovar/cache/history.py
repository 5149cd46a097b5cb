"""The history of one guidance branch of one run: what it computed, from which inputs, and weighted sums of that.

A sum costs one pass over each stored tensor, and no synchronisation.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..core import nested
from ..hooks import BaseState
from ..hooks.snapshot import Snapshot
from ..trace.forward import Tensors
from .inputs import Inputs, Pair, size, some
from .signal import Signal

NOTHING_STORED = "nothing stored"
CHANGED_WEIGHTS = "weights or adapters changed"
CHANGED_CONDITIONING = "conditioning changed"
CHANGED_INPUT = "another input changed"


class Output:
    """What a computed step returned."""

    def __init__(self, place: float, value: Any) -> None:
        """`value`: with copies of its tensors, which their owner may change."""
        self.place, self.value = place, value
        self.tensors = list(nested.tensors(value))
        self.numbers = [tensor for tensor in self.tensors if tensor.is_floating_point() and tensor.dim()]
        """The tensors that can be forecast."""


class _Residual(NamedTuple):
    """A residual among the inputs, as it was."""

    ref: weakref.ref[torch.Tensor]
    version: int | None
    some: torch.Tensor

    def is_surely(self, tensor: torch.Tensor) -> bool:
        return self.ref() is tensor and self.version is not None and self.version == nested.version(tensor)


class TeaCacheState(BaseState):
    """One branch of one run."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the steps so far: they do not predict those that follow."""
        self.residuals: Tensors | None = None
        """What the blocks added at the last computed step."""
        self.outputs: dict[int, Output] = {}
        """By step, what the model returned, where whole outputs are forecast."""
        self.signal: Signal | None = None
        self.accumulated_rel_l1_distance = 0.0
        self.skipped_in_a_row = 0
        self._made_of: tuple[int, Hashable] | None = None
        """The generation of the model, and the form of inputs."""
        self._conditioning: dict[str, Snapshot] = {}
        self._residuals: list[_Residual] = []

    def obstacle(self, inputs: Inputs, generation: int) -> str | None:
        """Why what is stored cannot stand for a step with these inputs, if it cannot. Then it is forgotten.
        `generation`: that of the model. This waits for the device where conditioning is in other tensors."""
        why = None
        if self._made_of is None or (self.residuals is None and not self.outputs):
            why = NOTHING_STORED
        elif generation != self._made_of[0]:
            why = CHANGED_WEIGHTS
        elif inputs.signature != self._made_of[1]:
            why = "the shapes, dtypes or set of arguments changed"
        elif not all(known.is_same(inputs.conditioning.get(path)) for path, known in self._conditioning.items()):
            why = CHANGED_CONDITIONING
        if why is not None:
            self.reset()
        return why

    def changes(self, inputs: Inputs) -> list[Pair]:
        """How much each residual has changed that is not what it was."""
        pairs = zip(inputs.residuals, self._residuals, strict=True)
        return [[size(some(now) - old.some), size(old.some)] for now, old in pairs if not old.is_surely(now)]

    def note_computed(self, inputs: Inputs, generation: int, signal: Signal | None = None) -> None:
        """A step was computed; its result is stored by others."""
        if self._made_of is None:
            self._conditioning = {path: Snapshot(value) for path, value in inputs.conditioning.items()}
        self._made_of = generation, inputs.signature
        self.skipped_in_a_row, self.accumulated_rel_l1_distance = 0, 0.0
        self.signal = signal or self.signal
        self.watch(inputs)

    def note_skipped(self, signal: Signal | None = None, total: float = 0.0) -> None:
        """A step was skipped."""
        self.signal, self.accumulated_rel_l1_distance = signal or self.signal, total
        self.skipped_in_a_row += 1

    def watch(self, inputs: Inputs) -> None:
        """Compare residuals with these from now on."""
        self._residuals = [_Residual(weakref.ref(one), nested.version(one), some(one)) for one in inputs.residuals]

    def combined(self, weights: Mapping[int, float]) -> Any:
        """A weighted sum of outputs, by step; None if one of them is not stored."""
        steps = [step for step in sorted(weights, reverse=True) if weights[step]]
        if not steps or not all(step in self.outputs for step in steps):
            return None
        known, factors = [self.outputs[step] for step in steps], [weights[step] for step in steps]
        parts = zip(*(output.tensors for output in known), strict=True)
        return nested.map_tensors(lambda _: _sum(next(parts), factors), known[0].value)


def _sum(tensors: Iterable[torch.Tensor], weights: list[float]) -> torch.Tensor:
    newest, *older = tensors
    if not (newest.is_floating_point() or newest.is_complex()):  # Integers cannot be interpolated.
        return newest.clone()
    # Large weights that nearly cancel need 32 bits.
    total = newest.to(torch.promote_types(newest.dtype, torch.float32)) * weights[0]
    for tensor, weight in zip(older, weights[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total.to(newest.dtype)
