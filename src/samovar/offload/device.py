"""A device that weights are copied to, with a queue for copies and one for compute (see `ring.DeviceQueues`).

`CudaStage` is a GPU with its own stream for copies. `HostStage` simulates a device in host memory: it makes real
copies, overwrites freed memory, and has a clock for the bus, so everything above it runs the same, bit for bit, without
a GPU.

Memory is allocated and freed only here, and that is where the queues meet: copies into new memory wait for earlier
compute in it, and compute in freed memory waits for running copies into it. In between, the ring's marks order them.

Compressed weights are copied into a staging area first, and decoded from there to where they belong. Only the decoding
waits for compute: copies run ahead as far as the area has room. While it is open everything small takes that way.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ..core.errors import SettingError
from .coding import Coded, Form, decode_into, encode
from .files import READERS, Unpinned
from .layout import ALIGNMENT
from .ring import DeviceQueues, Mark, RingSpace
from .stats import OffloadStats


class Buffer:
    """A range of device memory."""

    def __init__(self, flat: torch.Tensor, stream: Any = None) -> None:
        self.flat, self.stream = flat, stream
        self.views: dict[Any, list[torch.Tensor]] = {}
        """The tensors of groups in it, by what makes them. Making them takes the host longer than all else it does."""
        self.num_bytes = flat.numel()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in it."""
        return 0 <= tensor.data_ptr() - self.flat.data_ptr() < max(self.num_bytes, 1)


class _Area:
    """Device memory for bytes that are not where they belong yet."""

    def __init__(self, memory: Buffer) -> None:
        self.memory = memory
        self.largest = memory.num_bytes // 2
        """What it takes at once, with room for as much beside it."""
        self._space = RingSpace(memory.num_bytes)
        self.left: deque[Mark] = deque()
        """When what is in it will have left it, oldest first."""

    def take(self, num_bytes: int, wait: Callable[[Mark], None]) -> torch.Tensor | None:
        """Room for some bytes; first `wait` for those that are in the way. None if nobody knows when they leave."""
        while (start := self._space.take(-(-num_bytes // ALIGNMENT) * ALIGNMENT)) is None:
            if not self.left:
                return None
            wait(self.left[0])
            self.left.popleft()
            self._space.give_back(1)
        return self.memory.flat[start : start + num_bytes]


def bring(target: torch.Tensor, room: torch.Tensor, form: Form | None) -> None:
    """Bring bytes from the area to where they belong, and decode them if they have a form."""
    target.copy_(room) if form is None else decode_into(form, room, target)


class Pressure(NamedTuple):
    """How often memory was short."""

    refusals: int
    """Memory was asked for that was not there, also by those who then took less."""
    retries: int
    """Memory was found by giving back all that torch's allocator held in reserve, for which everything waits."""


class Stage(DeviceQueues):
    """A device that weights are copied to."""

    keeps_phase = False
    """Whether weights keep their phase (see `layout`) there, or begin where torch's allocator would put them."""
    is_real = False
    """Whether its times and its memory are those of a card, so that figures are worth keeping."""
    decodes_fast = False
    """Whether decoding takes less time than it saves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stats = OffloadStats()
        self._held: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._area: _Area | None = None
        self._buffers: deque[tuple[torch.Tensor, Mark]] = deque()
        """Pinned memory that unpinned bytes pass through, each with when the device has read it."""

    # ------------------------------------------------------------------------------------------------ memory

    def allocate(self, num_bytes: int) -> Buffer:
        """Memory to copy into. Raises torch.OutOfMemoryError, and changes nothing, if there is not enough."""
        with torch.inference_mode(False):
            buffer = self._allocate(num_bytes)
        self._held.add(buffer)
        self._count_held()
        self.copies_wait(self.mark_computed())
        return buffer

    def free(self, memory: Buffer) -> None:
        self.compute_waits(self.mark_copied())
        self._held.discard(memory)
        self._count_held()
        self._free(memory)

    def _count_held(self) -> None:
        # Not a running sum: an interrupt may have lost a buffer.
        self.stats.held_bytes = sum(buffer.num_bytes for buffer in self._held)
        self.stats.peak_held_bytes = max(self.stats.peak_held_bytes, self.stats.held_bytes)

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device rather than on the host."""
        return any(buffer.holds(tensor) for buffer in self._held)

    # ------------------------------------------------------------------------------------------------ copies

    def pass_through(self, buffers: Sequence[torch.Tensor]) -> None:
        """Use these buffers for bytes that are not in pinned memory; with none, no more."""
        self.synchronize()
        self._buffers = deque((buffer, None) for buffer in buffers)

    def send(self, buffer: Buffer, offset: int, source: torch.Tensor | Unpinned, form: Form | None = None) -> None:
        """Start to copy bytes from the host. With a form they are coded, and decoded when they are there."""
        if isinstance(source, Unpinned):
            self._send_unpinned(buffer, offset, source)
            return
        num_bytes = source.numel() if form is None else form.raw_bytes
        self.stats.sent_bytes += source.numel()
        if form is not None:
            self.stats.coded_bytes += source.numel()
            self.stats.decoded_bytes += num_bytes
            if self._area is None or source.numel() > self._area.largest:  # It has grown since.
                self.close_area()
                self.open_area(source.numel())
        target = buffer.flat[offset : offset + num_bytes]
        if self._area is None or source.numel() > self._area.largest:
            self._send(target, source)
        else:
            self._send_through(self._area, target, source, form)

    def _send_unpinned(self, memory: Buffer, offset: int, source: Unpinned) -> None:
        """Read bytes and copy them to the device, a buffer at a time: while the device takes one, the host fills the
        next."""
        self.stats.sent_bytes += source.num_bytes
        room = self._buffers[0][0].numel()
        with ThreadPoolExecutor(READERS) as threads:
            for start in range(0, source.num_bytes, room):
                buffer, mark = self._buffers[0]
                if mark is not None:
                    self.host_waits(mark)
                filled = buffer[: min(room, source.num_bytes - start)]
                source.read(start, filled, threads)
                self._send(memory.flat[offset + start : offset + start + filled.numel()], filled)
                self._buffers[0] = buffer, self.mark_copied()
                self._buffers.rotate(-1)

    def _send_through(self, area: _Area, target: torch.Tensor, source: torch.Tensor, form: Form | None) -> None:
        room = area.take(source.numel(), self._area_waits)
        if room is None:  # An interrupt came before it was noted when something would leave.
            self.synchronize()
            self._area = area = _Area(area.memory)
            room = area.take(source.numel(), self._area_waits)
        assert room is not None, "the largest has room"
        self._pass(target, room, source, form)
        area.left.append(self.mark_copied())

    def open_area(self, largest: int) -> None:
        """Allocate the staging area for coded weights of up to `largest` bytes; none if that is 0."""
        if largest:
            memory = self.allocate(2 * (-(-largest // ALIGNMENT) * ALIGNMENT))
            self._join_area()
            self._area = _Area(memory)

    @property
    def area_bytes(self) -> int:
        return 0 if self._area is None else self._area.memory.num_bytes

    def close_area(self) -> None:
        """Free the staging area, if there is one."""
        area, self._area = self._area, None
        if area is not None:
            self._join_area()
            self.free(area.memory)

    def encode(self, words: torch.Tensor) -> Coded | None:
        """Code bfloat16 weights from the host; None if that gains too little."""
        return encode(words)

    def num_coders(self) -> int:
        """How many threads may do so at once. Most of the time goes into copies, and into new pages."""
        return 1

    # ------------------------------------------------------------------------------------------------ what it must do

    def _join_area(self) -> None:
        """Order all copies of before, into the area and to where bytes belong, before all later ones."""

    @abstractmethod
    def _area_waits(self, mark: Mark) -> None:
        """Copy nothing more into the area before that point."""

    @abstractmethod
    def _pass(self, target: torch.Tensor, room: torch.Tensor, source: torch.Tensor, form: Form | None) -> None:
        """Copy bytes into their room in the area, and `bring` them from there to where they belong."""

    @abstractmethod
    def _allocate(self, num_bytes: int) -> Buffer: ...

    def _free(self, memory: Buffer) -> None:
        """Memory that nobody uses any more goes when it is let go of."""

    @abstractmethod
    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

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

    def measure_decoding(self) -> float:
        """Seconds that decoding a GiB of weights takes from compute beside it."""
        return 0.0

    @abstractmethod
    def mark_time(self) -> Any:
        """A point in the compute queue for `seconds_between`."""

    @abstractmethod
    def seconds_between(self, start: Any, end: Any) -> float: ...

    # ------------------------------------------------------------------------------------------------ its memory

    @property
    def name(self) -> str:
        """What it is called, with all on which the figures that are kept of it depend."""
        return "a simulated device"

    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak memory in use since the last call, by anyone; our own copies on a simulated device."""

    def count_peak(self) -> None:
        """Bring the statistics of memory up to date."""

    @abstractmethod
    def available_bytes(self) -> int | None:
        """Bytes of the device that this process has or may have; None if unlimited."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Those of them that hold nothing; None if unlimited."""

    def pressure(self) -> Pressure:
        """How often memory was short so far."""
        return Pressure(0, 0)

    def within(self, budget_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Inside, torch holds no more than this beside what others have here."""
        return contextlib.nullcontext()

    workspace_bytes = 0
    """What torch keeps here of its own once it has computed."""
    others_bytes = 0
    """What others had here when the last run began."""

    def note_others(self) -> None:
        """Take what is used now beside our weights as what others have."""

    def expand_segments(self) -> None:
        """Have torch's allocator grow its segments, so that it reserves little more than it hands out."""

    def release_unused(self) -> None:
        """Give back what torch's allocator holds in reserve."""

    # ------------------------------------------------------------------------------------------------ calls

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
        """The arguments of a call, on the device. A list or dictionary that is there already stays the caller's own,
        since a VAE keeps its features of earlier frames in one."""
        return value if self.device.type == "cpu" else move_arguments(value, self.device)


def move_arguments(value: Any, device: torch.device) -> Any:
    """A value with its tensors on a device; itself, if they are there."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if type(value) not in (list, tuple, dict):
        return value
    parts = list(value.values() if isinstance(value, dict) else value)
    moved = [move_arguments(part, device) for part in parts]
    if all(one is part for one, part in zip(moved, parts, strict=True)):
        return value
    return dict(zip(value, moved, strict=True)) if isinstance(value, dict) else type(value)(moved)
