"""What does a warm-up run teach? The memory each component needs beside its weights, and the time of each block.

A run is cut into slices, one per component that is called, whichever entry point is used. A component needs the peak
of its slices less the weights on the device. Blocks are timed inside all other hooks, without the wait for weights.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..core.tensor_parts import num_bytes_of
from ..hooks import HookOrder, ModelHook, install_hook
from .sizes import Component
from .staging import Stage
from .streaming import Timing
from .weights import owners_of

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
        self._gap: Any = None
        """When the device began what runs outside of blocks."""
        self._gaps: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._forwards: dict[str, int] = defaultdict(int)
        self._clock = 0.0
        self._launched: dict[str, list[float]] = defaultdict(list)
        self._sent: list[float] = []

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
                    is_whole = part is module
                    outer = _MeterHook(
                        HookOrder.OUTERMOST,
                        partial(self._come, name, path, is_whole),
                        partial(self._go, name, path, is_whole),
                    )
                    inner = _MeterHook(HookOrder.OTHER, partial(self._enter, name, path), partial(self._end, path))
                    install_hook(undo, part, _OUTER, outer)
                    install_hook(undo, part, _INNER, inner)
            yield self
            self._leave(None)
        block_s = {
            path: statistics.median(self._stage.seconds_between(*pair) for pair in pairs)
            for path, pairs in self._times.items()
        }
        rest_s = {
            name: sum(self._stage.seconds_between(*pair) for pair in pairs) / max(self._forwards[name], 1)
            for name, pairs in self._gaps.items()
        }
        self.timing = Timing(
            self._stage.measure_bus(),
            block_s=block_s,
            rest_s=rest_s,
            launch_s={path: statistics.median(times) for path, times in self._launched.items()},
            send_s=statistics.median(self._sent) if self._sent else 0.0,
        )

    def _come(self, name: str, path: str | None, is_whole: bool) -> None:
        """A component or one of its parts is called, before any other hook."""
        self._leave(name)
        if is_whole:
            self._gap = self._stage.mark_time()
            self._forwards[name] += 1
        elif path is not None and self._gap is not None:
            self._gaps[name].append((self._gap, self._stage.mark_time()))
            self._gap = None
        self._clock = time.perf_counter()

    def _go(self, name: str, path: str | None, is_whole: bool) -> None:
        """It returns, after all other hooks."""
        if path is not None:
            self._sent[-1:] = [self._sent[-1] + time.perf_counter() - self._clock] if self._sent else []
            self._gap = self._stage.mark_time()
        elif is_whole and self._gap is not None:
            self._gaps[name].append((self._gap, self._stage.mark_time()))
            self._gap = None

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
            self._sent.append(time.perf_counter() - self._clock)
            self._begun[path] = self._stage.mark_time()
            self._clock = time.perf_counter()

    def _end(self, path: str | None) -> None:
        if path is not None:
            self._launched[path].append(time.perf_counter() - self._clock)
            self._times[path].append((self._begun[path], self._stage.mark_time()))
            self._clock = time.perf_counter()


class _MeterHook(ModelHook):
    def __init__(self, order: HookOrder, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.order, self._before, self._after = order, before, after

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._before()
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._after()
        return output
