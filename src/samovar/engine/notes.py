"""Warnings with a result: a truncated prompt, guidance without effect, a cache tuned with other settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..media import Audio, Video
from .facts import PipelineFacts
from .request import OmniDiffusionSamplingParams, Request

_TUNED_WITH = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "height", "width", "num_frames")


def tokenizer_of(pipeline: Any) -> Any:
    """The one that reads the whole prompt, if there is any."""
    return getattr(pipeline, "tokenizer_2", None) or getattr(pipeline, "tokenizer", None)


def num_tokens(pipeline: Any, prompt: str) -> int:
    """Those of a prompt; 0 if nobody can tell."""
    tokenizer = tokenizer_of(pipeline)
    return 0 if tokenizer is None else len(tokenizer(prompt, truncation=False, verbose=False).input_ids)


def notes_on_model(request: Request, pipeline: Any, tuned: OmniDiffusionSamplingParams) -> list[str]:
    """Notes on a completed request that the model gives cause for; `tuned` is what the cache was tuned with."""
    params, notes, length = request.params, list[str](), num_tokens(pipeline, request.prompt)
    limit = params.max_sequence_length or int(getattr(tokenizer_of(pipeline), "model_max_length", length))
    if length > limit:
        notes.append(f"the prompt has {length} tokens, and the model read the first {limit}")
    then, used = tuned.given(), params.given()
    return notes + [
        f"the cache was tuned with {name}={then[name]}; with {used[name]}, how near it stays is unknown"
        for name in _TUNED_WITH
        if name in then and used.get(name, then[name]) != then[name] and not request.exact
    ]


def notes_on(
    made: Sequence[Any], request: Request, params: OmniDiffusionSamplingParams, facts: PipelineFacts
) -> list[str]:
    """Notes on what was made otherwise than a request asked; `params` are all that were used."""
    asked, notes = request.params, list[str]()
    if asked.guidance_scale is not None and facts.ignores_guidance:
        notes.append("guidance_scale has no effect: the model has no guidance embedding; use true_cfg_scale")
    for video in made:
        if isinstance(video, Video) and asked.num_frames not in (None, len(video)):
            notes.append(f"{facts.num_frames(params)} frames were asked for, and the model makes {len(video)}")
    size = asked.width, asked.height
    sizes = [(each.width, each.height) for each in made if not isinstance(each, Audio)]
    if None not in size and sizes and sizes[0] != size:
        notes.append(f"{size[0]}x{size[1]} was asked for, and the model makes {sizes[0][0]}x{sizes[0][1]}")
    return [*notes, *facts.output.notes]
