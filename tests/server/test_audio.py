"""Sound over HTTP, asked for by OpenAI's own client."""

from __future__ import annotations

import io
import warnings
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from pipelines.builder import build
from pipelines.recipes import RECIPES
from samovar.media import read_audio

from .running import PATIENCE_S, RunningServer, running

GENERATE, SPEECH = "/v1/audio/generate", "/v1/audio/speech"
BODY = {"input": "rain", "audio_length": 0.8, "num_inference_steps": 2, "seed": 3}


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A tiny StableAudioPipeline."""
    import diffusers

    folder = tmp_path_factory.mktemp("models") / "sounds"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of torch, about what diffusers uses.
        recipe = RECIPES["StableAudioPipeline"]
        recipe = replace(recipe, transformer={**recipe.transformer, "sample_size": 2048})
        pipe = build(diffusers.StableAudioPipeline, recipe)
        pipe.vae.register_to_config(sampling_rate=4000)
        pipe.save_pretrained(folder)
    with running(folder) as started:
        yield started


def test_sound_is_made_in_every_format(sounds: RunningServer, tmp_path: Path) -> None:
    with sounds.client() as http:
        assert http.get("/ready").json()["output"] == "audio"
        plain = http.post(GENERATE, json=BODY)
        assert (plain.status_code, plain.headers["content-type"]) == (200, "audio/wav"), plain.text
        with wave.open(io.BytesIO(plain.content)) as file:
            rate, length, samples = file.getframerate(), file.getnframes(), file.readframes(10**9)
        assert (rate, length / rate) == (4000, pytest.approx(0.8, abs=0.05))
        types = {"flac": "audio/flac", "mp3": "audio/mpeg", "aac": "audio/aac", "opus": "audio/ogg", "pcm": "audio/pcm"}
        for kind, media_type in types.items():
            answer = http.post(GENERATE, json={**BODY, "response_format": kind})
            assert (answer.status_code, answer.headers["content-type"]) == (200, media_type), answer.text
            if kind == "pcm":
                assert answer.content == samples
                continue
            path = tmp_path / f"sound.{kind}"
            path.write_bytes(answer.content)
            assert read_audio(path).seconds == pytest.approx(length / rate, abs=0.2)


def test_the_client_makes_sound(sounds: RunningServer) -> None:
    base, extra = f"{sounds.address}/v1", {"audio_length": 0.5, "num_inference_steps": 2}
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        answer = client.audio.speech.create(input="rain", model="sounds", voice="auto", speed=1.0, extra_body=extra)
        assert answer.response.headers["content-type"] == "audio/mpeg"
        assert len(answer.content) > 100
        with pytest.raises(openai.BadRequestError, match="voice should be 'auto' or 'default', not 'alloy'"):
            client.audio.speech.create(input="rain", model="sounds", voice="alloy")


def test_refusals_name_the_field(sounds: RunningServer) -> None:
    with sounds.client() as http:
        for path, values, param, message in (
            (GENERATE, {"audio_length": 301}, "audio_length", "The audio has 301 seconds; the limit is 300"),
            (GENERATE, {"response_format": "midi"}, "response_format", "not 'midi'"),
            (GENERATE, {"input": " "}, "input", "input is empty"),
            (GENERATE, {"prompt": "rain"}, "prompt", "'prompt' is not a known field. Did you mean 'negative_prompt'?"),
            (GENERATE, {"num_waveforms_per_prompt": 100}, "num_waveforms_per_prompt", "requests cannot set"),
            (GENERATE, {"size": "8x8"}, "size", "'size' is not a known field"),
            (SPEECH, {"speed": 2.0}, "speed", "not 2.0"),
            (SPEECH, {"instructions": "slowly"}, "instructions", "'instructions' is not a known field"),
        ):
            answer = http.post(path, json={**BODY, **values})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
            assert message in answer.json()["error"]["message"]
        too_long = http.post(GENERATE, json={**BODY, "audio_length": 2})
        assert too_long.status_code == 400, "the pipeline's own check"
        assert "longer than the model maximum possible length (1.024)" in too_long.json()["error"]["message"]
        assert http.post("/v1/videos", json={"prompt": "a"}).json()["error"]["code"] == "unsupported_model"
