"""Recording and replaying a function as a CUDA graph; tests have what stands for one."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..core.interop import end_pool
from .static_inputs import Unsuitable

Function = Callable[[], Any]


class Recording(NamedTuple):
    """A function that was recorded."""

    replay: Callable[[], None]
    """Does it again, with what its inputs hold now, and overwrites the output; for whoever has taken their turn."""
    output: Any
    num_bytes: int
    """Memory that it took."""


class Recorder:
    """CUDA graphs of one GPU, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        """Held while a recording is in use: all of them share memory."""
        self._device = device
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that live in the pool. With the last of them the pool goes, and its memory is given back."""
        self._pool: Any = None
        self._stream: Any = None
        self._last_used: Any = None

    def record(self, function: Function) -> Recording:
        """Unsuitable if it cannot be recorded; everything else goes on then as before."""
        before = torch.cuda.memory_reserved(self._device)
        living = list(self._graphs)  # None of them may go while the pool is in use.
        if not living:
            self._begin_pool()
        graph = torch.cuda.CUDAGraph()
        try:
            with failing_as(Unsuitable, "capturing it failed"):
                output = self._capture(graph, function)
        except Unsuitable:
            self._recover()
            raise
        self._graphs.add(graph)
        del living
        taken = torch.cuda.memory_reserved(self._device) - before
        return Recording(graph.replay, output, max(taken, 0))

    def _begin_pool(self) -> None:
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def _capture(self, graph: Any, function: Function) -> Any:
        current, was_collecting = torch.cuda.current_stream(self._device), gc.isenabled()
        self._stream.wait_stream(current)
        gc.disable()  # Nothing on the device may be freed by chance.
        try:
            with torch.cuda.stream(self._stream):
                # Only what this thread does may not disturb it: a server has others.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = function()
                except BaseException:
                    with contextlib.suppress(RuntimeError, UserWarning):  # It says that it failed, which is known.
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if was_collecting:
                gc.enable()
        current.wait_stream(self._stream)
        return output

    def _recover(self) -> None:
        """After a failed capture torch still takes its pool to be in use and its random generator to be captured. So
        the pool is left to the graphs that are in it, and a capture that succeeds frees the generator."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        end_pool(self._device, self._pool)
        self._begin_pool()
        with contextlib.suppress(RuntimeError):
            self._capture(torch.cuda.CUDAGraph(), functools.partial(torch.zeros, 1, device=self._device))
        self._begin_pool()
        torch.cuda.empty_cache()

    def take_turn(self) -> None:
        """Have what is done next on this thread wait for what was replayed before, on whichever stream: inputs of a
        recording may not be overwritten while it is replayed for another thread."""
        current = torch.cuda.current_stream(self._device)
        if self._last_used is not None and self._last_used != current:
            current.wait_stream(self._last_used)
        self._last_used = current


@contextlib.contextmanager
def failing_as(kind: type[Exception], what: str) -> Iterator[None]:
    """Whatever is raised inside comes out as this kind; Ctrl-C does not."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, kind) or not isinstance(error, Exception):
            raise
        text = str(error).strip().partition("\n")[0]
        raise kind(f"{what} ({type(error).__name__}: {text})") from error


_recorders: dict[torch.device, Recorder] = {}


def recorder_for(device: torch.device) -> Recorder | None:
    """The recorder of a device; None if nothing can be recorded there."""
    if device not in _recorders and device.type == "cuda":
        with torch.inference_mode(False):
            _recorders[device] = Recorder(device)
    return _recorders.get(device)
