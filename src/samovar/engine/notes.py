"""Warnings with a result: a truncated prompt, another size than was asked for, a cache tuned with other settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..media import Audio, Video
from .request import OmniDiffusionSamplingParams, Request

_TUNED_WITH = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "height", "width", "num_frames")


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
