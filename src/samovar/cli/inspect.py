"""What is a model built of? `samovar inspect`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..builtin import BUILTIN_MODELS
from ..errors import ModelError
from ..files import read_json
from .options import add_command, model_of
from .terminal import Status, aligned

if TYPE_CHECKING:
    from ..arch.blocks import BlockStack
    from ..trace import ModelReport
    from ..trace.probe import ComponentReport, FeatureReport


def add_inspect(commands: Any) -> None:
    inspect = add_command(
        commands,
        "inspect",
        _inspect,
        help="show what a model is built of and which features it supports",
        description="Show a model's components and their sizes, its stacks of blocks and the values they carry, and "
        "which features it supports. No weights are loaded.",
        examples="  samovar inspect FluxTransformer2DModel\n  samovar inspect black-forest-labs/FLUX.1-dev --json\n"
        "  samovar inspect ./my-model --probe",
        model="a built-in model, a folder in diffusers format, a hub name, or a class",
    )
    inspect.add_argument("--json", action="store_true", help="print JSON for programs")
    inspect.add_argument("--probe", action="store_true", help="load it and run two steps to see what its blocks carry")


def _inspect(options: argparse.Namespace) -> int:
    with Status("reading the model"):
        from ..trace import survey, survey_by_running

        source = find_config(model_of(options), with_weights=options.probe)
        report = (survey_by_running if options.probe else survey)(source)
        report = replace(report, features=tuple(_features(report, Path(source))))
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_report(report)
    return 0


def find_config(model: str | None, with_weights: bool = False) -> str:
    """The folder or class that a model is read from. A hub name is downloaded, by default without its weights."""
    from ..engine.models import fetch_model, find_model

    name = model or "emoji"
    if name.lower() in BUILTIN_MODELS:
        return str(BUILTIN_MODELS[name.lower()])
    try:
        is_on_hub = find_model(name) is None
    except ModelError:  # A class, or a single component.
        return name
    if not is_on_hub:
        return name
    return str(fetch_model(name)) if with_weights else _download_config(name)


def _download_config(name: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, allow_patterns=["model_index.json", "config.json", "*/config.json"]))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The configuration of {name!r} is not in the local cache and could not be downloaded: "
            f"{str(error).strip().splitlines()[0]} Check the name and the network, or give a folder: "
            f"hf download {name} --local-dir FOLDER"
        ) from error


def _features(report: ModelReport, folder: Path) -> Iterator[FeatureReport]:
    """The features of a report. Quantised weights are more than their memory and cannot be moved."""
    configs = {part.name: folder / part.name / "config.json" for part in report.components}
    quantised = [name for name, file in configs.items() if file.is_file() and "quantization_config" in read_json(file)]
    for feature in report.features:
        if quantised and feature.name.endswith("offload"):
            reason = f"{', '.join(quantised)}: quantised weights cannot be offloaded"
            feature = replace(feature, works=False, reason=reason)
        yield feature


def _print_report(report: ModelReport) -> None:
    from ..offload import format_bytes

    print(f"{_paint(report.class_name, 1)}  {_paint(f'weights as {report.dtype}', 2)}\n")
    rows = [(part.role, part.name, part.class_name, *_size_of(part)) for part in report.components]
    for row in aligned(rows, right=(3, 4)):
        print(f"  {row}")
    for part in report.components:
        if part.anatomy is None:
            continue
        anatomy = part.anatomy
        print(f"\n{_paint(part.name, 1)}  {_paint(f'stacks of {part.class_name}', 2)}")
        stacks = [
            (s.path, f"{len(s)} x {' / '.join(s.block_classes)}", format_bytes(s.num_bytes), _carries(s))
            for s in anatomy.stacks
        ]
        for row in aligned(stacks, right=(2,)) or [_paint("none found", 2)]:
            print(f"  {row}")
        for label, paths in (("runs between blocks", anatomy.side), ("did not run", anatomy.idle)):
            if paths:
                print(f"  {_paint(label, 2)}: {', '.join(paths)}")
        if part.coverage is not None:
            print(f"  {_paint(str(part.coverage), 2)}")
    print(f"\n{_paint('features', 1)}")
    width = max(len(feature.name) for feature in report.features)
    for feature in report.features:
        works = {True: _paint("yes", 32), False: _paint("no ", 31), None: _paint("?  ", 33)}[feature.works]
        print(f"  {feature.name:{width}}  {works}  {_paint(feature.reason, 2)}")


def _carries(stack: BlockStack) -> str:
    if not stack.streams:
        return "carries: not known before a probe"
    values = (f"{s.parameter or '(not carried)'}{f' [{s.kind}]' if s.kind else ''}" for s in stack.streams)
    return f"carries {', '.join(values)}"


def _size_of(part: ComponentReport) -> tuple[str, str]:
    from ..offload import format_bytes

    if part.num_parameters is None or part.num_bytes is None:
        return "", "as in its checkpoint"
    count = part.num_parameters
    return (f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"), format_bytes(part.num_bytes)


def _paint(text: str, code: int) -> str:
    """A text with an ANSI code, on a terminal unless NO_COLOR is set."""
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text
