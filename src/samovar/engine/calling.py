"""One call of a pipeline: for prompts and seeds, each with a generator of its own; why it failed, and what of a request
had no effect on what it made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..arch.calls import call_parameters
from ..core.errors import EngineError, OutOfMemoryError, SamovarError, SettingError
from ..media import Audio, Video
from .facts import PipelineFacts
from .request import OmniDiffusionSamplingParams, Request

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad allocation", "_STATUS_ALLOC_FAILED",
              "Storage size calculation overflowed", "overflow")  # fmt: skip
_VISION = "torchvision"
_TUNED_WITH = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "height", "width", "num_frames")


def call_pipeline(pipeline: Any, prompts: Sequence[str], seeds: Sequence[int], arguments: Mapping[str, Any]) -> Any:
    """What the pipeline returns, for each prompt and seed."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    call: dict[str, Any] = {**arguments, "prompt": list(prompts), "generator": generators}
    if len(prompts) == 1:
        call |= {"prompt": prompts[0], "generator": generators[0]}
    elif "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * len(prompts)
    if not any(prompts) and "prompt" not in call_parameters(type(pipeline)):
        del call["prompt"]
    with _drawn_by(seeds[0]):
        return pipeline(**call)


@contextlib.contextmanager
def _drawn_by(seed: int) -> Iterator[None]:
    """Draw what a pipeline draws without its generator by the seed, too: some encode their images so."""
    before = random_state()
    try:
        torch.default_generator.manual_seed(seed)
        if len(before) > 1:
            torch.cuda.manual_seed(seed)
        yield
    finally:
        set_random_state(before)


def random_state() -> list[torch.Tensor]:
    """Of torch's own generators, on the CPU and the current GPU."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def set_random_state(state: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1])


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of an object is another. Afterwards it is its own again, or its class's."""
    entries, own = vars(owner), {key: kept for key, kept in vars(owner).items() if key == name}
    entries[name] = value
    try:
        yield
    finally:
        del entries[name]
        entries.update(own)


# ------------------------------------------------------------------------------------------------ failures


def failure(error: Exception, facts: PipelineFacts, request: Request) -> SamovarError:
    """What to raise in place of an error of a pipeline. Its own checks raise ValueError; arguments that it cannot use,
    or lacks, raise errors about types."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        problem = next(iter(str(error).splitlines()), type(error).__name__)
        described = _described(request, facts.output.kind)
        return OutOfMemoryError(f"There is not enough memory for {described}: {problem}")
    given, missing = [*request.params.options, *request.inputs], facts.inputs.missing(request.arguments or {})
    is_about_types = isinstance(error, (TypeError, AttributeError)) and (given or missing)
    if isinstance(error, ValueError) or is_about_types:
        hint = f" It was given no {' and no '.join(missing)}." if missing else ""
        hint += f" Check {', '.join(given)}." if given and not isinstance(error, ValueError) else ""
        words = str(error).rstrip(".")
        return SettingError(f"{facts.class_name} refuses these settings: {words}.{hint}", param=next(iter(given), None))
    return EngineError(f"{facts.class_name} failed: {reason_of(error)}")


def reason_of(error: BaseException) -> str:
    """Why a pipeline failed. Modules of diffusers that use torchvision only if it is there lack a name if it is not."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if isinstance(error, NameError) and trace is not None and f"is_{_VISION}_available" in trace.tb_frame.f_globals:
        return f"it needs {_VISION}, which is not installed: pip install {_VISION}."
    return f"{type(error).__name__}: {error}"


def _described(request: Request, kind: str) -> str:
    """What did not fit into memory."""
    params = request.params
    if kind == "audio":
        return f"a sound of {params.seconds:g} s" if params.seconds else "a sound"
    size = f"{params.width} x {params.height} pixels" if params.width and params.height else "the default size"
    frames = f", {params.num_frames} frames" if params.num_frames else ""
    return f"{kind} of {size}{frames}"


# ------------------------------------------------------------------------------------------------ notes


def notes_on(request: Request, made: Sequence[Any], pipeline: Any, tuned: OmniDiffusionSamplingParams) -> Iterator[str]:
    """Notes on what was made of a request; `tuned` is what the cache was tuned with."""
    params, tokenizer = request.params, getattr(pipeline, "tokenizer_2", None) or getattr(pipeline, "tokenizer", None)
    length = 0 if tokenizer is None else len(tokenizer(request.prompt, truncation=False, verbose=False).input_ids)
    limit = params.max_sequence_length or int(getattr(tokenizer, "model_max_length", length))
    if length > limit:
        yield f"the prompt has {length} tokens, and the model read the first {limit}"
    for name in _TUNED_WITH if not request.exact else ():
        then, now = getattr(tuned, name), getattr(params, name)
        if then is not None and now not in (None, then):
            yield f"the cache was tuned with {name}={then}; with {now}, how near it stays is unknown"
    for output in made:
        if isinstance(output, Video) and params.num_frames not in (None, len(output)):
            yield f"{params.num_frames} frames were asked for, and the model makes {len(output)}"
        if not isinstance(output, Audio) and params.width and params.height:
            size = f"{output.width}x{output.height}"
            if size != f"{params.width}x{params.height}":
                yield f"{params.width}x{params.height} was asked for, and the model makes {size}"
    yield from request.notes
