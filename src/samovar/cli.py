"""What can be done from the shell? `samovar inspect MODEL_OR_CLASS`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from . import __version__
from .errors import SamovarError

if TYPE_CHECKING:
    from .arch import ModelReport
    from .arch.blocks import BlockStack
    from .arch.survey import ComponentReport

EXIT_OK, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code says how it went: 0 done, 2 bad input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except SamovarError as error:
        print(f"samovar: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("samovar: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samovar", description="Makes diffusion transformers fast and small without touching their code."
    )
    parser.add_argument("--version", action="version", version=f"samovar {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    inspect = commands.add_parser(
        "inspect",
        help="show what a model is built of and which features it is ready for",
        description="Show a model's components with their sizes, its stacks of blocks with the values they carry, "
        "and which features it is ready for. No weights are loaded.",
        epilog="examples:\n  samovar inspect FluxTransformer2DModel\n  samovar inspect WanPipeline --json\n"
        "  samovar inspect ./my-model --probe",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument("model", metavar="MODEL_OR_CLASS", help="a folder in diffusers format, or a diffusers class")
    inspect.add_argument("--json", action="store_true", help="print JSON for programs")
    inspect.add_argument(
        "--probe", action="store_true", help="load the pipeline and run two steps to see what its blocks carry"
    )
    inspect.set_defaults(run=_inspect)
    return parser


def _inspect(options: argparse.Namespace) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # Advice about image processors is not for us.
    with _Status("reading the model"):
        from .arch import survey, survey_by_running

        report = (survey_by_running if options.probe else survey)(options.model)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_report(report, _Paint(sys.stdout))
    return EXIT_OK


class _Status:
    """A line that says what is going on, for as long as it does. Only a terminal sees it."""

    def __init__(self, text: str) -> None:
        self._text = f"samovar: {text} ..."

    def __enter__(self) -> None:
        if sys.stderr.isatty():
            print(self._text, end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if sys.stderr.isatty():
            print("\r" + " " * len(self._text) + "\r", end="", file=sys.stderr, flush=True)


class _Paint:
    """Colours for a terminal, none for a file, and none where NO_COLOR is set."""

    def __init__(self, stream: TextIO) -> None:
        self._is_on = stream.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._is_on else text

    def bold(self, text: str) -> str:
        return self(text, 1)

    def dim(self, text: str) -> str:
        return self(text, 2)

    def yes_or_no(self, yes: bool) -> str:
        return self("yes", 32) if yes else self("no ", 31)


def _print_report(report: ModelReport, paint: _Paint) -> None:
    print(f"{paint.bold(report.class_name)}  {paint.dim(f'weights as {report.dtype}')}\n")
    rows = [(part.role, part.name, part.class_name, *_size_of(part)) for part in report.components]
    for row in _aligned(rows, right=(3, 4)):
        print(f"  {row}")
    for part in report.components:
        if part.anatomy is None:
            continue
        anatomy = part.anatomy
        print(f"\n{paint.bold(part.name)}  {paint.dim(f'stacks of {part.class_name}')}")
        stacks = [
            (stack.path, f"{len(stack)} x {' / '.join(stack.block_classes)}", _gib(stack.num_bytes), _carries(stack))
            for stack in anatomy.stacks
        ]
        for row in _aligned(stacks, right=(2,)):
            print(f"  {row}")
        for label, paths in (("runs between blocks", anatomy.side), ("did not run", anatomy.idle)):
            if paths:
                print(f"  {paint.dim(label)}: {', '.join(paths)}")
        if not stacks:
            print(f"  {paint.dim('none found')}")
    print(f"\n{paint.bold('ready for')}")
    width = max(len(feature.name) for feature in report.features)
    for feature in report.features:
        print(f"  {feature.name:{width}}  {paint.yes_or_no(feature.works)}  {paint.dim(feature.reason)}")


def _carries(stack: BlockStack) -> str:
    if not stack.streams:
        return "carries: not known before a probe"
    values = (f"{s.parameter or '(not carried)'}{f' [{s.kind}]' if s.kind else ''}" for s in stack.streams)
    return f"carries {', '.join(values)}"


def _size_of(part: ComponentReport) -> tuple[str, str]:
    if part.num_parameters is None or part.num_bytes is None:
        return "", "as in its checkpoint"
    count = part.num_parameters
    return (f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"), _gib(part.num_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    pads = [str.rjust if index in right else str.ljust for index in range(len(widths))]
    return ["  ".join(pad(cell, w) for pad, cell, w in zip(pads, row, widths, strict=True)).rstrip() for row in rows]
