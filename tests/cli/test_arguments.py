"""Options that commands share: two ways to give a model, and messages in the shell's words."""

from __future__ import annotations

import pytest

from samovar.cli.arguments import engine_settings, in_options, model_of
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--compile"], {"compile": True}),
        (["--compile", "graphs"], {"compile": "graphs"}),
        (["--cache", "tea_cache"], {"cache": "tea_cache"}),
        (["--cache", '{"rel_l1_thresh": 0.2}'], {"cache": {"rel_l1_thresh": 0.2}}),
        (["--ulysses-degree", "2", "--enable-cpu-offload"], {"ulysses_degree": 2, "enable_cpu_offload": True}),
        (["--ring-degree", "0"], {"ring_degree": 0}),
        (["--max-batch", "4", "--tolerance", "0.5"], {"max_batch": 4, "tolerance": "0.5"}),
        (["--quantization", "int8"], {"quantization": "int8"}),
        (["--quantization", "./my=files/q4.gguf"], {"quantization": "./my=files/q4.gguf"}),
        (["--quantization", '{"transformer": "int8"}'], {"quantization": {"transformer": "int8"}}),
        (["--quantization", "transformer=int8,vae=nf4"], {"quantization": {"transformer": "int8", "vae": "nf4"}}),
        (["--quantization", "a=q.gguf", "--quantization", "b=int8"], {"quantization": {"a": "q.gguf", "b": "int8"}}),
        (["--lora", "a=./x", "--lora", "b=owner/name=1"], {"lora": {"a": "./x", "b": "owner/name=1"}}),
    ],
)
def test_options_become_settings(words: list[str], expected: dict[str, object]) -> None:
    """What is behind a switch is not its value."""
    options = make_parser().parse_args(["generate", *words, "a cat"])
    assert (options.prompt, engine_settings(options)) == ("a cat", expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cache", "[1]"], r"cache='\[1\]' cannot be read"),
        (
            ["--quantization", "int8", "--quantization", "vae=int8"],
            "--quantization 'int8'; expected one KIND, or COMPONENT=KIND",
        ),
        (
            ["--quantization", "vae=int8,unet=int8", "--quantization", "vae=int4"],
            "'vae=int4'; expected one KIND.*, each name once",
        ),
        (["--lora", "./x"], "--lora './x'; expected NAME=ADAPTER, each name once"),
        (["--lora", "=x"], "--lora '=x'; expected"),
        (["--lora", "a=x", "--lora", "a=y"], "--lora 'a=y'; expected NAME=ADAPTER, each name once"),
    ],
)
def test_options_that_say_nothing_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        engine_settings(make_parser().parse_args(["generate", "a cat", *words]))
