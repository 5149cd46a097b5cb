"""How do bytes get from the host to the device, and what waits for what?

A `Stage` is a device with a queue for copies and one for compute (see `ring.DeviceQueues`). `CudaStage` is a GPU with
its own stream for copies. `HostStage` simulates a device in host memory: it makes real copies, overwrites freed memory,
and has a clock for the bus, so everything above it runs the same, bit for bit, without a GPU.

Memory is allocated and freed only here, and that is where the queues meet: copies into new memory wait for earlier
compute in it, and compute in freed memory waits for running copies into it. In between, the ring's marks order them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from ..errors import SettingError
from .ring import ASSUMED_BUS, DeviceQueues, Mark, OffloadStats, Timeline
from .weights import ALIGNMENT


class Buffer:
    """A range of device memory."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._storage = flat.untyped_storage()
        self._start = int(flat.storage_offset())

    def view(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """A tensor with the dtype, shape and strides of another, at a byte offset of this memory.

        A parameter that takes one made in inference mode would be bound to it.
        """
        start, rest = divmod(self._start + offset, like.element_size())
        assert not rest, "tensors start where their dtype may"
        empty = torch.empty(0, dtype=like.dtype, device=self.flat.device)
        return empty.set_(self._storage, start, like.shape, like.stride())

    def part(self, offset: int, num_bytes: int) -> Buffer:
        """Some of it as a storage of its own: `torch.save` writes whole storages."""
        return Buffer(from_dlpack(self.flat[offset : offset + num_bytes]))


class Stage(DeviceQueues):
    """A device that weights are copied to."""

    keeps_phase = False
    """Whether weights keep their phase (see `weights`) there, or begin where torch's allocator would put them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stats = OffloadStats()

    def allocate(self, num_bytes: int) -> Buffer:
        """Memory to copy into. Raises torch.OutOfMemoryError, and changes nothing, if there is not enough."""
        with torch.inference_mode(False):
            buffer = Buffer(self._allocate(num_bytes))
        self.stats.held_bytes += num_bytes
        self.stats.peak_held_bytes = max(self.stats.peak_held_bytes, self.stats.held_bytes)
        self.copies_wait(self.mark_computed())
        return buffer

    def free(self, memory: Buffer) -> None:
        self.compute_waits(self.mark_copied())
        self.stats.held_bytes -= memory.flat.numel()
        self._free(memory.flat)

    def send(self, buffer: Buffer, offset: int, source: torch.Tensor) -> None:
        """Start to copy bytes from the host."""
        self.stats.sent_bytes += source.numel()
        self._send(buffer.flat[offset : offset + source.numel()], source)

    @abstractmethod
    def _allocate(self, num_bytes: int) -> torch.Tensor: ...

    @abstractmethod
    def _free(self, flat: torch.Tensor) -> None: ...

    @abstractmethod
    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    @abstractmethod
    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device rather than on the host."""

    @abstractmethod
    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin a range of host memory so that copies from it run at full speed. The error if that failed, else None."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all copies sent so far have arrived."""

    @abstractmethod
    def measure_bus(self) -> float:
        """Bytes per second from pinned host memory to the device."""

    @abstractmethod
    def mark_time(self) -> Any:
        """A point in the compute queue for `seconds_between`."""

    @abstractmethod
    def seconds_between(self, start: Any, end: Any) -> float: ...

    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak memory in use since the last call, by anyone; our own copies on a simulated device."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Bytes available on the device, including what torch holds in reserve; None if unlimited."""

    def begin_call(self) -> None:
        """A component is called, maybe on another stream than the last one: that one's work comes first."""

    def check_call(self) -> None:
        """Refuse a call that cannot work while weights come and go."""
        if torch.is_grad_enabled():
            raise SettingError(
                "A streamed block was called with gradients enabled, but its weights leave the device after the call. "
                "Call the model under torch.no_grad(), or take the offload off to train it: samovar.detach(pipe)."
            )

    def to_device(self, value: Any) -> Any:
        """The arguments of a call, on the device."""
        if self.device.type == "cpu":
            return value
        if isinstance(value, torch.Tensor):
            return value if value.device == self.device else value.to(self.device)
        if isinstance(value, dict):
            return {key: self.to_device(item) for key, item in value.items()}
        return type(value)(map(self.to_device, value)) if type(value) in (list, tuple) else value


class HostStage(Stage):
    """A device simulated in host memory.

    With `lazy`, bytes are copied at the last moment, when compute waits for them; otherwise at once. A missing wait
    shows in the first case, an early overwrite in the second.
    """

    keeps_phase = True

    def __init__(self, *, capacity: int | None = None, bus_bytes_s: float = ASSUMED_BUS, lazy: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.timeline = Timeline(bus_bytes_s)
        self.registered: dict[int, int] = {}
        """Address and length of pinned ranges."""
        self._capacity, self._lazy = capacity, lazy
        self._buffers: dict[int, int] = {}
        """Address and length of allocated memory."""
        self._due: deque[Callable[[], object]] = deque()
        self._done = 0

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        if self._capacity is not None and self.stats.held_bytes + num_bytes > self._capacity:
            raise torch.OutOfMemoryError(
                f"{num_bytes} bytes do not fit: {self.stats.held_bytes} of {self._capacity} are taken."
            )
        flat = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
        flat = flat[-flat.data_ptr() % ALIGNMENT :][:num_bytes].fill_(255)
        memory = flat.untyped_storage()
        self._buffers[memory.data_ptr()] = memory.nbytes()
        return flat

    def _free(self, flat: torch.Tensor) -> None:
        del self._buffers[flat.untyped_storage().data_ptr()]
        flat.fill_(255)  # NaN in every floating-point type, so that later use shows.

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

    def host_waits(self, mark: Mark) -> None:
        pass  # Where compute has waited, the bytes are there.

    def is_here(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(start <= address < start + num_bytes for start, num_bytes in self._buffers.items())

    def register(self, address: int, num_bytes: int) -> str | None:
        self.registered[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def synchronize(self) -> None:
        self.compute_waits((0.0, self._done + len(self._due)))

    def measure_bus(self) -> float:
        return self.timeline.bus_bytes_s

    def mark_time(self) -> float:
        return self.timeline.mark_computed()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def peak_bytes(self) -> int:
        peak, self.stats.peak_held_bytes = self.stats.peak_held_bytes, self.stats.held_bytes
        return peak

    def free_bytes(self) -> int | None:
        return None if self._capacity is None else self._capacity - self.stats.held_bytes
