"""How is a server started from the shell? `samovar serve`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any

from ..errors import SettingError

_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
KEY_VARIABLE = "SAMOVAR_API_KEY"


def add_serve(commands: Any) -> None:
    """Make the command known."""
    from .generation import add_model_options, add_speed_options

    serve = commands.add_parser(
        "serve",
        help="serve pictures over HTTP, as OpenAI's clients expect it, with a page to try it",
        description="Serve a model over HTTP: OpenAI's /v1/images/generations and /v1/images/edits, /health, /ready, "
        "/metrics, and a page at /. Only this machine can reach it unless --host says otherwise.",
        epilog="examples:\n  samovar serve\n"
        "  samovar serve ./flux --enable-cpu-offload --cache-backend tea_cache "
        "--cache-config '{\"rel_l1_thresh\": 0.2}'\n"
        "  SAMOVAR_API_KEY=secret samovar serve ./flux --host 0.0.0.0 --gpu-memory 12GiB",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument("place", nargs="?", metavar="MODEL", help="the same as --model (emoji)")
    serve.add_argument("-q", "--quiet", action="store_true", help="no line for each request, only errors")
    _add_address_options(serve.add_argument_group("the address"))
    _add_limit_options(serve.add_argument_group("limits"))
    add_model_options(serve.add_argument_group("the model"))
    add_speed_options(serve.add_argument_group("speed and memory"))
    serve.set_defaults(run=_serve)


def _add_address_options(group: Any) -> None:
    group.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for all machines (127.0.0.1: this one only)")
    group.add_argument("--port", type=int, default=8091, metavar="N", help="0 takes one that is free (8091)")
    group.add_argument("--api-key", metavar="KEY", help=f"what clients must send; better given as {KEY_VARIABLE}")
    group.add_argument("--open-metrics", action="store_true", help="/metrics is read without the key")
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL", help="a site whose pages may use the server"
    )
    group.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="another name of it, as behind a proxy"
    )


def _add_limit_options(group: Any) -> None:
    group.add_argument("--max-queue", type=int, metavar="N", help="requests that may wait (16)")
    group.add_argument("--max-pixels", type=int, default=2048 * 2048, metavar="N", help="of a picture (4194304)")
    group.add_argument("--max-steps", type=int, default=200, metavar="N", help="of a picture (200)")
    group.add_argument("--max-images", type=int, default=10, metavar="N", help="of a request (10)")
    group.add_argument(
        "--step-timeout", type=float, dest="step_timeout_s", metavar="S", help="until a step has hung (60)"
    )
    group.add_argument(
        "--load-timeout", type=float, dest="load_timeout_s", metavar="S", help="until loading has hung (1800)"
    )
    group.add_argument("--request-timeout", type=float, default=30.0, metavar="S", help="for a request to arrive (30)")
    group.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="S", help="for what runs to finish (30)")


def _serve(options: argparse.Namespace) -> int:
    import asyncio
    import logging

    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingError(f"The server needs {', '.join(missing)}: pip install 'samovar[serve]'")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("samovar.server").setLevel(logging.WARNING if options.quiet else logging.INFO)
    # Before the loop, which takes Ctrl-C for itself: the imports take seconds, and could not be interrupted.
    state = _app_state(options)
    return asyncio.run(_run(options, state))


async def _run(options: argparse.Namespace, state: Any) -> int:
    from ..server import serve

    def on_listening(address: str) -> None:
        if not options.quiet:
            print(
                f"samovar: loading {state.model_name!r}; {address}/ready says when it is", file=sys.stderr, flush=True
            )

    return await serve(state, on_listening, lambda address: _announce(address, state))


def _app_state(options: argparse.Namespace) -> Any:
    """Everything checked, nothing loaded."""
    from ..engine import OmniDiffusionConfig
    from ..omni import AsyncOmni
    from ..server import AppState, Limits, ServerConfig
    from .generation import read_settings, taken

    config = ServerConfig(
        host=options.host,
        port=options.port,
        api_key=options.api_key if options.api_key is not None else os.environ.get(KEY_VARIABLE),
        cors_origins=tuple(options.cors_origin),
        allowed_hosts=tuple(options.allowed_host),
        is_metrics_open=options.open_metrics,
        limits=Limits(max_pixels=options.max_pixels, max_steps=options.max_steps, max_images=options.max_images),
        request_timeout_s=options.request_timeout,
        shutdown_timeout_s=options.shutdown_timeout,
    )
    settings = taken(options, OmniDiffusionConfig)
    if options.cache_config is not None:
        settings["cache_config"] = read_settings("--cache-config", options.cache_config)
    if options.place is not None:
        if options.model not in (None, options.place):
            raise SettingError(f"Two models are given: {options.place!r} and --model {options.model!r}. Give one.")
        settings["model"] = options.place
    omni = AsyncOmni(config=options.config, **settings)
    return AppState(omni, config)


def _announce(address: str, state: Any) -> None:
    """Where the server is and how to ask it, in words that can be pasted."""
    key = "" if state.config.api_key is None else f' -H "Authorization: Bearer ${KEY_VARIABLE}"'
    print(
        f"samovar serves {state.model_name!r} at {address}\n"
        f"  page   {address}/\n"
        f"  try    curl -s {address}/v1/images/generations -H 'Content-Type: application/json'{key} "
        '-d \'{"prompt": "a grinning cat, 3d style"}\'\n'
        "  end    Ctrl-C; what is running may finish, a second Ctrl-C ends at once",
        flush=True,
    )
