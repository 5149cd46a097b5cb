"""What is a model built of? `samovar inspect`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ..builtin import BUILTIN_MODELS
from .terminal import Paint, Status, aligned, gib

if TYPE_CHECKING:
    from ..arch.blocks import BlockStack
    from ..trace import ModelReport
    from ..trace.probe import ComponentReport


def add_inspect(commands: Any) -> None:
    """Make the command known."""
    inspect = commands.add_parser(
        "inspect",
        help="show what a model is built of and which features it is ready for",
        description="Show a model's components with their sizes, its stacks of blocks with the values they carry, "
        "and which features it is ready for. No weights are loaded.",
        epilog="examples:\n  samovar inspect FluxTransformer2DModel\n  samovar inspect WanPipeline --json\n"
        "  samovar inspect ./my-model --probe",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    inspect.add_argument(
        "model", metavar="MODEL_OR_CLASS", help="a built-in model, a folder in diffusers format, or a class"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON for programs")
    inspect.add_argument(
        "--probe", action="store_true", help="load the pipeline and run two steps to see what its blocks carry"
    )
    inspect.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    with Status("reading the model"):
        from ..trace import survey, survey_by_running

        source = str(BUILTIN_MODELS.get(options.model.lower(), options.model))
        report = (survey_by_running if options.probe else survey)(source)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_report(report, Paint(sys.stdout))
    return 0


def _print_report(report: ModelReport, paint: Paint) -> None:
    print(f"{paint.bold(report.class_name)}  {paint.dim(f'weights as {report.dtype}')}\n")
    rows = [(part.role, part.name, part.class_name, *_size_of(part)) for part in report.components]
    for row in aligned(rows, right=(3, 4)):
        print(f"  {row}")
    for part in report.components:
        if part.anatomy is None:
            continue
        anatomy = part.anatomy
        print(f"\n{paint.bold(part.name)}  {paint.dim(f'stacks of {part.class_name}')}")
        stacks = [
            (stack.path, f"{len(stack)} x {' / '.join(stack.block_classes)}", gib(stack.num_bytes), _carries(stack))
            for stack in anatomy.stacks
        ]
        for row in aligned(stacks, right=(2,)):
            print(f"  {row}")
        for label, paths in (("runs between blocks", anatomy.side), ("did not run", anatomy.idle)):
            if paths:
                print(f"  {paint.dim(label)}: {', '.join(paths)}")
        if part.coverage is not None:
            print(f"  {paint.dim(str(part.coverage))}")
        if not stacks:
            print(f"  {paint.dim('none found')}")
    print(f"\n{paint.bold('ready for')}  {paint.dim('what can be attached')}")
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
    return (f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"), gib(part.num_bytes)
