"""`samovar serve` from the shell: what it prints, and what it refuses before anything is loaded."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest

from samovar import cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["emojis"], "Did you mean 'emoji'?"),
        (["--port", "70000"], "--port 70000; expected a whole number from 0 to 65535"),
        (["emoji", "--model", "other"], "Two models are given: 'emoji' and --model 'other'"),
        (["--cors-origin", "*"], "--cors-origin ['*']; expected an origin such as https://example.com"),
        (["--api-key", ""], "must be printable ASCII"),
        (["--allowed-host", "http://a"], "--allowed-host ['http://a']; expected a host name such as example.com"),
        (["--request-timeout", "0"], "--request-timeout 0; expected a number of seconds above 0"),
        (["--default-steps", "0"], "--default-steps 0; expected a whole number from 1 to"),
        (["--default-size", "huge"], "--default-size 'huge'; expected one such as 1024x1024"),
        (["--default-steps", "4", "--cache", '{"schedule": "#.#.#.#.#"}'], "--default-steps 4 is the default, but the"),
        (["--served-model-name", ""], "--served-model-name ['']; expected a name for clients"),
        (["--lora", "pixel"], "--lora 'pixel'; expected NAME=ADAPTER, each name once."),
        (["--lora", "pixel=./nowhere.bin"], "which is not a .safetensors file"),
        (
            ["--max-tolerance", "hihg"],
            "--max-tolerance 'hihg'; expected a number, 0 or more, or one of 'exact'",
        ),
        (
            ["--max-tolerance", "high", "--cache", "tea_cache"],
            "--max-tolerance 0.02 cannot be kept by the cache 'tea_ca",
        ),
        (["--replicas", "0"], "--replicas 0; expected a whole number, 1 or more"),
        (
            ["--devices", "0,1"],
            "--devices names GPUs (0, 1), and the device is 'cpu'. Leave it out, and give --replicas 2",
        ),
        (["--devices", "two"], "--devices 'two'; expected the numbers of GPUs"),
        (["--step-timeout", "0"], "--step-timeout 0; expected a number above 0"),
        (["--enable-cpu-offload", "--enable-layerwise-offload"], "exclude each other"),
    ],
)
def test_serve_refuses_before_it_loads(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--device", "cpu", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--device", "cpu", "--port", port]) == 2
    assert f"Cannot bind to 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "is_warned"), [([], True), (["--api-key", "k"], False)])
def test_a_server_for_all_without_a_key_is_warned_of(
    options: list[str], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--device", "cpu", "--host", "0.0.0.0", "--port", port, *options]) == 2
    assert ("is open to all who can reach this machine: set SAMOVAR_API_KEY" in caplog.text) == is_warned


@pytest.mark.slow
def test_the_example_of_the_announcement_works() -> None:
    """The curl that is printed is run as it is printed."""
    command = [sys.executable, "-m", "samovar", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(4)]
            assert re.match(r"samovar serves 'emoji' at http://127\.0\.0\.1:\d+\n", lines[0])
            assert lines[1].split() == ["page", lines[0].split()[-1] + "/"]
            curl = lines[2].strip().removeprefix("try").strip()
            result = subprocess.run(curl, shell=True, capture_output=True, text=True, check=True, timeout=300)
            assert '"b64_json"' in result.stdout
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
