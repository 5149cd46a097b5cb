"""Options that commands share: two ways to give a model, and messages in the shell's words."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from samovar.cli.arguments import given, in_options, lora_of, model_of, quantization_of, read_setting, use_saved_steps
from samovar.cli.entry import make_parser
from samovar.core.errors import SettingError


@pytest.mark.parametrize("command", ["serve", "inspect", "plan", "compare", "calibrate"])
def test_a_model_is_given_first_or_by_its_option(command: str) -> None:
    parse = make_parser().parse_args
    assert model_of(parse([command, "a"])) == model_of(parse([command, "--model", "a"])) == "a"
    assert model_of(parse([command])) is None
    with pytest.raises(SettingError, match="Two models are given: 'a' and --model 'b'"):
        model_of(parse([command, "a", "--model", "b"]))


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ("gpu_memory='much'; expected bytes.", "gpu_memory", "--gpu-memory 'much'; expected bytes."),
        ("num_inference_steps must be at least 1.", None, "--steps must be at least 1."),
        ("device='cud' is not a device.", "device", "--device 'cud' is not a device."),
        ("The device is full.", None, "The device is full."),
        ("Some my_gpu_memory_name.", "gpu_memory", "Some my_gpu_memory_name."),
    ],
)
def test_messages_name_options(message: str, param: str | None, expected: str) -> None:
    parser = make_parser().parse_args(["generate", "cat"]).parser
    assert in_options(SettingError(message, param=param), parser) == expected


def test_a_switch_takes_nothing_that_follows_it() -> None:
    options = make_parser().parse_args(["generate", "--compile", "a cat"])
    assert (options.prompt, options.compile) == ("a cat", True)


def test_settings_are_names_files_or_json() -> None:
    assert read_setting("cache", "tea_cache") == "tea_cache"
    assert read_setting("cache", '{"rel_l1_thresh": 0.2}') == {"rel_l1_thresh": 0.2}
    with pytest.raises(SettingError, match=r"cache='\[1\]' cannot be read"):
        read_setting("cache", "[1]")


def test_only_given_options_count() -> None:
    options = argparse.Namespace(a=1, b=None, seed=0, scale=0.0, flag=False)
    assert given(options, ("a", "b", "c", "seed", "scale", "flag")) == {"a": 1, "seed": 0, "scale": 0.0, "flag": False}


def test_a_threshold_may_be_used_at_any_number_of_steps(tmp_path: Path) -> None:
    file = tmp_path / "setting.json"
    file.write_text('{"cache": {"backend": "tea_cache", "rel_l1_thresh": 0.1}, "num_inference_steps": 50}')
    options = argparse.Namespace(num_inference_steps=20, quiet=True)
    use_saved_steps(options, [str(file), None, "tea_cache", "{}"])
    assert options.num_inference_steps == 20
    options.num_inference_steps = None
    use_saved_steps(options, [str(file)])
    assert options.num_inference_steps == 50


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["int8"], "int8"),
        (["./my=files/q4.gguf"], "./my=files/q4.gguf"),
        (['{"transformer": "int8"}'], {"transformer": "int8"}),
        (["transformer=int8,text_encoder=nf4"], {"transformer": "int8", "text_encoder": "nf4"}),
        (["transformer=a.gguf", "text_encoder=int8"], {"transformer": "a.gguf", "text_encoder": "int8"}),
    ],
)
def test_forms_of_a_quantisation(texts: list[str], expected: object) -> None:
    assert quantization_of(texts) == expected


def test_a_kind_beside_others_needs_a_component() -> None:
    with pytest.raises(SettingError, match=r"quantization='int8' is given beside others\. .* such as transformer=int8"):
        quantization_of(["int8", "text_encoder=int8"])
    with pytest.raises(SettingError, match=r"vae=int8 is given too\. Give each component once"):
        quantization_of(["vae=int8,unet=int8", "vae=int4"])


def test_adapters_are_given_by_name() -> None:
    assert lora_of(["a=./x", "b=owner/name=1"]) == {"a": "./x", "b": "owner/name=1"}
    for wrong, message in ((["./x"], "has no name"), (["=x"], "has no name"), (["a=x", "a=y"], "is given twice")):
        with pytest.raises(SettingError, match=message):
            lora_of(wrong)
