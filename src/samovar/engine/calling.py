"""One call of a pipeline, for prompts and seeds. Each has a generator of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..arch.calls import call_parameters
from ..core.errors import SettingError


def call_pipeline(
    pipeline: Any, prompts: Sequence[str], seeds: Sequence[int], arguments: Mapping[str, Any], missing: str = ""
) -> Any:
    """What the pipeline returns, for each prompt and seed. `missing` is what it was not given and may need."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    call: dict[str, Any] = {**arguments, "prompt": list(prompts), "generator": generators}
    if len(prompts) == 1:
        call |= {"prompt": prompts[0], "generator": generators[0]}
    elif "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * len(prompts)
    if not any(prompts) and "prompt" not in call_parameters(type(pipeline)):
        del call["prompt"]
    try:
        with _drawn_by(seeds[0]):
            return pipeline(**call)
    except SettingError:
        raise
    except ValueError as error:  # How diffusers pipelines refuse a setting.
        hint = f" It was given no {missing}." if missing else ""
        raise SettingError(f"{type(pipeline).__name__} refuses these settings: {error}{hint}") from error


@contextlib.contextmanager
def _drawn_by(seed: int) -> Iterator[None]:
    """Draw what a pipeline draws without its generator by the seed, too: some encode their images so."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield
