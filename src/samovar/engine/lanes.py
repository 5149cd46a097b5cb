"""May one request's text be encoded, or its image be decoded, while another is denoised? In lanes, yes.

A lane is a copy of the pipeline: the same modules, but a scheduler and attributes of its own, and on a GPU a stream of
its own. A call goes through three stages: what comes before the first step, the steps, and what comes after the last.
No two lanes are in the same stage, so no module is used by two calls at once, and each call computes what it would
alone.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Hashable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from ..arch import find_denoisers
from ..arch.modular import is_modular
from ..cache import CacheBackend
from ..core.errors import SettingError
from ..hooks import HookOrder, ModelHook, install_hook
from .request import Request

_HOOK = "samovar_lanes"
_BEFORE, _STEPS, _AFTER = range(3)


def must_be_alone(requests: Iterable[Request]) -> bool:
    """Whether a call uses a module outside of its stage, as the VAE for an image that comes in or for a preview, or
    what all calls share, as the switch of the cache."""
    return any(each.is_single or each.num_previews or each.exact for each in requests)


class Lane:
    """One call at a time, and the stage that it is in."""

    def __init__(self, pipeline: Any, stages: list[threading.Lock], stream: Any = None) -> None:
        self.pipeline = pipeline
        self._stages = stages
        self._stream = stream
        self._held: set[int] = set()
        self.is_alone = True
        """Whether no other call may overlap with this one."""
        self.draws = False
        """Whether it was seen to draw random numbers without its generator."""

    def move(self, stage: int) -> None:
        """Wait until the stage is free; before, let go of the one that the call is in. A call that is alone has all."""
        if stage in self._held:
            return
        self._synchronize()
        self._leave()
        self._take(stage)

    def end_steps(self) -> None:
        """The last step is done. Should there be another one, the call waits for its turn again."""
        self.move(_AFTER)

    def note_draws(self) -> None:
        self.draws = True

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """A call of the pipeline."""
        try:
            for stage in (_BEFORE, _STEPS, _AFTER) if self.is_alone else (_BEFORE,):
                self._take(stage)
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                token = _current.set(self)
                try:
                    yield
                    self._synchronize()
                finally:
                    _current.reset(token)
        finally:
            self._leave()

    def _take(self, stage: int) -> None:
        self._stages[stage].acquire()
        self._held.add(stage)

    def _leave(self) -> None:
        while self._held:
            self._stages[self._held.pop()].release()

    def _synchronize(self) -> None:
        """Modules may keep tensors, such as tables of positions, which the next lane reads on another stream."""
        if self._stream is not None:
            self._stream.synchronize()


_current: ContextVar[Lane | None] = ContextVar("samovar_lane", default=None)


class _TurnHook(ModelHook):
    """The denoisers' calls are the steps."""

    order = HookOrder.OUTERMOST

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        lane = _current.get()
        if lane is not None:
            lane.move(_STEPS)
        return args, kwargs


def _twin(pipeline: Any) -> Any:
    """The pipeline again, with the same modules; SettingError if it keeps what a call changes in other places."""
    from diffusers import DiffusionPipeline

    inner = [name for name, value in vars(pipeline).items() if isinstance(value, DiffusionPipeline)]
    if is_modular(type(pipeline)) or not isinstance(pipeline, DiffusionPipeline) or inner:
        what = f"it is made of others ({', '.join(inner)})" if inner else "it is none of the usual kind"
        message = f"overlap needs a pipeline that can be copied, and {type(pipeline).__name__} cannot: {what}."
        raise SettingError(f"{message} Leave out overlap.", param="overlap")
    twin = copy.copy(pipeline)
    for name, component in pipeline.components.items():
        if hasattr(component, "set_timesteps"):  # A scheduler, which counts the steps.
            setattr(twin, name, copy.deepcopy(component))
    return twin


class Lanes:
    """One lane, or two that overlap."""

    def __init__(self, pipeline: Any, device: torch.device, cache: CacheBackend | None = None, count: int = 1) -> None:
        self.count = count
        self._device = device
        self._stages = [threading.Lock() for _ in range(3)]
        self._undo = contextlib.ExitStack()
        self._free = [Lane(pipeline, self._stages, self._new_stream())]
        for _ in range(count - 1):
            twin = _twin(pipeline)
            if cache is not None:
                self._undo.enter_context(cache.enable(twin))
            self._free.append(Lane(twin, self._stages, self._new_stream()))
        self._has_free = threading.Semaphore(count)
        self._draws = False
        """Whether a call has drawn random numbers from torch's own generator, which all calls share."""
        self._needs: dict[Hashable, int] = {}
        """By the shape of a call: the memory that it took, beside the weights, when it was alone."""
        for denoiser in find_denoisers(pipeline).values() if count > 1 else ():
            install_hook(self._undo, denoiser, _HOOK, _TurnHook())

    @contextlib.contextmanager
    def before_steps(self) -> Iterator[None]:
        """Alone with what comes before the steps, such as tokenizers."""
        with self._stages[_BEFORE]:
            yield

    @contextlib.contextmanager
    def calling(self, shape: Hashable, alone: bool) -> Iterator[Lane]:
        """A call in the next free lane: alone if it must be, if it is the first of its shape, or if there may be no
        memory for two."""
        with self._has_free:
            lane = self._free.pop(0)
            try:
                lane.is_alone = alone or self.count == 1 or self._draws or not self._has_room(shape)
                with lane.calling(), self._measuring(shape, lane):
                    yield lane
                self._draws |= lane.draws
            finally:
                self._free.insert(0, lane)

    def close(self) -> None:
        self._undo.close()

    def _new_stream(self) -> Any:
        if self.count == 1 or self._device.type != "cuda":
            return None
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def _has_room(self, shape: Hashable) -> bool:
        if shape not in self._needs:
            return False
        if self._device.type != "cuda":
            return True
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + kept >= 2 * self._needs[shape]

    @contextlib.contextmanager
    def _measuring(self, shape: Hashable, lane: Lane) -> Iterator[None]:
        if not lane.is_alone or self.count == 1 or shape in self._needs:
            yield
            return
        is_cuda = self._device.type == "cuda"
        before = torch.cuda.memory_allocated(self._device) if is_cuda else 0
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self._needs[shape] = torch.cuda.max_memory_allocated(self._device) - before if is_cuda else 0
