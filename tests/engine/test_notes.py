"""Whoever asked hears what of the request had no effect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines import tiny_flux_pipeline
from samovar.engine import OmniDiffusionSamplingParams, PipelineFacts, Request
from samovar.engine.notes import notes_on, notes_on_model, num_tokens, tokenizer_of
from samovar.engine.outputs import OutputKind
from samovar.media import Video

NOTHING = OmniDiffusionSamplingParams()


def notes(request: Request, length: int = 3, pipe: Any = None, tuned: Any = NOTHING, outputs: Any = ()) -> list[str]:
    kind = OutputKind("video", frames_argument="num_frames") if outputs else OutputKind()
    facts = PipelineFacts("Tiny", frozenset(), 1, output=kind, ignores_guidance=True)
    tokenizer = Tokenizer(length)
    on_model = notes_on_model(request, pipe or SimpleNamespace(tokenizer=tokenizer), tuned)
    return on_model + notes_on(outputs, request, request.params, facts)


class Tokenizer:
    """One by which every prompt is as long."""

    def __init__(self, length: int = 3, most: int = 99) -> None:
        self.length, self.model_max_length = length, most

    def __call__(self, prompt: str, **how: Any) -> Any:
        return SimpleNamespace(input_ids=[0] * self.length)


def ask(**params: Any) -> Request:
    return Request("a cat", OmniDiffusionSamplingParams(**params))


def test_a_prompt_is_as_long_as_its_last_tokenizer_says() -> None:
    pipe = tiny_flux_pipeline()
    assert tokenizer_of(pipe) is pipe.tokenizer_2
    assert num_tokens(pipe, "a cat") == len(pipe.tokenizer_2("a cat").input_ids)
    assert num_tokens(SimpleNamespace(tokenizer=None), "a cat") == 0


@pytest.mark.parametrize(
    ("request_", "more", "found"),
    [
        (ask(), {}, []),
        (ask(max_sequence_length=2), {}, ["the prompt has 3 tokens, and the model read the first 2"]),
        (ask(), {"pipe": SimpleNamespace(tokenizer=Tokenizer(3, 1))}, ["the prompt has 3 tokens"]),
        (ask(guidance_scale=3.0), {}, ["guidance_scale has no effect"]),
        (
            ask(num_frames=5),
            {"outputs": [Video(np.zeros((4, 8, 8, 3), np.uint8), 8)]},
            ["5 frames were asked for, and"],
        ),
        (
            ask(height=64, width=32),
            {"tuned": OmniDiffusionSamplingParams(height=32, width=32, true_cfg_scale=2.0)},
            ["the cache was tuned with height=32; with 64, how near it stays is unknown"],
        ),
    ],
)
def test_what_is_noted(request_: Request, more: dict[str, Any], found: list[str]) -> None:
    said = notes(request_, **more)
    assert len(said) == len(found)
    assert all(note.startswith(start) for note, start in zip(said, found, strict=True))


def test_a_request_without_the_cache_hears_nothing_of_it() -> None:
    tuned = OmniDiffusionSamplingParams(height=32)
    assert notes(Request("a cat", OmniDiffusionSamplingParams(height=64), exact=True), tuned=tuned) == []
