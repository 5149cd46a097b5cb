"""Load a server with requests at random moments, as from many clients, whether or not it keeps up.

    python benchmarks/bench_serve.py http://127.0.0.1:8091 --rate 2 --num-requests 100
    python benchmarks/bench_serve.py http://127.0.0.1:8091 --rate inf --max-concurrency 16 --size 512x512 --json
    python benchmarks/bench_serve.py http://127.0.0.1:30000 --rate 0.5 --body '{"guidance_scale": 3.5}'

It speaks OpenAI's images API, so other servers can be measured in the same way. Latency counts from the moment at which
a request was due: one that the client itself sends late is late.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from samovar.core.errors import EngineError, SamovarError, SettingError
from samovar.core.files import brief, parse_settings

GENERATE = "/v1/images/generations"
PERCENTILES = (50, 90, 95, 99)
_MAX_ERROR_BYTES = 100_000


@dataclass(frozen=True)
class LoadConfig:
    """What to send, and how fast."""

    url: str
    """The server, such as http://127.0.0.1:8091."""
    rate: float = 1.0
    """Requests per second on average; infinity sends all at once."""
    num_requests: int = 50
    max_concurrency: int = 256
    """Most requests in flight; more wait, and their latency counts from when they were due."""
    prompts: Sequence[str] = ("a grinning cat, 3d style",)
    """Taken in turn."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of each request."""
    path: str = GENERATE
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    seed: int = 0
    """Of the arrivals, and of the first image."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError(f"url={brief(self.url)}; expected one such as http://127.0.0.1:8091.", param="url")
        for name in ("num_requests", "max_concurrency"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise SettingError(f"{name} must be a whole number, 1 or more, not {value!r}.", param=name)
        for name in ("rate", "timeout_s"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} must be above 0, not {getattr(self, name)!r}.", param=name)
        if not self.prompts:
            raise SettingError("There is no prompt. Give at least one.", param="prompts")

    def arrivals(self) -> list[float]:
        """Seconds at which requests are due, as a Poisson process: the gaps are exponential."""
        if math.isinf(self.rate):
            return [0.0] * self.num_requests
        chance, now, due = random.Random(self.seed), 0.0, []
        for _ in range(self.num_requests):
            due.append(now)
            now += chance.expovariate(self.rate)
        return due

    def request(self, number: int) -> dict[str, Any]:
        prompt = self.prompts[number % len(self.prompts)]
        return {"prompt": prompt, "n": 1, "response_format": "b64_json", "seed": self.seed + number, **self.body}


@dataclass(frozen=True)
class Answer:
    """What came of one request."""

    latency_s: float
    num_images: int
    error: str | None = None
    """In short: a status with the server's code, or what went wrong with the connection."""


@dataclass(frozen=True)
class LoadReport:
    """The figures of a run."""

    url: str
    rate: float | None
    """Asked for; None for all at once."""
    num_requests: int
    succeeded: int
    images: int
    duration_s: float
    """From the first request to the last answer."""
    requests_per_s: float
    """Answered with images."""
    images_per_s: float
    latency_s: Mapping[str, float]
    """Of requests that were answered with images: mean, p50 ... p99, max."""
    errors: Mapping[str, int]

    @classmethod
    def of(cls, config: LoadConfig, answers: Sequence[Answer], duration_s: float) -> LoadReport:
        good = [answer.latency_s for answer in answers if answer.error is None]
        images = sum(answer.num_images for answer in answers)
        latency = {} if not good else {"mean": sum(good) / len(good)}
        latency |= {f"p{share}": percentile(good, share) for share in PERCENTILES if good}
        latency |= {"max": max(good)} if good else {}
        errors = Counter(answer.error for answer in answers if answer.error is not None)
        rate = None if math.isinf(config.rate) else config.rate
        per_second = (len(good) / duration_s, images / duration_s)
        return cls(config.url, rate, len(answers), len(good), images, duration_s, *per_second, latency,
                   dict(errors.most_common()))  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """A table for people."""
        rate = "all at once" if self.rate is None else f"{self.rate:g} requests/s"
        rows = [
            ("load", f"{self.num_requests} requests, {rate}"),
            ("answered", f"{self.succeeded} with {self.images} images in {self.duration_s:.2f} s"),
            ("throughput", f"{self.requests_per_s:.3f} requests/s, {self.images_per_s:.3f} images/s"),
        ]
        rows += [(f"latency {name}", f"{seconds:.3f} s") for name, seconds in self.latency_s.items()]
        return rows + [(f"failed: {error}", str(count)) for error, count in self.errors.items()]


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that this share of all, in percent, do not exceed."""
    return sorted(values)[max(0, math.ceil(share / 100 * len(values)) - 1)]


def run_load(config: LoadConfig, on_progress: Callable[[int], None] = lambda done: None) -> LoadReport:
    """Send the requests and wait for all answers. Raises EngineError if the server cannot be reached at all."""
    connection = _connect(config)
    try:
        connection.connect()
    except OSError as error:
        raise EngineError(f"{config.url} cannot be reached: {error}. Is the server up?") from error
    finally:
        connection.close()
    answers: list[Answer] = []
    lock = threading.Lock()
    started = time.perf_counter()

    def send(number: int, due: float) -> None:
        answer = _ask(config, number, started + due)
        with lock:
            answers.append(answer)
            on_progress(len(answers))

    with ThreadPoolExecutor(min(config.max_concurrency, config.num_requests)) as pool:
        for number, due in enumerate(config.arrivals()):
            time.sleep(max(0.0, started + due - time.perf_counter()))
            pool.submit(send, number, due)
    return LoadReport.of(config, answers, time.perf_counter() - started)


def _connect(config: LoadConfig) -> http.client.HTTPConnection:
    parts = urlsplit(config.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=config.timeout_s)


def _answered(config: LoadConfig, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    """The status and the content of an answer. Clients of OpenAI's API are given the address with its version."""
    base = urlsplit(config.url).path.rstrip("/").removesuffix("/v1")
    headers = {"Content-Type": "application/json"}
    if config.api_key is not None:
        headers["Authorization"] = f"Bearer {config.api_key}"
    connection = _connect(config)
    try:
        connection.request(method, base + path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _ask(config: LoadConfig, number: int, due: float) -> Answer:
    try:
        answer = _answered(config, "POST", config.path, json.dumps(config.request(number)))
    except (OSError, http.client.HTTPException) as error:
        reason = "timeout" if isinstance(error, socket.timeout) else type(error).__name__
        return Answer(time.perf_counter() - due, 0, reason)
    seconds = time.perf_counter() - due
    return Answer(seconds, *_read(*answer))


def _read(status: int, content: bytes) -> tuple[int, str | None]:
    """Number of images in an answer, or why there is none."""
    try:
        body = json.loads(content if status == 200 else content[:_MAX_ERROR_BYTES])
    except ValueError:
        return 0, f"HTTP {status}, not JSON"
    if status != 200:
        return 0, f"HTTP {status} {_reason(body)}"[:80].rstrip()
    data = body.get("data") if isinstance(body, dict) else None
    images = [one for one in data if isinstance(one, dict) and (one.get("b64_json") or one.get("url"))] if data else []
    return (len(images), None) if images else (0, "HTTP 200 without an image")


def _reason(body: Any) -> str:
    """Why there is no image, as a server says it: a code as OpenAI has it, or what FastAPI calls a detail."""
    body = body if isinstance(body, dict) else {}
    error, detail = body.get("error"), body.get("detail")
    if isinstance(error, dict):
        detail = next((error[name] for name in ("code", "type") if isinstance(error.get(name), str)), "")
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        detail = detail[0].get("msg")
    return " ".join(detail.split()) if isinstance(detail, str) else ""


def served_model(config: LoadConfig) -> str | None:
    """The model that a server says it has, if it says so: some refuse requests that do not name it."""
    try:
        body = json.loads(_answered(config, "GET", "/v1/models")[1])
    except (OSError, http.client.HTTPException, ValueError):
        return None
    models = body.get("data") if isinstance(body, dict) else None
    name = models[0].get("id") if isinstance(models, list) and models and isinstance(models[0], dict) else None
    return name if isinstance(name, str) else None


# ------------------------------------------------------------------------------------------------ command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="the server, such as http://127.0.0.1:8091")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second on average, or inf (1)")
    parser.add_argument("--num-requests", type=int, default=50, metavar="N", help="(50)")
    parser.add_argument("--max-concurrency", type=int, default=256, metavar="N", help="requests in flight (256)")
    parser.add_argument("--warm-up", type=int, default=0, metavar="N", help="requests before, which do not count (0)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and of images (0)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for an answer (600)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one per line (one about a cat)")
    parser.add_argument("--model", metavar="NAME", help="as the server calls it (what /v1/models says)")
    parser.add_argument("--size", metavar="WxH", help="such as 1024x1024 (the server's)")
    parser.add_argument("--steps", type=int, metavar="N", help="(the server's)")
    parser.add_argument("--body", metavar="JSON", help="other fields of each request")
    parser.add_argument("--path", default=GENERATE, help=f"({GENERATE})")
    parser.add_argument("--api-key", metavar="KEY", help="better set SAMOVAR_API_KEY")
    return parser


def read_config(options: argparse.Namespace) -> LoadConfig:
    """What the options ask for."""
    given = {"model": options.model, "size": options.size, "num_inference_steps": options.steps}
    body = {name: value for name, value in given.items() if value is not None} | _read_body(options.body)
    prompts = {} if options.prompts is None else {"prompts": _read_lines(options.prompts)}
    return LoadConfig(
        options.url, options.rate, options.num_requests, options.max_concurrency, body=body, path=options.path,
        api_key=options.api_key or os.environ.get("SAMOVAR_API_KEY"), timeout_s=options.timeout, seed=options.seed,
        **prompts,
    )  # fmt: skip


def _read_lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingError(f"--prompts {str(file)!r} cannot be read: {error}", param="prompts") from error


def _read_body(text: str | None) -> dict[str, Any]:
    try:
        body = {} if text is None else parse_settings(text)
    except ValueError as error:
        raise SettingError(f"--body is not valid JSON: {error}", param="body") from error
    if not isinstance(body, dict):
        raise SettingError(f"--body {text!r}; expected a JSON object.", param="body")
    return body


def main(argv: Sequence[str] | None = None) -> int:
    """Load a server and print throughput, latency and errors. 0 if any request was answered with an image."""
    options = make_parser().parse_args(argv)
    try:
        config = read_config(options)
        if "model" not in config.body and (model := served_model(config)) is not None:
            config = replace(config, body={"model": model, **config.body})
        if options.warm_up:
            others = config.seed + config.num_requests
            run_load(replace(config, num_requests=options.warm_up, rate=math.inf, seed=others))
        report = run_load(config)
    except SamovarError as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2
    width = max(len(name) for name, _ in report.rows())
    lines = (
        [json.dumps(report.to_dict(), indent=2)] if options.json else [f"{a:{width}}  {b}" for a, b in report.rows()]
    )
    print("\n".join(lines))
    if not report.succeeded:
        print("no request was answered with an image", file=sys.stderr)
    return 0 if report.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
