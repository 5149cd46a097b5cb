"""How do bytes get from the host to the device, and what waits for what?

A `Stage` is a device with two lanes, one that copies and one that computes (see `ring.Lane`). `CudaStage` is a
GPU with a stream of its own for copies. `HostStage` is a piece of the host's memory that plays the device: it
keeps real copies, spoils what is given back, and has a clock in place of a bus, so that everything above it runs
the same, bit for bit, where there is no GPU.

Memory is asked for and given back here only, and that is where the two lanes meet: what is about to be copied
into new memory waits for whatever computed in it before, and what will compute in freed memory waits for
whatever is still being copied into it. In between the ring and the marks keep them apart.
"""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SettingError
from .ring import Mark
from .timeline import Timeline
from .weights import ALIGNMENT

_HOST_BUS = 25 * 2**30
"""What a bus is taken to carry where none is measured, in bytes a second: that of a desktop GPU."""


class Buffer:
    """A stretch of device memory."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._storage = flat.untyped_storage()
        self._start = int(flat.storage_offset())

    @property
    def num_bytes(self) -> int:
        return self.flat.numel()

    def view(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """A tensor of the same type, shape and strides as another, at a byte of this memory."""
        start, rest = divmod(self._start + offset, like.element_size())
        assert not rest, "tensors start where their type may"
        with torch.inference_mode(False):  # Else the parameter that takes it would be bound to inference mode.
            empty = torch.empty(0, dtype=like.dtype, device=self.flat.device)
            return empty.set_(self._storage, start, like.shape, like.stride())


@dataclass
class StageStats:
    """What was moved, and how much room our copies of weights take."""

    sent_bytes: int = 0
    held_bytes: int = 0
    most_held_bytes: int = 0


class Stage(abc.ABC):
    """A device that weights are copied to."""

    keeps_phase = False
    """Whether weights begin there where in a cache line they did; else where torch's allocator would put them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stats = StageStats()

    def allocate(self, num_bytes: int) -> Buffer:
        """Memory to copy into; raises torch.OutOfMemoryError and changes nothing if there is none."""
        with torch.inference_mode(False):
            buffer = Buffer(self._allocate(num_bytes))
        self.stats.held_bytes += num_bytes
        self.stats.most_held_bytes = max(self.stats.most_held_bytes, self.stats.held_bytes)
        self.copies_wait(self.mark_computed())
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give memory back."""
        self.compute_waits(self.mark_copied())
        self.stats.held_bytes -= buffer.num_bytes
        self._free(buffer)

    def send(self, buffer: Buffer, offset: int, source: torch.Tensor) -> None:
        """Start to copy bytes from the host."""
        self.stats.sent_bytes += source.numel()
        self._send(buffer.flat[offset : offset + source.numel()], source)

    @abc.abstractmethod
    def _allocate(self, num_bytes: int) -> torch.Tensor: ...

    @abc.abstractmethod
    def _free(self, buffer: Buffer) -> None: ...

    @abc.abstractmethod
    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    @abc.abstractmethod
    def mark_copied(self) -> Mark: ...

    @abc.abstractmethod
    def mark_computed(self) -> Mark: ...

    @abc.abstractmethod
    def compute_waits(self, mark: Mark) -> None: ...

    @abc.abstractmethod
    def copies_wait(self, mark: Mark) -> None: ...

    @abc.abstractmethod
    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device rather than on the host."""

    @abc.abstractmethod
    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin a range of host memory, so that copies from it run at full speed; what went wrong, if it did."""

    @abc.abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait on the host until all copies sent so far have arrived."""

    @abc.abstractmethod
    def check_call(self) -> None:
        """Refuse a call that cannot work while weights come and go."""

    @abc.abstractmethod
    def measure_bus(self) -> float:
        """Bytes a second from pinned host memory to the device."""

    @abc.abstractmethod
    def mark_time(self) -> Any:
        """A point in what is computed whose time will be known."""

    @abc.abstractmethod
    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds between two such points."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Count the peak from here on."""

    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """The most that was taken of the device since then, by whomever; our copies alone where nobody counts more."""

    @abc.abstractmethod
    def free_bytes(self) -> int | None:
        """What is free on the device for us, what torch keeps in reserve included; None where nobody counts."""

    def bring(self, value: Any) -> Any:
        """Arguments of a call, on the device."""
        if self.device.type == "cpu":
            return value
        if isinstance(value, torch.Tensor):
            return value if value.device == self.device else value.to(self.device)
        if isinstance(value, dict):
            return {key: self.bring(item) for key, item in value.items()}
        return type(value)(map(self.bring, value)) if type(value) in (list, tuple) else value


class HostStage(Stage):
    """The host's own memory in the part of a device.

    With `lazy`, bytes are copied at the last moment, when computing waits for them, else at once: what forgets to
    wait fails the one way, what overwrites too early the other.
    """

    keeps_phase = True

    def __init__(self, *, capacity: int | None = None, bus_bytes_s: float = _HOST_BUS, lazy: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.timeline = Timeline(bus_bytes_s)
        self.registered: dict[int, int] = {}
        self._registering = threading.Lock()
        """Address and length of what is pinned."""
        self._capacity, self._lazy = capacity, lazy
        self._buffers: set[int] = set()
        self._due: deque[Callable[[], object]] = deque()
        self._done = 0

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        if self._capacity is not None and self.stats.held_bytes + num_bytes > self._capacity:
            raise torch.OutOfMemoryError(
                f"{num_bytes} bytes do not fit: {self.stats.held_bytes} of {self._capacity} are taken."
            )
        flat = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
        flat = flat[-flat.data_ptr() % ALIGNMENT :][:num_bytes].fill_(255)
        self._buffers.add(flat.untyped_storage().data_ptr())
        return flat

    def _free(self, buffer: Buffer) -> None:
        self._buffers.remove(buffer.flat.untyped_storage().data_ptr())
        buffer.flat.fill_(255)  # Not a number in any floating type: whoever still computes with it will show.

    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.timeline.copy(source.numel())
        self._due.append(lambda: target.copy_(source))
        if not self._lazy:
            self.compute_waits((0.0, self._done + 1))

    def mark_copied(self) -> Mark:
        return self.timeline.mark_copied(), self._done + len(self._due)

    def mark_computed(self) -> Mark:
        return self.timeline.mark_computed(), 0

    def compute_waits(self, mark: Mark) -> None:
        seconds, count = mark
        self.timeline.compute_waits(seconds)
        while self._done < count:
            self._due.popleft()()
            self._done += 1

    def copies_wait(self, mark: Mark) -> None:
        self.timeline.copies_wait(mark[0])

    def is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._buffers

    def register(self, address: int, num_bytes: int) -> str | None:
        with self._registering:  # Several threads pin.
            if any(address < start + size and start < address + num_bytes for start, size in self.registered.items()):
                return "the range is registered already"
            self.registered[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def synchronize(self) -> None:
        self.compute_waits((0.0, self._done + len(self._due)))

    def check_call(self) -> None:
        check_no_grad()

    def measure_bus(self) -> float:
        return self.timeline.bus_bytes_s

    def mark_time(self) -> float:
        return self.timeline.mark_computed()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def reset_peak(self) -> None:
        self.stats.most_held_bytes = self.stats.held_bytes

    def peak_bytes(self) -> int:
        return self.stats.most_held_bytes

    def free_bytes(self) -> int | None:
        return None if self._capacity is None else self._capacity - self.stats.held_bytes


def check_no_grad() -> None:
    """Refuse to record a graph through weights that will be gone when it is walked back."""
    if torch.is_grad_enabled():
        raise SettingError(
            "A block that streams was called with gradients enabled, but its weights leave the device after the call. "
            "Call the model under torch.no_grad(), or remove the offload to train it."
        )
