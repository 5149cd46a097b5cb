"""What does a warm-up run teach? The memory each component needs beside its weights, and the time of each block.

A run is cut into slices, one per component that is called, whichever entry point is used. A component needs the peak
of its slices less the weights on the device. Blocks are timed inside all other hooks, without the wait for weights.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..hooks import HookOrder, ModelHook
from .moving import install_hooks
from .sizes import Component
from .staging import Stage
from .streaming import Timing
from .weights import num_bytes_of, owners_of

_OUTER, _INNER = "samovar_offload_meter_before", "samovar_offload_meter_after"


class Measured:
    """The results of a run, complete once it is over. `activations` and `timing` fit `OffloadConfig`."""

    def __init__(self, stage: Stage, components: Sequence[Component]) -> None:
        self.activations: dict[str, int] = {}
        """Bytes by component, for those that were called."""
        self.timing = Timing()
        self._stage, self._components = stage, components
        here = [tensor for component in components for tensor in component.tensors() if stage.is_here(tensor)]
        self._others = max(num_bytes_of(here) - stage.stats.held_bytes, 0)
        """Bytes of weights on the device that are not our copies."""
        self._current: str | None = None
        self._weights = 0
        """Bytes of weights on the device in the current slice."""
        self._begun: dict[str, Any] = {}
        self._times: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Measured]:
        """Measure what runs inside the `with` block."""
        with contextlib.ExitStack() as undo:
            for component in self._components:
                name, module = component.name, component.module
                timed = {id(block): f"{name}.{path}" for path, block in component.blocks.items()}
                owners = owners_of(module, component.skip_with_blocks)
                for part in {id(m): m for m in (module, *owners, *component.blocks.values())}.values():
                    path = timed.get(id(part))
                    outer = _MeterHook(HookOrder.OUTERMOST, partial(self._leave, name))
                    inner = _MeterHook(HookOrder.OTHER, partial(self._enter, name, path), partial(self._end, path))
                    install_hooks(undo, _OUTER, [(part, outer)])
                    install_hooks(undo, _INNER, [(part, inner)])
            yield self
            self._leave(None)
        block_s = {
            path: statistics.median(self._stage.seconds_between(*pair) for pair in pairs)
            for path, pairs in self._times.items()
        }
        self.timing = Timing(self._stage.measure_bus(), block_s=block_s)

    def _leave(self, name: str | None) -> None:
        """A component is about to be called. If it is another one, the current slice ends."""
        if self._current is not None and self._current != name:
            need = self._stage.peak_bytes() - self._weights
            self.activations[self._current] = max(need, self.activations.get(self._current, 0))
            self._current = None

    def _enter(self, name: str, path: str | None) -> None:
        """A component's weights are loaded: its slice begins."""
        if self._current is None:
            self._current = name
            self._weights = self._stage.stats.held_bytes + self._others
            self._stage.peak_bytes()  # The peak counts from here.
        if path is not None:
            self._begun[path] = self._stage.mark_time()

    def _end(self, path: str | None) -> None:
        if path is not None:
            self._times[path].append((self._begun[path], self._stage.mark_time()))


class _MeterHook(ModelHook):
    def __init__(self, order: HookOrder, before: Callable[[], None], after: Callable[[], None] | None = None) -> None:
        self.order, self._before, self._after = order, before, after

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._before()
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self._after is not None:
            self._after()
        return output
