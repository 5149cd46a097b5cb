"""What does a warm-up run teach? What each component needs beside its weights, and how long each block computes.

A run is cut into slices, one for each component that is called, whichever door it is called by: the peak of a slice
less the weights that are on the device is what that component needs. Blocks are timed where they compute, inside all
other hooks, so that waiting for weights does not count.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..hooks import HookOrder, HookRegistry, ModelHook
from .sizes import Component
from .staging import Stage
from .streaming import Timing
from .weights import owners_of

_BEFORE, _AFTER = "samovar_offload_meter_before", "samovar_offload_meter_after"


@dataclass
class Measured:
    """What was learned, once the run is over. Both fit `OffloadConfig`."""

    activations: dict[str, int] = field(default_factory=dict)
    """Bytes by component; those that were not called are not in it."""
    timing: Timing = field(default_factory=Timing)


class Meter:
    """Watches the components of a pipeline."""

    def __init__(self, stage: Stage, components: Sequence[Component]) -> None:
        self._stage, self._components = stage, components
        self._current: str | None = None
        self._needs: dict[str, int] = {}
        self._times: dict[str, list[tuple[Any, Any]]] = {}
        self._weights = 0
        """Bytes of weights on the device in the slice that runs."""
        self._resting = 0
        """Of these, bytes that were there before us."""

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch while the block inside runs."""
        weights = {id(tensor): tensor for component in self._components for tensor in component.everything()}
        here = [tensor for tensor in weights.values() if self._stage.is_here(tensor)]
        self._resting = max(sum(t.numel() * t.element_size() for t in here) - self._stage.stats.held_bytes, 0)
        with contextlib.ExitStack() as undo:
            for component in self._components:
                timed = {id(block): f"{component.name}.{path}" for path, block in component.blocks.items()}
                skip = component.skip | timed.keys()
                doors = {id(m): m for m in (component.module, *owners_of(component.module, skip))}
                for module in (*doors.values(), *component.blocks.values()):
                    registry = HookRegistry.get_or_create(module)
                    for name, hook in (
                        (_BEFORE, _Leave(self, component.name)),
                        (_AFTER, _Watch(self, component.name, timed.get(id(module)))),
                    ):
                        registry.register_hook(name, hook)
                        undo.callback(registry.remove_hook, name)
            yield
            self.leave(None)

    def leave(self, name: str | None) -> None:
        """Somebody is called: if it is somebody else, the slice of the last one is over."""
        if self._current is not None and self._current != name:
            need = self._stage.peak_bytes() - self._weights
            self._needs[self._current] = max(need, self._needs.get(self._current, 0))
            self._current = None

    def enter(self, name: str) -> None:
        """Its weights are there: its slice begins."""
        if self._current is None:
            self._current = name
            self._weights = self._stage.stats.held_bytes + self._resting
            self._stage.reset_peak()

    def begin(self) -> Any:
        return self._stage.mark_time()

    def end(self, path: str, begun: Any) -> None:
        self._times.setdefault(path, []).append((begun, self._stage.mark_time()))

    def read_into(self, measured: Measured) -> None:
        """Hand over what was learned."""
        measured.activations = dict(self._needs)
        block_s = {
            path: statistics.median(self._stage.seconds_between(*pair) for pair in pairs)
            for path, pairs in self._times.items()
        }
        measured.timing = Timing(self._stage.measure_bus(), block_s=block_s)


class _Leave(ModelHook):
    order = HookOrder.OUTERMOST

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter, self._name = meter, name

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._meter.leave(self._name)
        return args, kwargs


class _Watch(ModelHook):
    order = HookOrder.OTHER

    def __init__(self, meter: Meter, name: str, path: str | None) -> None:
        self._meter, self._name, self._path = meter, name, path
        self._begun: Any = None

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._meter.enter(self._name)
        self._begun = self._meter.begin() if self._path is not None else None
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self._path is not None:
            self._meter.end(self._path, self._begun)
        return output
