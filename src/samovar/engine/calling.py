"""How is a pipeline called for prompts and seeds? Each has a generator of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..arch.calls import call_parameters
from ..core.errors import SettingError


def call_pipeline(
    pipeline: Any,
    prompts: Sequence[str],
    seeds: Sequence[int],
    arguments: Mapping[str, Any],
    note_draws: Callable[[], None] | None = None,
    *,
    is_alone: bool = True,
) -> Any:
    """What one pipeline call returns, for each prompt and seed. `note_draws` is called if it has drawn without its
    generators; beside another call nobody can tell."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    call: dict[str, Any] = {**arguments, "prompt": list(prompts), "generator": generators}
    if len(prompts) == 1:
        call |= {"prompt": prompts[0], "generator": generators[0]}
    elif "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * len(prompts)
    if not any(prompts) and "prompt" not in call_parameters(type(pipeline)):
        del call["prompt"]
    try:
        with _drawn_by(seeds[0], note_draws) if is_alone else contextlib.nullcontext():
            return pipeline(**call)
    except SettingError:
        raise
    except ValueError as error:  # How diffusers pipelines refuse a setting.
        raise SettingError(f"{type(pipeline).__name__} refuses these settings: {error}") from error


@contextlib.contextmanager
def _drawn_by(seed: int, note_draws: Callable[[], None] | None = None) -> Iterator[None]:
    """Draw what a pipeline draws without its generator by the seed, too: some encode their images so."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        before = _states(on_gpu) if note_draws is not None else []
        yield
        if note_draws is not None and not all(map(torch.equal, before, _states(on_gpu))):
            note_draws()


def _states(on_gpu: bool) -> list[Any]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]
