"""A request: what is refused, what wins over what, a model's own defaults, and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from samovar import OmniDiffusionSamplingParams as Params
from samovar.core.errors import ModelError, SettingError
from samovar.engine import GenerationResult, Request
from samovar.engine.request import Adapter, read_defaults


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_inference_steps", 0, "=0; expected a whole number from 1 to"),
        ("num_inference_steps", 2.5, "=2.5; expected a whole number"),
        ("seed", 2**64, "expected a whole number from 0 to 18446744073709551615"),
        pytest.param("seed", -(10**5000), "=a number of 16610 bits; expected", id="no digits"),
        ("true_cfg_scale", float("nan"), "=nan; expected a number, 0 or more"),
        ("strength", 1.5, "=1.5; expected a number from 0 to 1"),
        ("options", [1], "expected arguments of the pipeline by name"),
        ("extra_args", 3, "expected arguments of the pipeline by name"),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message) as refused:
        Params(**{name: value})
    assert refused.value.param == {"extra_args": "options"}.get(name, name)


def test_unknown_settings_are_refused_with_the_nearest() -> None:
    with pytest.raises(SettingError, match=r"'num_inferense_steps'.*Did you mean 'num_inference_steps'\?"):
        Params.read({"num_inferense_steps": 3})


def test_words_of_vllm_omni_become_ours() -> None:
    params = Params.from_arguments({"audio_length": 3, "eta": 0.5, "extra_args": {"clip_skip": 2}})
    assert (params.seconds, params.options) == (3, {"eta": 0.5, "clip_skip": 2})
    generator = torch.Generator().manual_seed(9)
    assert Params(generator=generator).seed == Params(generator=generator, seed=9).seed == 9
    for given, message in (
        ({"audio_length": 3, "seconds": 2}, r"seconds=2 and audio_length \(3\) are mutually exclusive"),
        ({"num_frames": 3, "seconds": 2.0}, "num_frames=3 and seconds=2.0 are mutually exclusive"),
        ({"generator": generator, "seed": 8}, r"seed=8 and generator \(9\) are mutually exclusive"),
        ({"generator": 7}, "generator must be a torch.Generator, not 7"),
    ):
        with pytest.raises(SettingError, match=message):
            Params.from_arguments(given)
    torch.rand(1, generator=generator)
    with pytest.raises(SettingError, match="drawn from already"):
        Params(generator=generator)


def test_what_is_given_wins_and_zero_counts_as_given() -> None:
    mine = Params(seed=0, true_cfg_scale=0.0, negative_prompt="", seconds=2.0, options={"a": 1})
    theirs = Params(seed=5, true_cfg_scale=3.0, negative_prompt="x", height=64, num_frames=9, options={"a": 2, "b": 3})
    both = mine.over(theirs)
    assert both.given() == {"seed": 0, "true_cfg_scale": 0.0, "negative_prompt": "", "height": 64, "seconds": 2.0}
    assert both.options == {"a": 1, "b": 3}


def test_the_last_of_several_seeds_is_still_a_seed() -> None:
    assert Params(seed=2**64 - 2, num_outputs_per_prompt=2).seed == 2**64 - 2
    with pytest.raises(SettingError, match=r"seed \+ num_outputs_per_prompt - 1 must be at most 18446744073709551615"):
        Params(seed=2**64 - 2).over(Params(num_outputs_per_prompt=3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ('{"hight": 8}', "Did you mean 'height'"),
        ("[" * 100_000, "is not valid JSON: it is nested too deeply"),
    ],
)
def test_broken_defaults_are_refused(tmp_path: Path, content: str, message: str) -> None:
    assert read_defaults(tmp_path) == Params()
    (tmp_path / "samovar.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_defaults(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"params": {"seed": 1}}, "expected OmniDiffusionSamplingParams"),
        ({"image": "cat.png"}, r"image='cat.png'; expected a PIL image, or a list of them, as .*read_image"),
        ({"image": [[None], []]}, "expected a PIL image"),
        ({"tolerance": "fats"}, r"tolerance='fats'.*'fast'"),
        ({"deadline_s": 0}, "deadline_s=0; expected a number above 0"),
        ({"lora": ["pixel", "pixel"]}, "'pixel' is given twice"),
        ({"lora": 7}, "lora=7; expected the name of an adapter"),
        ({"lora": {"name": "pixel", "path": "x"}}, "'path' is not a part of an adapter in lora"),
        ({"lora": {"name": "pixel", "scale": "1"}}, "the scale of 'pixel' must be a number, not '1'"),
        ({"lora": {"name": "pixel", "scale": float("nan")}}, "must be a number, not nan"),
    ],
)
def test_a_request_is_checked_as_far_as_it_can_be_without_a_model(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Request(**wrong)


def test_adapters_are_named_in_several_ways() -> None:
    for lora in ("ink", {"name": "ink"}, [{"name": "ink", "scale": None}], Adapter("ink")):
        assert Request(lora=lora).lora == (Adapter("ink", 1.0),)
    assert Request(lora=["ink", {"name": "pixel", "scale": 2}]).lora == (("ink", 1.0), ("pixel", 2.0))
    assert Request(lora=None).lora == ()


def test_a_failed_result_raises_its_error_whatever_is_asked_of_it(tmp_path: Path) -> None:
    failed = GenerationResult.failed(Request("a cat"), SettingError("no"))
    assert (failed.prompt, failed.outputs, failed.request_output) == ("a cat", (), [failed])
    for kind in ("images", "videos", "audios"):
        with pytest.raises(SettingError, match="no"):
            getattr(failed, kind)
    with pytest.raises(SettingError, match="no"):
        failed.save(tmp_path / "cat.png")
    assert repr(failed) == "<GenerationResult for 'a cat': SettingError: no>"
    made = GenerationResult("a cat", (Image.new("RGB", (64, 48)),), (7,), Params(), 1.25)
    assert repr(made) == "<GenerationResult for 'a cat': 64x48, seed 7; 1.2 s>"
    assert [file.name for file in made.save(tmp_path / "cat.png")] == ["cat.png"]
