"""How is a server loaded from the shell? `samovar bench-serve`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import SettingError
from ..core.files import parse_settings
from . import arguments
from .serve import KEY_VARIABLE
from .terminal import Status, aligned


def add_bench_serve(commands: Any) -> None:
    parser = arguments.add_command(commands, _bench_serve)
    parser.add_argument("url", help="the server, such as http://127.0.0.1:8091")
    arguments.add_output_options(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--rate", type=float, metavar="N", help="requests per second on average, or inf (1)")
    group.add_argument("--num-requests", type=int, metavar="N", help="(50)")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests in flight (256)")
    group.add_argument("--warm-up", type=int, default=0, metavar="N", help="requests before, which do not count (0)")
    group.add_argument("--arrival-seed", type=int, dest="seed", metavar="N", help="of arrivals and of images (0)")
    group.add_argument("--timeout", type=float, dest="timeout_s", metavar="S", help="for an answer (600)")
    group = parser.add_argument_group("requests")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="one per line (one about a cat)")
    group.add_argument("--model", metavar="NAME", help="as the server calls it (what /v1/models says)")
    group.add_argument("--size", metavar="WxH", help="such as 1024x1024 (the server's)")
    group.add_argument("--steps", type=int, dest="num_inference_steps", metavar="N", help="(the server's)")
    group.add_argument("--body", metavar="JSON", help="other fields of each request")
    group.add_argument("--path", metavar="PATH", help="(/v1/images/generations)")
    group.add_argument("--api-key", metavar="KEY", help=f"better set {KEY_VARIABLE}")


def _bench_serve(options: argparse.Namespace) -> int:
    """Load a server and measure throughput, latency and errors.

    Send requests to an OpenAI-compatible images server at random moments (Poisson arrivals), as many per second as
    --rate says, whether or not it keeps up. Also for vllm-omni's and sglang's servers.

    examples:
      samovar bench-serve http://127.0.0.1:8091 --rate 2 --num-requests 100
      samovar bench-serve http://127.0.0.1:8091 --rate inf --max-concurrency 16 --size 512x512 --steps 20 --json
      samovar bench-serve http://127.0.0.1:30000 --rate 0.5 --body '{"guidance_scale": 3.5}'
    """
    from ..lab.load import LoadConfig, run_load, served_model

    given = arguments.given(options, ("url", "rate", "num_requests", "max_concurrency", "seed", "timeout_s", "path"))
    given["api_key"] = options.api_key or os.environ.get(KEY_VARIABLE)
    if options.prompts is not None:
        given["prompts"] = _read_lines(options.prompts)
    config = LoadConfig(**given)
    body = arguments.given(options, ("model", "size", "num_inference_steps")) | _read_body(options.body)
    with Status("connecting", options.quiet) as status:
        if "model" not in body and (model := served_model(config)) is not None:
            body["model"] = model
        config = replace(config, body=body)
        if options.warm_up:
            status.update("warming up")
            others = config.seed + config.num_requests
            run_load(replace(config, num_requests=options.warm_up, rate=float("inf"), seed=others))
        report = run_load(config, lambda done: status.update(f"{done}/{config.num_requests} answered"))
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    elif not options.quiet:
        print("\n".join(aligned(report.rows(), right=())))
    if not report.succeeded:
        print("samovar: no request was answered with an image", file=sys.stderr)
    return 0 if report.succeeded else 1


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
