"""`samovar bench-serve` from the shell: what it sends, prints and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.stranger import Stranger, stranger
from samovar.cli import main


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("an image\n\nours\n")
    with stranger() as url:
        command = ["bench-serve", url, "--prompts", str(prompts), "--num-requests", "4", "--rate", "1000"]
        assert main([*command, "--steps", "3", "--warm-up", "2"]) == 0
        printed = capsys.readouterr().out
        assert all(word in printed for word in ("2 with 2 images", "latency p99", "failed: HTTP 429 queue_full"))
        assert sorted(body["seed"] for body in Stranger.asked) == [0, 1, 2, 3, 4, 5], "those of the warm-up are others"
        assert {(body["model"], body["num_inference_steps"]) for body in Stranger.asked} == {("theirs", 3)}
        assert main([*command, "--json", "-q", "--body", '{"model": "m", "n": 2}']) == 0
        assert json.loads(capsys.readouterr().out)["errors"] == {"HTTP 429 queue_full": 2}
        assert (Stranger.asked[-1]["model"], Stranger.asked[-1]["n"]) == ("m", 2)
        prompts.write_text("ours\n")
        assert main(command) == 1
    assert "no request was answered with an image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 1, "http://127.0.0.1:9 cannot be reached"),
        (["--body", "["], 2, "--body is not valid JSON"),
        (["--body", "[1]"], 2, "expected a JSON object"),
        (["--rate", "0"], 2, "--rate must be above 0"),
        (["--prompts", "nowhere.txt"], 2, "--prompts 'nowhere.txt' cannot be read"),
    ],
)
def test_what_cannot_be_is_said(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench-serve", "http://127.0.0.1:9", *arguments]) == code
    assert message in capsys.readouterr().err
