"""Starting a server from the shell: `samovar serve`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from ..core.errors import SettingError
from ..server.settings import Limits, ServerConfig
from . import arguments

if TYPE_CHECKING:
    from ..server.state import AppState

KEY_VARIABLE = "SAMOVAR_API_KEY"


_DEFAULTS = """
    --default-steps N :num_inference_steps  denoising steps (those of a tuned --cache, or the model's)
    --default-size WxH :size                such as 1024x1024 (the model's)
    --default-guidance-scale X :guidance_scale  how closely to follow the prompt
    --default-true-cfg-scale X :true_cfg_scale  the same, for FLUX, Qwen and emoji
    --default-negative-prompt TEXT :negative_prompt  what to avoid
    --default-max-sequence-length TOKENS :max_sequence_length  prompt tokens to read
"""
_ENGINE = """
    --replicas N          workers with the whole model, for one queue (1)
    --devices LIST        their GPUs, such as 0,1,2,3 (the first ones)
    --max-queue N         requests that may wait (16)
    --step-timeout S :step_timeout_s  until a step at the default size counts as hung; more for larger images (60)
    --load-timeout S :load_timeout_s  until loading counts as hung (1800)
"""


def add_serve(commands: Any) -> None:
    parser = arguments.add_command(commands, _serve)
    arguments.add_model(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only, not every request")
    arguments.add_options(parser, ServerConfig, "server")
    arguments.add_options(parser, Limits, "limits of a request")
    arguments.add_options(parser, _DEFAULTS, "defaults of requests")
    arguments.add_engine_options(parser)
    group = arguments.add_options(parser, _ENGINE, "several GPUs, many requests")
    group.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=None,
                       help="make an image before /ready answers (with --compile)")  # fmt: skip


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


async def _run(options: argparse.Namespace, state: AppState) -> int:
    from ..server.serving import serve

    config, log = state.config, logging.getLogger("samovar.server")
    is_json = config.log_format == "json"
    if not config.is_local and config.api_key is None:
        log.warning("%s is open to all who can reach this machine: set %s to ask for a key", config.host, KEY_VARIABLE)

    def on_listening(address: str) -> None:
        if is_json:
            log.info("loading", extra={"model": state.model_name, "address": address})
        elif not options.quiet:
            text = f"samovar: loading {state.model_name!r}; {address}/ready answers when it is done"
            print(text, file=sys.stderr, flush=True)

    def on_ready(address: str) -> None:
        if options.jobs is not None and state.jobs is None:
            log.warning("--jobs is for videos, and %r makes %s: it is not used", state.model_name, state.omni.output)
        if is_json:
            log.info("ready", extra={"model": state.model_name, "address": address, "load_s": state.omni.load_seconds})
        else:
            _announce(address, state)

    await serve(state, on_listening, on_ready)
    log.info("the server has ended: %d images, videos and sounds were made", state.omni.status().images)
    return 0


def _app_state(options: argparse.Namespace) -> AppState:
    """Everything checked, nothing loaded."""
    from ..omni import AsyncOmni
    from ..server.state import AppState

    options.model = arguments.model_of(options)
    if options.api_key is None:
        options.api_key = os.environ.get(KEY_VARIABLE)
    given = arguments.settings_of(options, ServerConfig) | arguments.settings_of(options, Limits)
    config = ServerConfig.read_over(given, options.config)
    settings = arguments.engine_settings(options)
    if defaults := _defaults(options):
        settings["defaults"] = defaults
    return AppState(AsyncOmni(config=options.config, **settings), config)


def _defaults(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that options give to all requests."""
    from ..engine import OmniDiffusionSamplingParams

    width, sign, height = (options.size or "0x0").partition("x")
    if not (sign and width.isdecimal() and height.isdecimal()):
        raise SettingError(f"--default-size {options.size!r}; expected one such as 1024x1024.", param="size")
    sides = {} if options.size is None else {"width": int(width), "height": int(height)}
    return sides | arguments.settings_of(options, OmniDiffusionSamplingParams)


_EXAMPLES = {
    "image": ("/v1/images/generations", '{"prompt": "a grinning cat, 3d style"}'),
    "video": ("/v1/videos", '{"prompt": "a kettle that boils"}'),
    "audio": ("/v1/audio/generate", '{"input": "rain on a tin roof"}'),
}


def _announce(address: str, state: AppState) -> None:
    """Print where the server is and how to ask it, ready to paste."""
    key = "" if state.config.api_key is None else f' -H "Authorization: Bearer ${KEY_VARIABLE}"'
    path, body = _EXAMPLES[state.omni.output.kind]
    jobs = f"  jobs   {state.jobs.store.folder}\n" if state.jobs is not None else ""
    print(
        f"samovar serves {state.model_name!r} at {address}\n"
        f"  page   {address}/\n"
        f"  try    curl -s {address}{path} -H 'Content-Type: application/json'{key} -d '{body}'\n"
        f"{jobs}"
        "  stop   Ctrl-C lets running requests finish; a second Ctrl-C stops at once",
        flush=True,
    )
