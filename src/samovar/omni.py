"""The Python API: `Omni(model).generate(prompt)`, and `AsyncOmni` in a server."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from PIL.Image import Image

from .compose.explain import Explanation
from .core.errors import SamovarError, SettingError
from .engine import (
    INPUT_NAMES,
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
    OutputKind,
    PipelineFacts,
    Request,
    Started,
    Supervisor,
    is_media,
    start_worker,
)

__all__ = ["AsyncOmni", "Job", "Omni"]

Prompt = str | Mapping[str, Any]


class _Model(ABC):
    """What is known of a model that has been loaded."""

    @abstractmethod
    def _open(self) -> ImageWorker | Supervisor:
        """What has loaded it."""

    @property
    def facts(self) -> PipelineFacts:
        """What the model takes and makes."""
        return self._open().facts

    @property
    def load_seconds(self) -> float:
        """Time that loading the weights took."""
        return self._open().load_seconds

    def explain(self) -> Explanation:
        """How weights are quantised, what is attached where, and why; of several workers, how many there are. Print it,
        or take `to_dict()`."""
        return self._open().explain()

    @property
    def defaults(self) -> OmniDiffusionSamplingParams:
        """The values of parameters that a request does not give."""
        return self.facts.defaults

    @property
    def can_edit(self) -> bool:
        """Whether the model takes an image to start from, as `image`."""
        return self.facts.can_edit

    @property
    def output(self) -> OutputKind:
        """What the model makes: `output.kind` is "image", "video" or "audio"."""
        return self.facts.output

    @property
    def adapters(self) -> tuple[str, ...]:
        """The LoRA adapters that a request may name."""
        return self.facts.adapters


class Omni(_Model):
    """A model, ready to generate images, videos or sound.

        with Omni("emoji", cache="tea_cache") as omni:
            omni.generate("a grinning cat, 3d style", seed=7)[0].save("cat.png")

    Args:
        model: The name of a built-in model, a folder in diffusers format, a name on the hub, or a loaded pipeline. A
            loaded pipeline is used where it is, and is what it was before after `close`.
        config: A YAML or JSON file with settings.
        od_config: All settings at once, in place of the others.
        settings: The settings of `OmniDiffusionConfig` by name, among them those of `attach`: `cache`, `offload`,
            `parallel`, `compile`, `gpu_memory` and `host_memory`. What is not given is taken from the file, then from
            environment variables such as SAMOVAR_CACHE. vllm-omni's spellings are understood.

    With `parallel`, one process per rank is started; they end with `close`. A script that starts them needs the guard
    `if __name__ == "__main__":`, because each process imports it. Under torchrun the processes are there already.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        od_config: OmniDiffusionConfig | None = None,
        config: str | Path | None = None,
        **settings: Any,
    ) -> None:
        pipeline = None if model is None or isinstance(model, (str, Path)) else model
        if pipeline is not None and not callable(pipeline):
            raise SettingError(f"model={model!r}; expected a name, a folder or a loaded pipeline.", param="model")
        name = None if pipeline is not None else model
        self._worker: ImageWorker | None = start_worker(_read(name, od_config, config, settings), pipeline)

    @overload
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: Any = None,
        *,
        stream: Literal[False] = False,
        **how: Any,
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self, prompt: Any, sampling_params: Any = None, *, stream: Literal[True], **how: Any
    ) -> Iterator[Event]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: OmniDiffusionSamplingParams | Sequence[OmniDiffusionSamplingParams] | None = None,
        *,
        sampling_params_list: Sequence[OmniDiffusionSamplingParams] | None = None,
        image: Image | Sequence[Any] | None = None,
        num_previews: int = 0,
        exact: bool = False,
        lora: Any = None,
        tolerance: float | str | None = None,
        stream: bool = False,
        **overrides: Any,
    ) -> list[GenerationResult] | Iterator[Event]:
        """Generate images, videos or sound for one prompt or several; results are in the order of the prompts.

        Args:
            prompt: One prompt or a list. A prompt is text, or a mapping as in vllm-omni, such as {"prompt": "a cat",
                "negative_prompt": "blurry"}, with any parameters of its own and images by name.
            sampling_params: Parameters for all prompts, or a list of them: one for all, or one for each.
            sampling_params_list: The same list, in vllm-omni's words.
            image: The image to start from, or several, for models that take them; or rows of images, for those that
                learn from examples, with None for the one to make.
            num_previews: Number of previews per prompt, with `stream`.
            exact: Compute every step, whatever the cache would skip.
            lora: The adapters to use, of those registered by the setting `lora`: a name, {"name": ..., "scale": ...},
                or a list of these.
            tolerance: How much the cache "auto" may lose, if not what its settings say.
            stream: Return events as they happen: for each prompt `Started`, `Progress` for each step, `Preview`,
                and `Done` or `Failed`. Leaving the loop early cancels the request.
            overrides: Parameters of `OmniDiffusionSamplingParams` by name, which win over `sampling_params`; other
                images, videos and sounds to start from (`mask`, `last_image`, `control_image`, `video`, `audio` ...);
                and any other argument of the pipeline's call.

        What is wrong with the whole call raises at once. A single prompt that fails raises its error. Among several, it
        has a result with the error in `error`, which `images` raises; the others are generated all the same.
        """
        worker, is_one = self._open(), isinstance(prompt, (str, Mapping))
        inputs, params = _split(overrides)
        how: dict[str, Any] = {"exact": exact, "lora": lora, "tolerance": tolerance, "image": image, "inputs": inputs}
        made: list[Request | GenerationResult] = []
        prompts = read_prompts(prompt)
        for one, base in zip(prompts, _params_of(prompts, sampling_params, sampling_params_list), strict=True):
            try:
                request = request_of(one, params.over(base), **how, num_previews=num_previews if stream else 0)
                made.append(request if stream else worker.facts.check(request))  # A stream has errors as events.
            except SettingError as error:
                own = {"prompt", *(one if isinstance(one, Mapping) else ())}
                if error.param not in own or stream or is_one:
                    raise  # A mistake of the whole call.
                made.append(GenerationResult(one, (), (), params, 0.0, error=error))
        requests = [each for each in made if isinstance(each, Request)]
        if stream:
            return self._stream(requests)
        outcomes = iter(worker.run(requests))
        results = [_result(each, next(outcomes)) if isinstance(each, Request) else each for each in made]
        if is_one and results[0].error is not None:
            raise results[0].error
        return results

    def close(self) -> None:
        """Release the model and end its processes."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        for request in requests:
            yield from _events(self._open(), request)

    def _open(self) -> ImageWorker:
        if self._worker is None:
            raise SettingError("This Omni is closed. Create a new one.")
        return self._worker

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncOmni(_Model):
    """A model for a server: a queue, and worker processes that are replaced when they die.

        omni = AsyncOmni("emoji", max_queue=16)
        await omni.start()
        result = await omni.generate("a grinning cat, 3d style")
        await omni.close()

    The settings are those of `Omni`, and also `max_queue`, `max_batch`, `step_timeout_s`, `load_timeout_s`, and
    `replicas` and `devices` for several workers that share the queue. They are checked here; nothing is loaded before
    `start`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        od_config: OmniDiffusionConfig | None = None,
        config: str | Path | None = None,
        **settings: Any,
    ) -> None:
        if model is not None and not isinstance(model, (str, Path)):
            raise SettingError(
                f"AsyncOmni loads the model in a worker process, so it takes a name or a folder, not a "
                f"{type(model).__name__}. Use Omni for a pipeline that is loaded already.",
                param="model",
            )
        self.config = replace(_read(model, od_config, config, settings), progress=False)
        self._supervisor = Supervisor(self.config)
        self._finalizer = weakref.finalize(self, self._supervisor.close)

    async def start(self) -> None:
        """Start the workers and load the model. Raises ModelError or SettingError if it cannot be loaded."""
        try:
            await asyncio.to_thread(self._supervisor.start)
        except asyncio.CancelledError:  # Otherwise the thread would keep waiting and the worker loading.
            self._supervisor.abandon()
            raise

    def _open(self) -> Supervisor:
        return self._supervisor

    def submit(self, prompt: Prompt | Request, params: OmniDiffusionSamplingParams | None = None, **how: Any) -> Job:
        """Queue a request: a prompt, its parameters, and what else a `Request` has, such as `image`, or `inputs` by
        name; or all of it as a `Request`. A higher priority goes first; one that has not started within `deadline_s`
        fails with QueueTimeoutError. Refused at once: parameters that the model does not take, a full queue, an engine
        that is closing or down."""
        if isinstance(prompt, Request):
            return self._supervisor.submit(replace(prompt, **how))
        return self._supervisor.submit(request_of(prompt, params or OmniDiffusionSamplingParams(), **how))

    def check_room(self) -> None:
        """Raise QueueFullError if the queue would not take another request."""
        self._supervisor.check_room()

    async def generate(
        self, prompt: Prompt, params: OmniDiffusionSamplingParams | None = None, **how: Any
    ) -> GenerationResult:
        """Submit a request and wait for its result. Cancelling the task cancels the request."""
        job = self.submit(prompt, params, **how)
        try:
            return await job.result()
        finally:
            job.cancel()  # Does nothing if it is over.

    def status(self) -> EngineStatus:
        """The state of the engine."""
        return self._supervisor.status()

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse waiting requests, let running ones finish within `drain_s`, and end the worker."""
        await asyncio.to_thread(self._supervisor.close, drain_s)

    async def __aenter__(self) -> AsyncOmni:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _read(
    model: str | Path | None, od_config: OmniDiffusionConfig | None, file: str | Path | None, settings: dict[str, Any]
) -> OmniDiffusionConfig:
    if model is not None:
        settings = {"model": str(model), **settings}
    if od_config is None:
        return OmniDiffusionConfig.read(settings, file)
    if settings or file is not None:
        given = ", ".join(settings) or "config"
        raise SettingError(f"od_config holds all settings, and {given} was given too. Put it into od_config.")
    if not isinstance(od_config, OmniDiffusionConfig):
        raise SettingError(f"od_config={od_config!r}; expected an OmniDiffusionConfig.", param="od_config")
    return od_config


def read_prompts(prompt: Any) -> list[Any]:
    """The prompts of a call, each text or a mapping."""
    if isinstance(prompt, (str, Mapping)):
        return [prompt]
    if not isinstance(prompt, Iterable):
        raise SettingError(f"prompt={prompt!r}; expected text, a mapping, or a list of them.", param="prompt")
    return list(prompt)


def _params_of(prompts: Sequence[Any], params: Any, params_list: Any) -> list[OmniDiffusionSamplingParams]:
    """The parameters of each prompt."""
    if params is not None and params_list is not None:
        message = "sampling_params and sampling_params_list were both given. Give one."
        raise SettingError(message, param="sampling_params_list")
    found = params if params_list is None else params_list
    several: list[Any] = list(found) if isinstance(found, (list, tuple)) else [found or OmniDiffusionSamplingParams()]
    if not all(isinstance(each, OmniDiffusionSamplingParams) for each in several):
        raise SettingError(f"sampling_params={found!r}; expected OmniDiffusionSamplingParams.", param="sampling_params")
    if len(several) not in (1, len(prompts)):
        message = f"There are {len(several)} sampling_params for {len(prompts)} prompts. Give one for all, or one each."
        raise SettingError(message, param="sampling_params")
    return several * (len(prompts) if len(several) == 1 else 1)


def _split(given: Mapping[str, Any]) -> tuple[dict[str, Any], OmniDiffusionSamplingParams]:
    """The images, videos and sounds among some arguments, and the parameters."""
    inputs = {name: value for name, value in given.items() if is_media(value) or name in INPUT_NAMES}
    others = {name: value for name, value in given.items() if name not in inputs}
    return inputs, OmniDiffusionSamplingParams.from_arguments(others)


def request_of(prompt: Any, params: OmniDiffusionSamplingParams, **how: Any) -> Request:
    """A request for a prompt. What a mapping says beside its text wins over what is said for all."""
    if not isinstance(prompt, Mapping):
        return Request(prompt, params, **how)
    own = {**prompt, **(prompt.get("multi_modal_data") or {})}
    own.pop("multi_modal_data", None)
    if "prompt" not in own:
        raise SettingError(f"prompt={prompt!r}; expected a mapping with the text as 'prompt'.", param="prompt")
    text, image = own.pop("prompt"), own.pop("image", how.pop("image", None))
    inputs, mine = _split(own)
    return Request(text, mine.over(params), image=image, inputs={**how.pop("inputs", {}), **inputs}, **how)


def _result(request: Request, outcome: GenerationResult | SamovarError) -> GenerationResult:
    return GenerationResult.failed(request, outcome) if isinstance(outcome, SamovarError) else outcome


def _events(worker: ImageWorker, request: Request) -> Iterator[Event]:
    """The events of a request, which runs in another thread: a pipeline cannot be left half-way."""
    events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
    is_cancelled = threading.Event()
    listener = Listener(events.put, is_cancelled.is_set)
    with concurrent.futures.ThreadPoolExecutor(1, "samovar stream") as thread:
        running = thread.submit(worker.make, request, listener)
        running.add_done_callback(lambda _: events.put(None))
        try:
            yield Started(0.0)
            while (event := events.get()) is not None:
                yield event
            outcome = running.result()
            yield Failed(outcome) if isinstance(outcome, SamovarError) else Done(outcome)
        finally:
            is_cancelled.set()
