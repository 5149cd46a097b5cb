"""Stands for a CUDA graph where there is none: a list of operations with the memory that they used.

As a graph it knows nothing of Python: it does again what was done, where it was done, whatever has changed since. So
on a CPU everything above runs the same, and a missing check gives the same wrong result. It gains nothing: it is for
tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from samovar.core.interop import memory_of
from samovar.core.tensor_parts import is_plain
from samovar.graphs import recorders
from samovar.graphs.recorders import Function, Recorder, Recording, failing_as
from samovar.graphs.static_inputs import Unsuitable


class SimulatedRecorder(Recorder):
    """Records operations on a CPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def take_turn(self) -> None:
        """Nothing goes on in the background."""

    def record(self, function: Function) -> Recording:
        operations = _Operations()
        eager: Any = torch.compiler.set_stance("force_eager")  # What a mode has seen, torch would not compile again.
        with failing_as(Unsuitable, "capturing it failed"), eager, operations:
            output = function()
        operations.let_go()
        return Recording(operations.replay, output, operations.num_bytes)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._done: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the identity of a tensor, which is held: the memory that it is."""
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Weights where they are now: others may give them other memory, which a graph would not see.
        given = pytree.tree_map(self._place, (args, kwargs or {}))
        output = func(*args, **(kwargs or {}))
        made = [tensor for tensor in pytree.tree_leaves(output) if isinstance(tensor, torch.Tensor)]
        self._done.append((func, *given, list(map(self._place, made))))
        self.num_bytes += sum(tensor.nbytes for tensor in made)
        return output

    def _place(self, value: Any) -> Any:
        """A tensor that is the same memory and nothing else: a graph keeps no weight alive, nor knows of views."""
        if not isinstance(value, torch.Tensor) or not is_plain(value) or value.is_conj() or value.is_neg():
            return value
        if id(value) not in self._places:
            place = torch.empty(0, dtype=value.dtype, device=value.device)
            place.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
            self._places[id(value)] = value, place
        return self._places[id(value)][1]

    def let_go(self) -> None:
        """Forget the tensors that were seen."""
        self._places.clear()

    def replay(self) -> None:
        for func, args, kwargs, made in self._done:
            tensors = [leaf for leaf in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for place, tensor in zip(made, tensors, strict=True):
                if memory_of(place) != memory_of(tensor):  # A view has changed with what it is a view of.
                    place.copy_(tensor)


@contextlib.contextmanager
def recording_by(recorder: Recorder, device: torch.device) -> Iterator[None]:
    """Inside, this one records on a device."""
    before = recorders._recorders.get(device)
    recorders._recorders[device] = recorder
    try:
        yield
    finally:
        recorders._recorders.pop(device, None)
        if before is not None:
            recorders._recorders[device] = before
