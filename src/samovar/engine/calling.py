"""One call of a pipeline, for prompts and seeds. Each has a generator of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..arch.calls import call_parameters


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
