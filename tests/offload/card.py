"""A card with so much memory and no more: counts what weights and activations take, and refuses what is over it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from samovar.core import nested
from samovar.offload import HostStage
from samovar.offload.device import Buffer, Pressure


class Card(HostStage):
    """A simulated device on which activations count too, while the card is entered."""

    def __init__(self, capacity: int, *, is_real: bool = False) -> None:
        """`is_real`: whether what runs show of it is kept, as of a GPU."""
        super().__init__(lazy=True)
        self.capacity = capacity
        self.is_real = is_real
        self.retries = 0
        self.most = 0
        """The most that was ever taken."""
        self._limit = self._peak = self._refusals = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._is_own = False
        self._mode = _Counting(self)

    def __enter__(self) -> Card:
        self._live.clear()
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._mode.__exit__(kind, error, at)
        self._live.clear()

    @property
    def activations(self) -> int:
        gone = [key for key, (storage, _) in self._live.items() if storage.expired()]
        for key in gone:
            del self._live[key]
        return sum(num_bytes for _, num_bytes in self._live.values())

    def take(self, num_bytes: int) -> None:
        taken, most = self.stats.held_bytes + self.activations + num_bytes, min(self.capacity, self._limit or 2**62)
        if taken > most:
            self._refusals += 1
            raise torch.OutOfMemoryError(f"{taken} of {most} bytes")
        self.most, self._peak = max(self.most, taken), max(self._peak, taken)

    def made(self, output: Any) -> None:
        """Count what an operation has made."""
        for tensor in [] if self._is_own else nested.tensors(output):
            storage = tensor.untyped_storage()
            if not self.is_here(tensor) and storage._cdata not in self._live and storage.nbytes():
                self.take(storage.nbytes())
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def send(self, *args: Any) -> None:
        self._own(super().send, *args)

    def _allocate(self, num_bytes: int) -> Buffer:
        self.take(num_bytes)
        made: Buffer = self._own(super()._allocate, num_bytes)
        return made

    def _own(self, call: Any, *args: Any) -> Any:
        before, self._is_own = self._is_own, True
        try:
            return call(*args)
        finally:
            self._is_own = before

    def available_bytes(self) -> int | None:
        return self.capacity

    def free_bytes(self) -> int | None:
        return self.capacity - self.stats.held_bytes - self.activations

    def peak_bytes(self) -> int:
        peak, self._peak = self._peak, self.stats.held_bytes + self.activations
        return peak

    def pressure(self) -> Pressure:
        return Pressure(self._refusals, self.retries)

    @contextlib.contextmanager
    def within(self, budget_bytes: int) -> Iterator[None]:
        before, self._limit = self._limit, budget_bytes
        try:
            yield
        finally:
            self._limit = before


class _Counting(TorchDispatchMode):
    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        returned = {result.alias_info is None for result in function._schema.returns}
        if returned == {True}:
            self._card.made(output)
        return output
