"""What a model is built of, and where its weights would be: `samovar inspect` and `samovar plan`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..builtin import BUILTIN_MODELS
from ..core.errors import ModelError
from . import arguments
from .terminal import Status, aligned

if TYPE_CHECKING:
    from ..trace import ModelReport
    from ..trace.reports import ComponentReport


_REQUEST = ("height", "width", "frames", "batch")
_CONFIG_FILES = ["*.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja"]
"""What a pipeline is built from without weights: its configuration, schedulers, tokenizers and processors."""
_WEIGHT_FILES = ["*.index.json", "*/*.index.json", "*/*/*"]
_MODEL = "a model, folder, .gguf file, hub name or class"


_JSON = """
    --json                print JSON for programs
"""
_PLAN = f"""
    --gpu-memory SIZE     the budget, such as 12GiB
    --host-memory SIZE    likewise for weights in host memory; more is on disk
    --mode MODE           auto, model (take turns) or layerwise (stream) (auto)
{arguments.EXCLUDE}{arguments.QUANTIZATION}
    --height N            pixels of the largest request (the model's default)
    --width N             likewise (the model's default)
    --frames N            likewise, of a video (the model's default)
    --batch N             images or videos in a request (the model's default)
    --activations SIZE    memory that a component needs besides its weights
    --bus SIZE            bytes per second from the host to the GPU (25GiB)
{_JSON}"""


def add_inspect(commands: Any) -> None:
    parser = arguments.add_command(commands, _inspect)
    arguments.add_model(parser, _MODEL)
    arguments.add_options(parser, _JSON)


def add_plan(commands: Any) -> None:
    parser = arguments.add_command(commands, _plan)
    arguments.add_model(parser, _MODEL)
    arguments.add_options(parser, _PLAN)
    parser.set_defaults(mode="auto")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument(
        "--dtype", choices=dtypes, metavar="TYPE", help="as which the weights are loaded (as they are stored)"
    )


def _plan(options: argparse.Namespace) -> int:
    """Show which weights stay on the GPU with how much memory.

    Show what of a model would stay on the GPU, take turns or stream, with which peak and traffic, and what each
    quantisation would take. No weights are loaded.

    examples:
      samovar plan FluxTransformer2DModel --gpu-memory 6GiB --loss int8
      samovar plan ./my-model --gpu-memory 24GiB --height 720 --width 1280 --frames 81
      samovar plan ./flux --gpu-memory 8GiB --quantization flux1-dev-Q4_K_S.gguf
    """
    with Status("reading the model"):
        from ..engine.planning import make_plan
        from ..engine.request import read_defaults
        from ..offload import OffloadConfig

        given = arguments.settings_of(options, OffloadConfig)
        source = _find_config(options)
        known = read_defaults(Path(source).expanduser()).given() | given
        size = {name: value for name, value in known.items() if name in _REQUEST}
        quantization = arguments.engine_settings(options, ["quantization"])
        made = make_plan(source, OffloadConfig(**given), size, dtype=options.dtype, loss=options.loss, bus=options.bus,
                         **quantization)  # fmt: skip
    if options.json:
        print(json.dumps(made.to_dict(), indent=2))
        return 0
    print(made.plan, *[made.tiers] * made.plan.offloads_anything, sep="\n")
    if made.choices:
        print("", *aligned(made.choices, right=(1, 2, 3)), f"\n{made.why[:1].upper()}{made.why[1:]}", sep="\n")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    """Show what a model is built of and which features it supports.

    Show a model's components and their sizes, its stacks of blocks, and which features it supports. No weights are
    loaded.

    examples:
      samovar inspect FluxTransformer2DModel
      samovar inspect black-forest-labs/FLUX.1-dev --json
    """
    with Status("reading the model"):
        from ..trace import survey

        report = survey(_find_config(options))
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_report(report)
    return 0


def _find_config(options: argparse.Namespace) -> str:
    """The folder or class that a model is read from. A hub name is downloaded without its weights."""
    from ..engine.models import find_model

    name = arguments.model_of(options) or "emoji"
    if name.lower() in BUILTIN_MODELS:
        return str(BUILTIN_MODELS[name.lower()])
    try:
        is_on_hub = find_model(name) is None
    except ModelError:  # A class, or a single component.
        return name
    return _download_config(name) if is_on_hub else name


def _download_config(name: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, allow_patterns=_CONFIG_FILES, ignore_patterns=_WEIGHT_FILES))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The configuration of {name!r} is not in the local cache and could not be downloaded: "
            f"{str(error).strip().splitlines()[0]} Check the name and the network, or give a folder: "
            f"hf download {name} --local-dir FOLDER"
        ) from error


def _print_report(report: ModelReport) -> None:
    from ..offload import format_bytes

    def size_of(part: ComponentReport) -> tuple[str, str]:
        if part.num_parameters is None or part.num_bytes is None:
            return "", "unknown without a checkpoint"
        return f"{part.num_parameters / 1e6:,.2f} M", format_bytes(part.num_bytes)

    print(f"{report.class_name}  weights as {report.dtype}\n")
    rows = [
        (part.role, part.name, part.class_name, *size_of(part), part.quantization or "") for part in report.components
    ]
    print(*(f"  {row}" for row in aligned(rows, right=(3, 4))), sep="\n")
    for part in report.components:
        if part.anatomy is None:
            continue
        print(f"\n{part.name}  stacks of {part.class_name}")
        stacks = [(stack.path, f"{len(stack)} x {' / '.join(stack.block_classes)}", format_bytes(stack.num_bytes))
                  for stack in part.anatomy.stacks]  # fmt: skip
        lines = aligned(stacks, right=(2,)) or ["none found"]
        if part.anatomy.side:
            lines.append(f"runs between blocks: {', '.join(part.anatomy.side)}")
        if part.coverage is not None:
            lines.append(str(part.coverage))
        print(*(f"  {line}" for line in lines), sep="\n")
    works = {True: "yes", False: "no", None: "?"}
    features = [(feature.name, works[feature.works], feature.reason) for feature in report.features]
    print("\nfeatures", *(f"  {row}" for row in aligned(features)), sep="\n")
