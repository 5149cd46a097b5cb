"""How is Samovar used from Python? `Omni(model).generate(prompt)`, and `AsyncOmni` in a server."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from .engine import (
    Done,
    EngineStatus,
    Event,
    Failed,
    GenerationResult,
    ImageWorker,
    Job,
    Listener,
    OmniDiffusionConfig,
    OmniDiffusionSamplingParams,
    Request,
    Started,
    Supervisor,
    start_worker,
)
from .errors import SamovarError, SettingError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["AsyncOmni", "Job", "Omni"]


class Omni:
    """A model, ready to make pictures.

        with Omni("emoji") as omni:
            omni.generate("a grinning cat, 3d style", seed=7)[0].images[0].save("cat.png")

    `model` is the name of one that comes with Samovar, a folder in diffusers format, or a name of the hub. The other
    settings are those of `OmniDiffusionConfig`, by name. `cache_backend` skips steps that would change little
    ("forecast", "tea_cache", or another by its name), with the settings in `cache_config`; what it did is in the
    results. What is not given is taken from the file `config` (YAML or JSON), or else from the environment
    (SAMOVAR_CACHE_BACKEND and so on). Instead of all this, `od_config` may be a whole OmniDiffusionConfig.

    `gpu_memory="12GiB"` offloads as little as that much memory demands; `enable_cpu_offload` lets components take
    turns on the GPU, `enable_layerwise_offload` streams their blocks. With `ulysses_degree`, `ring_degree` or
    `cfg_parallel_size`, several processes make each picture, on as many GPUs, or on the CPU: their number is the
    product of the three. They are started here and end with `close`; a script that starts them needs the guard
    `if __name__ == "__main__":`, as each of them imports it. Under torchrun they are there already.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        od_config: OmniDiffusionConfig | None = None,
        config: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self._worker: ImageWorker | None = start_worker(_read(model, od_config, config, settings))

    @property
    def defaults(self) -> OmniDiffusionSamplingParams:
        """What is used where neither the parameters nor the overrides say anything."""
        return self._open().facts.defaults

    @property
    def can_edit(self) -> bool:
        """Whether the model takes a picture to start from, as `image`."""
        return self._open().facts.can_edit

    @property
    def load_seconds(self) -> float:
        """How long the weights took to load."""
        return self._open().load_seconds

    @overload
    def generate(
        self,
        prompt: str | Sequence[str],
        sampling_params: OmniDiffusionSamplingParams | None = None,
        *,
        image: Image | None = None,
        num_previews: int = 0,
        exact: bool = False,
        stream: Literal[False] = False,
        **overrides: Any,
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[str],
        sampling_params: OmniDiffusionSamplingParams | None = None,
        *,
        image: Image | None = None,
        num_previews: int = 0,
        exact: bool = False,
        stream: Literal[True],
        **overrides: Any,
    ) -> Iterator[Event]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        sampling_params: OmniDiffusionSamplingParams | None = None,
        *,
        image: Image | None = None,
        num_previews: int = 0,
        exact: bool = False,
        stream: bool = False,
        **overrides: Any,
    ) -> list[GenerationResult] | Iterator[Event]:
        """Pictures for one prompt or several, in their order. Overrides are settings by name, for this call.

        A prompt that fails raises its error. Among several, it has a result without pictures in its place, with the
        error in `error`, and the others are made all the same. With `exact=True` every step is computed, whatever the
        cache would skip. With `stream=True`, what happens is told while it
        happens: for each prompt in turn `Started`, `Progress` for each step, `num_previews` times `Preview`, and
        `Done` or `Failed`. To leave the loop early is to take the request back.
        """
        worker = self._open()
        params = OmniDiffusionSamplingParams.from_dict(overrides).over(sampling_params or OmniDiffusionSamplingParams())
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if stream:
            return self._stream([Request(one, params, image, num_previews, exact) for one in prompts])
        if isinstance(prompt, str):
            (result,) = _made(worker, [Request(prompt, params, image, exact=exact)])
            if result.error is not None:
                raise result.error
            return [result]
        requests: list[Request | GenerationResult] = []
        for one in prompts:
            try:
                requests.append(Request(one, params, image, exact=exact))
            except SettingError as error:
                requests.append(GenerationResult(one, (), (), params, 0.0, error=error))
        made = iter(_made(worker, [request for request in requests if isinstance(request, Request)]))
        return [next(made) if isinstance(request, Request) else request for request in requests]

    def close(self) -> None:
        """Let the model go, and end its processes. A closed Omni makes no more pictures."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """One prompt after the other, each in a thread of its own: a pipeline cannot be left half-way, only told."""
        for request in requests:
            yield from _followed(self._open(), request)

    def _open(self) -> ImageWorker:
        if self._worker is None:
            raise SettingError("This Omni is closed. Make a new one.")
        return self._worker

    def __enter__(self) -> Omni:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncOmni:
    """A model for a server: a queue, and worker processes that are replaced when they die.

        omni = AsyncOmni("emoji", max_queue=16)
        await omni.start()
        pictures = await omni.generate("a grinning cat, 3d style")
        await omni.close()

    The settings are those of `Omni`, and `max_queue`, `max_batch`, `step_timeout_s` and `load_timeout_s`. All are
    checked here, and nothing is loaded before `start`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        od_config: OmniDiffusionConfig | None = None,
        config: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.config = replace(_read(model, od_config, config, settings), progress=False)
        self._supervisor = Supervisor(self.config)
        self._finalizer = weakref.finalize(self, self._supervisor.close)

    async def start(self) -> None:
        """Start the worker and load the model; raises ModelError or SettingError if that cannot be."""
        try:
            await asyncio.to_thread(self._supervisor.start)
        except asyncio.CancelledError:  # The thread would go on waiting, and the worker loading.
            self._supervisor.abandon()
            raise

    @property
    def defaults(self) -> OmniDiffusionSamplingParams:
        """What is used where a request says nothing."""
        return self._supervisor.facts.defaults

    @property
    def can_edit(self) -> bool:
        """Whether the model takes a picture to start from."""
        return self._supervisor.facts.can_edit

    @property
    def load_seconds(self) -> float:
        """How long the weights took to load."""
        return self._supervisor.load_seconds

    def check(
        self, prompt: str, params: OmniDiffusionSamplingParams | None = None, *, image: Image | None = None
    ) -> None:
        """Raise SettingError if the model cannot make this."""
        self._supervisor.facts.check(Request(prompt, params or OmniDiffusionSamplingParams(), image))

    def submit(
        self,
        prompt: str,
        params: OmniDiffusionSamplingParams | None = None,
        *,
        image: Image | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        num_previews: int = 0,
        exact: bool = False,
    ) -> Job:
        """Put a request into the queue. Those of a higher priority go first; one that is not started within
        `deadline_s` fails with QueueTimeoutError. Refused at once: settings that the model does not take, a full
        queue, an engine that is closing or down."""
        request = Request(prompt, params or OmniDiffusionSamplingParams(), image, num_previews, exact)
        return self._supervisor.submit(request, priority=priority, deadline_s=deadline_s)

    async def generate(
        self, prompt: str, params: OmniDiffusionSamplingParams | None = None, **how: Any
    ) -> GenerationResult:
        """Submit a request and wait for its pictures. To cancel the task is to take the request back."""
        job = self.submit(prompt, params, **how)
        try:
            return await job.result()
        finally:
            job.cancel()  # Of one that is over, nothing is left to be taken back.

    def status(self) -> EngineStatus:
        """How the engine is now."""
        return self._supervisor.status()

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse what waits, let what runs finish within `drain_s`, and end the worker."""
        await asyncio.to_thread(self._supervisor.close, drain_s)

    async def __aenter__(self) -> AsyncOmni:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _read(
    model: str | None, od_config: OmniDiffusionConfig | None, file: str | Path | None, settings: dict[str, Any]
) -> OmniDiffusionConfig:
    if model is not None:
        settings = {"model": model, **settings}
    if od_config is None:
        return OmniDiffusionConfig.read(settings, file)
    if settings or file is not None:
        given = ", ".join(settings) or "config"
        raise SettingError(f"od_config holds all settings, and {given} was given too. Put it into od_config.")
    if not isinstance(od_config, OmniDiffusionConfig):
        raise SettingError(f"od_config must be an OmniDiffusionConfig, not {od_config!r}.")
    return od_config


def _made(worker: ImageWorker, requests: Sequence[Request]) -> list[GenerationResult]:
    """Results in order, with errors in their places; neighbours are made together where they may be."""
    results: list[GenerationResult] = []
    rest = list(requests)
    while rest:
        count, pictures = 1, rest[0].num_images
        while count < len(rest) and rest[0].fits_with(rest[count]):
            pictures += rest[count].num_images
            if pictures > worker.max_batch:
                break
            count += 1
        for request, outcome in zip(rest[:count], worker.run(rest[:count]), strict=True):
            is_error = isinstance(outcome, SamovarError)
            results.append(GenerationResult.failed(request, outcome) if is_error else outcome)  # type: ignore[arg-type]
        rest = rest[count:]
    return results


def _followed(worker: ImageWorker, request: Request) -> Iterator[Event]:
    events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
    is_left = threading.Event()

    def work() -> None:
        try:
            (outcome,) = worker.run([request], Listener(lambda _, event: events.put(event), lambda _: is_left.is_set()))
            events.put(Failed(outcome) if isinstance(outcome, SamovarError) else Done(outcome))
        except BaseException as error:  # Raised where the events are read.
            events.put(error)

    thread = threading.Thread(target=work, name="samovar stream", daemon=True)
    thread.start()
    try:
        yield Started(0.0)
        while True:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, (Done, Failed)):
                return
    finally:
        is_left.set()
        thread.join()
