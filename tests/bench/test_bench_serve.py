"""Load arrives as it was asked for, and every answer of a server, ours or another's, is counted as what it is."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from bench.stranger import ANSWERS, Stranger, stranger
from benchmarks.bench_serve import Answer, LoadConfig, LoadReport, main, run_load, served_model
from samovar.core.errors import EngineError, SettingError

COUNTED = {
    "HTTP 200 without an image": 2, "HTTP 502, not JSON": 1, "HTTP 429 queue_full": 1, "HTTP 400 BadRequestError": 1,
    "HTTP 404 NotFoundError": 1, "HTTP 422 no": 1, "HTTP 503 The engine is busy": 1, "RemoteDisconnected": 1,
}  # fmt: skip


def test_arrivals_are_poisson_and_repeatable() -> None:
    config = LoadConfig("http://a", rate=4.0, num_requests=4000)
    due = config.arrivals()
    gaps = [after - before for before, after in itertools.pairwise(due)]
    assert due == config.arrivals()
    assert due != LoadConfig("http://a", rate=4.0, num_requests=4000, seed=1).arrivals()
    assert fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert pstdev(gaps) == pytest.approx(0.25, rel=0.1), "exponential gaps spread as wide as they are long"
    assert set(LoadConfig("http://a", rate=math.inf, num_requests=3).arrivals()) == {0.0}


def test_only_what_was_answered_counts_as_latency_and_throughput() -> None:
    answers = [Answer(1.0, 2), Answer(3.0, 1), Answer(0.001, 0, "HTTP 429 queue_full")]
    report = LoadReport.of(LoadConfig("http://a"), answers, 4.0)
    assert (report.num_requests, report.succeeded, report.images) == (3, 2, 3)
    assert (report.requests_per_s, report.images_per_s) == (0.5, 0.75)
    assert report.latency_s == {"mean": 2.0, "p50": 1.0, "p90": 3.0, "p95": 3.0, "p99": 3.0, "max": 3.0}
    assert report.errors == {"HTTP 429 queue_full": 1}
    assert LoadReport.of(LoadConfig("http://a"), answers[2:], 1.0).latency_s == {}


def test_every_answer_of_another_server_is_counted_as_what_it_is() -> None:
    prompts = [*ANSWERS, "hang up"]
    done: list[int] = []
    how: dict[str, Any] = {
        "rate": math.inf,
        "max_concurrency": 3,
        "body": {"size": "16x16"},
        "api_key": "key",
        "seed": 5,
    }
    with stranger() as url:
        config = LoadConfig(f"{url}/base/", num_requests=len(prompts), prompts=prompts, **how)
        report = run_load(config, done.append)
        assert served_model(config) == "theirs"
    assert (report.succeeded, report.images, report.errors) == (2, 3, COUNTED)
    assert sorted(done) == list(range(1, len(prompts) + 1))
    assert {body["path"] for body in Stranger.asked} == {"/base/v1/images/generations"}
    assert {body["key"] for body in Stranger.asked} == {"Bearer key"}
    assert sorted(body["seed"] for body in Stranger.asked) == list(range(5, 5 + len(prompts)))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"url": "127.0.0.1:80"}, "expected one such as http://127.0.0.1:8091"),
        ({"url": "http://a", "rate": 0.0}, "rate must be above 0"),
        ({"url": "http://a", "rate": math.nan}, "rate must be above 0"),
        ({"url": "http://a", "num_requests": 0}, "num_requests must be a whole number"),
        ({"url": "http://a", "prompts": []}, "There is no prompt"),
    ],
)
def test_a_load_that_cannot_be_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        LoadConfig(**how)


def test_a_server_that_is_not_there_is_no_result() -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        run_load(LoadConfig("http://127.0.0.1:9"))


def test_the_script_prints_a_table_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("an image\n\nours\n")
    with stranger() as url:
        command = [url, "--prompts", str(prompts), "--num-requests", "4", "--rate", "1000"]
        assert main([*command, "--steps", "3", "--warm-up", "2"]) == 0
        printed = capsys.readouterr().out
        assert all(word in printed for word in ("2 with 2 images", "latency p99", "failed: HTTP 429 queue_full"))
        assert sorted(body["seed"] for body in Stranger.asked) == [0, 1, 2, 3, 4, 5], "those of the warm-up are others"
        assert {(body["model"], body["num_inference_steps"]) for body in Stranger.asked} == {("theirs", 3)}
        assert main([*command, "--json", "--body", '{"model": "m", "n": 2}']) == 0
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
        (["--rate", "0"], 2, "rate must be above 0"),
        (["--prompts", "nowhere.txt"], 2, "--prompts 'nowhere.txt' cannot be read"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["http://127.0.0.1:9", *arguments]) == code
    assert message in capsys.readouterr().err
