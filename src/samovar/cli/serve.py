"""How is a server started from the shell? `samovar serve`."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from typing import Any

from ..core.errors import SettingError
from . import arguments

KEY_VARIABLE = "SAMOVAR_API_KEY"


def add_serve(commands: Any) -> None:
    parser = arguments.add_command(commands, _serve)
    arguments.add_model(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only, not every request")
    parser.add_argument("--log-format", metavar="FORMAT", help="text, or json for one object per line (text)")
    _add_address_options(parser.add_argument_group("address"))
    _add_default_options(parser.add_argument_group("defaults of requests"))
    _add_limit_options(parser.add_argument_group("limits"))
    _add_job_options(parser.add_argument_group("videos"))
    arguments.add_engine_options(parser)
    _add_replica_options(parser.add_argument_group("several GPUs, many images"))
    group = parser.add_argument_group("start")
    group.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=None,
                       help="make an image before /ready answers (with --compile)")  # fmt: skip


def _add_replica_options(group: Any) -> None:
    group.add_argument("--replicas", type=int, metavar="N", help="workers with the whole model, for one queue (1)")
    group.add_argument("--devices", metavar="LIST", help="their GPUs, such as 0,1,2,3 (the first ones)")


def _add_address_options(group: Any) -> None:
    group.add_argument("--host", help="0.0.0.0 for all machines (127.0.0.1, this machine only)")
    group.add_argument("--port", type=int, metavar="N", help="0 for any free port (8091)")
    group.add_argument("--served-model-name", action="append", metavar="NAME",
                       help="a name of the model for clients (its folder's)")  # fmt: skip
    group.add_argument("--api-key", metavar="KEY", help=f"the key that clients must send; better set {KEY_VARIABLE}")
    arguments.add_switch(group, "--open-metrics", "let /metrics be read without the key", dest="is_metrics_open")
    group.add_argument("--cors-origin", action="append", dest="cors_origins", metavar="URL",
                       help="a site whose pages may call the server")  # fmt: skip
    group.add_argument("--fetch-origin", action="append", dest="fetch_origins", metavar="URL",
                       help="a site from which images are fetched that requests name by URL (none)")  # fmt: skip
    group.add_argument("--allowed-host", action="append", dest="allowed_hosts", metavar="NAME",
                       help="a host name by which clients reach the server, such as that of a proxy")  # fmt: skip


def _add_default_options(group: Any) -> None:
    group.add_argument("--default-steps", type=int, dest="num_inference_steps", metavar="N",
                       help="denoising steps (those of a tuned --cache, or the model's)")  # fmt: skip
    group.add_argument("--default-size", dest="size", metavar="WxH", help="such as 1024x1024 (the model's)")
    group.add_argument("--default-guidance-scale", type=float, dest="guidance_scale", metavar="X")
    group.add_argument("--default-true-cfg-scale", type=float, dest="true_cfg_scale", metavar="X")
    group.add_argument("--default-negative-prompt", dest="negative_prompt", metavar="TEXT")
    group.add_argument("--default-max-sequence-length", type=int, dest="max_sequence_length", metavar="TOKENS")


def _add_limit_options(group: Any) -> None:
    group.add_argument("--max-queue", type=int, metavar="N", help="requests that may wait (16)")
    group.add_argument("--max-pixels", type=int, metavar="N", help="per image (4194304)")
    group.add_argument("--max-steps", type=int, metavar="N", help="per image (200)")
    group.add_argument("--max-tolerance", metavar="X",
                       help="that requests may ask of the cache auto: a number, exact, high or fast (any)")  # fmt: skip
    group.add_argument("--max-images", type=int, metavar="N", help="per request (10)")
    group.add_argument("--max-frames", type=int, metavar="N", help="per video (513)")
    group.add_argument("--max-seconds", type=int, metavar="S", help="per video or sound (300)")
    group.add_argument("--max-video-pixels", type=int, metavar="N", help="per video, in all frames (134217728)")
    group.add_argument("--max-connections", type=int, metavar="N", help="in all (512)")
    group.add_argument("--max-connections-per-address", type=int, metavar="N",
                       help="of one client, or of a proxy (half of all)")  # fmt: skip
    group.add_argument("--max-memory", metavar="SIZE", help="of requests and their images, such as 2GiB (1GiB)")
    for name, default, text in (
        ("step", 60, "until a step at the model's default size counts as hung; more for larger images"),
        ("load", 1800, "until loading counts as hung"),
        ("request", 30, "for a request to arrive"),
        ("shutdown", 30, "for running requests to finish"),
    ):
        group.add_argument(
            f"--{name}-timeout", type=float, dest=f"{name}_timeout_s", metavar="S", help=f"seconds {text} ({default})"
        )


def _add_job_options(group: Any) -> None:
    group.add_argument("--jobs", metavar="DIR",
                       help="where videos and their requests are kept (~/.local/state/samovar/jobs/MODEL)")  # fmt: skip
    group.add_argument("--job-expiry", type=float, dest="job_expiry_s", metavar="S",
                       help="seconds for which a video is kept (86400)")  # fmt: skip
    group.add_argument("--max-job-disk", metavar="SIZE", help="of all videos that are kept, such as 50GiB (10GiB)")


def _serve(options: argparse.Namespace) -> int:
    """Serve a model over HTTP with OpenAI's API, and a page to try it.

    Serve a model over HTTP: OpenAI's /v1/images/generations and /v1/images/edits, /v1/videos or /v1/audio/speech,
    /health, /ready, /metrics, and a page at /. Only this machine can reach it unless --host says otherwise.

    examples:
      samovar serve
      samovar serve ./flux --devices 0,1,2,3
      samovar serve ./flux --offload model --cache '{"rel_l1_thresh": 0.2}'
      SAMOVAR_API_KEY=secret samovar serve ./flux --host 0.0.0.0 --gpu-memory 12GiB
    """
    import asyncio

    from ..server.logs import set_up_logs

    # Before the event loop, which handles Ctrl-C: the imports take seconds and could not be interrupted.
    state = _app_state(options)
    set_up_logs(state.config.log_format, quiet=options.quiet)
    return asyncio.run(_run(options, state))


async def _run(options: argparse.Namespace, state: Any) -> int:
    from ..server import serve

    log = logging.getLogger("samovar.server")
    is_json = state.config.log_format == "json"

    def on_listening(address: str) -> None:
        if is_json:
            log.info("loading", extra={"model": state.model_name, "address": address})
        elif not options.quiet:
            text = f"samovar: loading {state.model_name!r}; {address}/ready answers when it is done"
            print(text, file=sys.stderr, flush=True)

    def on_ready(address: str) -> None:
        if is_json:
            log.info("ready", extra={"model": state.model_name, "address": address, "load_s": state.omni.load_seconds})
        else:
            _announce(address, state)

    return await serve(state, on_listening, on_ready)


def _app_state(options: argparse.Namespace) -> Any:
    """Everything checked, nothing loaded."""
    from ..omni import AsyncOmni
    from ..server import AppState, Limits, ServerConfig

    options.model = arguments.model_of(options)
    if options.api_key is None:
        options.api_key = os.environ.get(KEY_VARIABLE)
    config = ServerConfig.read(
        arguments.given(options, ServerConfig) | arguments.given(options, Limits), options.config
    )
    settings = arguments.engine_settings(options)
    if defaults := _defaults(options):
        settings["defaults"] = defaults
    return AppState(AsyncOmni(config=options.config, **settings), config)


def _defaults(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that options give to all requests."""
    from ..engine import OmniDiffusionSamplingParams

    size = re.fullmatch(r"(\d{1,6})x(\d{1,6})", options.size or "0x0")
    if size is None:
        raise SettingError(f"--default-size {options.size!r}; expected one such as 1024x1024.", param="size")
    sides = {} if options.size is None else {"width": int(size[1]), "height": int(size[2])}
    return sides | arguments.given(options, OmniDiffusionSamplingParams)


def _announce(address: str, state: Any) -> None:
    """Print where the server is and how to ask it, ready to paste."""
    key = "" if state.config.api_key is None else f' -H "Authorization: Bearer ${KEY_VARIABLE}"'
    path, body = {
        "image": ("/v1/images/generations", '{"prompt": "a grinning cat, 3d style"}'),
        "video": ("/v1/videos", '{"prompt": "a kettle that boils"}'),
        "audio": ("/v1/audio/generate", '{"input": "rain on a tin roof"}'),
    }[state.omni.output.kind]
    jobs = f"  jobs   {state.video_jobs.store.folder}\n" if state.has_jobs else ""
    print(
        f"samovar serves {state.model_name!r} at {address}\n"
        f"  page   {address}/\n"
        f"  try    curl -s {address}{path} -H 'Content-Type: application/json'{key} -d '{body}'\n"
        f"{jobs}"
        "  stop   Ctrl-C lets running requests finish; a second Ctrl-C stops at once",
        flush=True,
    )
