"""Settings of a image: what is refused, what wins over what, and a model's own defaults."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import ModelError, NanLatentsError, SettingError
from samovar.engine import Failed, GenerationResult, Listener, Progress, Request, Started
from samovar.engine.request import SILENT, read_defaults


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_inference_steps", 0, "must be at least 1, not 0"),
        ("num_inference_steps", 2.5, "must be a whole number, not 2.5"),
        ("num_inference_steps", True, "must be a whole number, not True"),
        ("height", -8, "must be at least 1, not -8"),
        ("seed", -1, "must be at least 0, not -1"),
        ("seed", "7", "must be a whole number, not '7'"),
        ("true_cfg_scale", float("nan"), "must be a finite number, not nan"),
        ("guidance_scale", float("inf"), "must be a finite number, not inf"),
        ("guidance_scale", -1.0, "must be at least 0, not -1.0"),
        ("num_outputs_per_prompt", 0, "must be at least 1, not 0"),
        ("negative_prompt", 3, "must be text, not 3"),
        ("strength", 1.5, "must be at most 1, not 1.5"),
        ("seed", 2**64, "must be at most 18446744073709551615, not 18446744073709551616"),
        ("seed", 10**400, "must be at most 18446744073709551615, not a number of 1329 bits"),
        pytest.param("seed", -(10**5000), "must be at least 0, not a number of 16610 bits", id="no digits"),
        ("height", 10**400, "must be at most 2147483647, not a number of 1329 bits"),
        ("guidance_scale", 10**400, "must be a finite number, not a number of 1329 bits"),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(SettingError, match=f"{name} {message}"):
        OmniDiffusionSamplingParams(**{name: value})


def test_unknown_settings_are_refused_with_the_nearest() -> None:
    with pytest.raises(SettingError, match=r"'num_inferense_steps'.*Did you mean 'num_inference_steps'\?"):
        OmniDiffusionSamplingParams.from_dict({"num_inferense_steps": 3})


def test_the_length_of_a_sound_has_another_name() -> None:
    params = OmniDiffusionSamplingParams.from_arguments({"audio_length": 3, "eta": 0.5})
    assert (params.seconds, params.options) == (3, {"eta": 0.5})
    with pytest.raises(SettingError, match=r"seconds=2 and audio_length=3 are mutually exclusive"):
        OmniDiffusionSamplingParams.from_arguments({"audio_length": 3, "seconds": 2})


def test_what_is_given_wins_and_zero_counts_as_given() -> None:
    mine = OmniDiffusionSamplingParams(seed=0, true_cfg_scale=0.0, negative_prompt="")
    theirs = OmniDiffusionSamplingParams(seed=5, true_cfg_scale=3.0, negative_prompt="x", height=64)
    assert mine.over(theirs).given() == {"seed": 0, "true_cfg_scale": 0.0, "negative_prompt": "", "height": 64}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ('{"hight": 8}', "Did you mean 'height'"),
        ('{"height": "tall"}', "height must be a whole number"),
        ('{"num_inference_steps": 1e400}', "num_inference_steps must be a whole number"),
        ("[" * 100_000, "is not valid JSON: it is nested too deeply"),
    ],
)
def test_broken_defaults_are_refused(tmp_path: Path, content: str, message: str) -> None:
    assert read_defaults(tmp_path) == OmniDiffusionSamplingParams()
    (tmp_path / "samovar.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_defaults(tmp_path)


def test_a_request_is_checked_as_far_as_it_can_be_without_a_model() -> None:
    for wrong, message in (
        ({"prompt": 3}, "prompt must be text, not 3"),
        ({"prompt": "a", "params": {"seed": 1}}, "params must be OmniDiffusionSamplingParams"),
        ({"prompt": "a", "num_previews": -1}, "num_previews must be a whole number, 0 or more, not -1"),
        ({"prompt": "a", "image": "cat.png"}, "image must be a PIL image, or a list of them, not 'cat.png'"),
    ):
        with pytest.raises(SettingError, match=message):
            Request(**wrong)  # type: ignore[arg-type]
    assert Request("a").num_images == 1


def test_no_images_and_why() -> None:
    failed = GenerationResult.failed(Request("a cat"), SettingError("no"))
    assert (failed.prompt, failed.outputs) == ("a cat", ())
    for kind in ("images", "videos", "audios"):
        with pytest.raises(SettingError, match="no"):
            getattr(failed, kind)


def test_the_last_of_several_seeds_is_still_a_seed() -> None:
    assert OmniDiffusionSamplingParams(seed=2**64 - 2, num_outputs_per_prompt=2).seed == 2**64 - 2
    with pytest.raises(SettingError, match=r"seed \+ num_outputs_per_prompt - 1 must be at most 18446744073709551615"):
        OmniDiffusionSamplingParams(seed=2**64 - 2).over(OmniDiffusionSamplingParams(num_outputs_per_prompt=3))


def test_events_cannot_be_changed_and_travel_whole() -> None:
    for event in (Started(0.5), Progress(1, 4, 0, 2, 0.1, None), Progress(2, 4, 1, 2, 0.1, False)):
        assert pickle.loads(pickle.dumps(event)) == event
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.step = 3  # type: ignore[union-attr,misc]
    copy = pickle.loads(pickle.dumps(Failed(NanLatentsError("no numbers", 3, "forecast: #.#"))))
    assert (str(copy.error), copy.error.step, copy.error.cache) == ("no numbers", 3, "forecast: #.#")


def test_nobody_hears_and_nobody_stops() -> None:
    assert isinstance(SILENT, Listener)
    SILENT.on_event(Started(0.0))
    assert not SILENT.is_cancelled()


def test_a_result_shows_what_was_made_or_why_not() -> None:
    params = OmniDiffusionSamplingParams()
    made = GenerationResult("a cat", (Image.new("RGB", (64, 48)),), (7,), params, 1.25)
    assert repr(made) == "<GenerationResult for 'a cat': 64x48, seed 7; 1.2 s>"
    failed = GenerationResult("a cat", (), (), params, 0.0, error=SettingError("too large"))
    assert repr(failed) == "<GenerationResult for 'a cat': SettingError: too large>"
