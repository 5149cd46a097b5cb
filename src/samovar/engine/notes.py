"""What should whoever asked know of a result? A truncated prompt, guidance without effect, a cache tuned for others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .facts import PipelineFacts
from .request import GenerationResult, OmniDiffusionSamplingParams, Request

_TUNED_WITH = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "height", "width", "num_frames")


def tokenizer_of(pipeline: Any) -> Any:
    """The one that reads the whole prompt, if there is any."""
    return getattr(pipeline, "tokenizer_2", None) or getattr(pipeline, "tokenizer", None)


def num_tokens(pipeline: Any, prompt: str) -> int:
    """Those of a prompt; 0 if nobody can tell."""
    tokenizer = tokenizer_of(pipeline)
    return 0 if tokenizer is None else len(tokenizer(prompt, truncation=False, verbose=False).input_ids)


def with_notes(
    outcome: GenerationResult,
    request: Request,
    length: int,
    pipeline: Any,
    facts: PipelineFacts,
    tuned: OmniDiffusionSamplingParams,
) -> GenerationResult:
    """The same result with its notes; `length` is that of the prompt, and `tuned` what the cache was tuned with."""
    notes = list(outcome.notes)
    limit = outcome.params.max_sequence_length or int(getattr(tokenizer_of(pipeline), "model_max_length", length))
    if length > limit:
        notes.append(f"the prompt has {length} tokens, and the model read the first {limit}")
    config = getattr(getattr(pipeline, "transformer", None), "config", {})
    if request.params.guidance_scale is not None and config.get("guidance_embeds") is False:
        notes.append("guidance_scale has no effect: the model has no guidance embedding; use true_cfg_scale")
    asked = facts.num_frames(request.params.over(facts.defaults))
    for video in outcome.videos:
        if request.params.num_frames not in (None, len(video)):
            notes.append(f"{asked} frames were asked for, and the model makes {len(video)}")
    size = request.params.width, request.params.height
    made = [(each.width, each.height) for each in outcome.images or outcome.videos]
    if None not in size and made and made[0] != size:
        notes.append(f"{size[0]}x{size[1]} was asked for, and the model makes {made[0][0]}x{made[0][1]}")
    if not request.exact:
        then, used = tuned.given(), outcome.params.given()
        notes += [
            f"the cache was tuned with {name}={then[name]}; with {used[name]}, how near it stays is unknown"
            for name in _TUNED_WITH
            if name in then and used.get(name, then[name]) != then[name]
        ]
    return replace(outcome, notes=(*notes, *facts.output.notes))
