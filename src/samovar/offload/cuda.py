"""A GPU that takes weights in on streams of their own, from host memory that is pinned where it is."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ..arch.devices import read_device
from ..core.errors import SettingError
from .coding import Coded, Form, decode_into, encode, fast_decoder
from .device import Buffer, Pressure, Stage, bring
from .pinned import new_chunk
from .ring import Mark

_cuda: Any = torch.cuda  # Parts of it are untyped.
_cudnn: Any = torch.backends.cudnn
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context, whichever thread or GPU asked."""
_OVER = 2**25
"""How far torch's allocator may pass its limit: it rounds up to pages of 20 MiB once it has looked at it."""
_PROBE_BYTES, _DECODED_BYTES, _PROBES = 2**26, 2**27, 8
_BESIDE = 2.5
"""Beside computing, decoding takes 2.5 times as long as alone: FLUX.1 on an H200."""
_MAX_CODERS, _CODER_BYTES = 4, 2**29
"""Threads that compress weights, and device memory that one takes at most."""


def _current(stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
    """Inside, work goes to a stream. `torch.cuda.stream` does the same and takes the host ten times as long."""
    return stream


class CudaStage(Stage):
    """A GPU. Copies run on one stream; compute runs on the stream that is current when a hook runs.

    Buffers live from `allocate` to `free`, not from copy to copy. So torch's allocator sees none of the traffic on the
    copy stream, `record_stream` is not needed, and the two streams wait for each other through events alone.
    """

    is_real = True
    workspace_bytes = 2**26  # 32 MiB each for cuBLAS and cuBLASLt on a Hopper, less on others.

    def __init__(self, device: torch.device) -> None:
        device = read_device(device)
        super().__init__(torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index))
        self._into_area: torch.cuda.Stream = _cuda.Stream(self.device)
        self._arriving: torch.cuda.Stream = _cuda.Stream(self.device, priority=-1)  # Before compute: decoding is short.
        """The stream that writes to where weights belong."""
        self._arrived: torch.cuda.Event = _cuda.Event()
        """Recorded and waited for at once, again and again."""
        self._runtime = _cuda.cudart()
        self._last_computing = self._computing()
        """The stream of the last call."""
        self._bus_bytes_s = self._decoding_s = 0.0

    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)  # A number is looked up quickest.

    def _allocate(self, num_bytes: int) -> Buffer:
        return Buffer(torch.empty(num_bytes, dtype=torch.uint8, device=self.device), self._computing())

    def _free(self, memory: Buffer) -> None:
        # The allocator reuses this memory for work on the stream that allocated it. If another stream computes now,
        # the allocator must know.
        computing = self._computing()
        if memory.stream != computing:
            memory.flat.record_stream(computing)

    def is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    # ------------------------------------------------------------------------------------------------ copies

    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with _current(self._arriving):
            target.copy_(source, non_blocking=True)

    @property
    def decodes_fast(self) -> bool:  # type: ignore[override]
        return fast_decoder(self.device) is not None

    def encode(self, words: torch.Tensor) -> Coded | None:
        try:
            return encode(words, device=self.device)
        except torch.OutOfMemoryError:
            return encode(words)

    def num_coders(self) -> int:
        free = self.free_bytes()
        return _MAX_CODERS if free is None else max(1, min(_MAX_CODERS, free // _CODER_BYTES))

    def _join_area(self) -> None:
        self._into_area.wait_stream(self._arriving)
        self._arriving.wait_stream(self._into_area)

    def _area_waits(self, mark: Mark) -> None:
        self._into_area.wait_event(mark)

    def _pass(self, target: torch.Tensor, room: torch.Tensor, source: torch.Tensor, form: Form | None) -> None:
        with _current(self._into_area):
            room.copy_(source, non_blocking=True)
        self._arrived.record(self._into_area)
        self._arriving.wait_event(self._arrived)
        with _current(self._arriving):
            bring(target, room, form)

    def mark_copied(self) -> Mark:
        return self._arriving.record_event()

    def mark_computed(self) -> Mark:
        return self._computing().record_event()

    def compute_waits(self, mark: Mark) -> None:
        self._computing().wait_event(mark)

    def copies_wait(self, mark: Mark) -> None:
        self._arriving.wait_event(mark)

    def host_waits(self, mark: Mark) -> None:
        mark.synchronize()

    def synchronize(self) -> None:
        self._into_area.synchronize()
        self._arriving.synchronize()

    def begin_call(self) -> None:
        computing = self._computing()
        if computing != self._last_computing:
            computing.wait_stream(self._last_computing)
            self._last_computing = computing

    def check_call(self) -> None:
        super().check_call()
        if torch.cuda.is_current_stream_capturing():
            raise SettingError(
                "A streamed block was called during the capture of a CUDA graph, but its weights have another address "
                'at each call. Compile without CUDA graphs (mode="default"), or take the offload off: '
                "samovar.detach(pipe)."
            )

    # ------------------------------------------------------------------------------------------------ pinning

    def register(self, address: int, num_bytes: int) -> str | None:
        with torch.cuda.device(self.device):  # Called from several threads, each with its own current device.
            return self._problem(self._runtime.cudaHostRegister(address, num_bytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.device):
            problem = self._problem(self._runtime.cudaHostUnregister(address))
        if problem is not None:
            raise RuntimeError(f"Host memory could not be unpinned: {problem}.")

    def _problem(self, code: Any) -> str | None:
        """The error that a CUDA call returned, if any."""
        if int(code) == 0:
            return None
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)  # CUDA keeps the last error, and torch's next kernel would raise it.
        return str(self._runtime.cudaGetErrorString(self._runtime.cudaError(int(code))))

    # ------------------------------------------------------------------------------------------------ time and memory

    def measure_bus(self) -> float:
        if not self._bus_bytes_s:
            with torch.inference_mode(False):
                source = new_chunk(_PROBE_BYTES).fill_(1)
                target = torch.empty_like(source, device=self.device)
            problem = self.register(source.data_ptr(), _PROBE_BYTES)
            marks = [_cuda.Event(enable_timing=True) for _ in range(_PROBES + 1)]
            self._arriving.wait_stream(self._computing())
            with torch.cuda.stream(self._arriving):
                for mark in marks:
                    target.copy_(source, non_blocking=True)
                    mark.record()
            times = [self.seconds_between(*pair) for pair in itertools.pairwise(marks)]
            if problem is None:
                self.unregister(source.data_ptr())
            self._bus_bytes_s = _PROBE_BYTES / min(times)
        return self._bus_bytes_s

    def measure_decoding(self) -> float:
        if not self._decoding_s and self.decodes_fast and self.free_bytes() > 4 * _DECODED_BYTES:
            with torch.inference_mode(False):
                words = torch.randn(_DECODED_BYTES // 2, dtype=torch.bfloat16, device=self.device)
                coded = self.encode(words)
                assert coded is not None, "normal weights can be coded"
                room, target = coded.data.to(self.device), torch.empty_like(words).view(torch.uint8)
            decode_into(coded.form, room, target)
            marks = [self.mark_time()]
            for _ in range(_PROBES):
                decode_into(coded.form, room, target)
                marks.append(self.mark_time())
            # The fastest: in others the device may have waited for the host.
            taken = min(self.seconds_between(*pair) for pair in itertools.pairwise(marks))
            self._decoding_s = _BESIDE * taken / _DECODED_BYTES * 2**30
        return self._decoding_s

    def mark_time(self) -> torch.cuda.Event:
        event: torch.cuda.Event = _cuda.Event(enable_timing=True)
        event.record(self._computing())
        return event

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    @property
    def name(self) -> str:
        return f"{torch.cuda.get_device_name(self.device)}, torch {torch.__version__}, cuDNN {_cudnn.version()}"

    def peak_bytes(self) -> int:
        self.count_peak()
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def count_peak(self) -> None:
        peak = torch.cuda.max_memory_reserved(self.device)
        self.stats.peak_reserved_bytes = max(self.stats.peak_reserved_bytes, peak)

    def available_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.device) * total)
        return min(free + torch.cuda.memory_reserved(self.device), allowed)

    def free_bytes(self) -> int:
        return self.available_bytes() - torch.cuda.memory_allocated(self.device)

    def pressure(self) -> Pressure:
        counts = torch.cuda.memory_stats(self.device)
        return Pressure(counts.get("num_ooms", 0), counts.get("num_alloc_retries", 0))

    def note_others(self) -> None:
        self.others_bytes = max(torch.cuda.memory_allocated(self.device) - self.stats.held_bytes, 0)

    @contextlib.contextmanager
    def within(self, budget_bytes: int) -> Iterator[None]:
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        allowed = budget_bytes - _OVER + self.others_bytes
        torch.cuda.set_per_process_memory_fraction(min(before, allowed / total), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    def expand_segments(self) -> None:
        if torch.cuda.get_allocator_backend() != "native":
            return
        current = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        if "expandable_segments" not in current:  # Else the user has decided about them.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # Its successor is not in every version of torch.
                _cuda.memory._set_allocator_settings(",".join(filter(None, [current, "expandable_segments:True"])))

    def release_unused(self) -> None:
        torch.cuda.synchronize(self.device)  # What other streams have freed is held until they are done with it.
        torch.cuda.empty_cache()
