"""What can be done from the shell? `samovar generate` and `samovar inspect`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from . import __version__
from .builtin import BUILTIN_MODELS
from .errors import SamovarError, SettingError

if TYPE_CHECKING:
    from .arch import ModelReport
    from .arch.blocks import BlockStack
    from .arch.survey import ComponentReport

_PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
EXIT_OK, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code says how it went: 0 done, 2 bad input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # Advice about image processors is not for us.
    # Two processes whose threads spin for long while they wait starve each other: a picture took over 60 s instead of
    # 16. Threads that never spin take twice as long on an idle machine. It must be set before torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        return int(options.run(options))
    except (SamovarError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # The reader has seen enough, as in `samovar inspect X | head`.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK
        print(f"samovar: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("samovar: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samovar",
        description="Makes diffusion transformers fast and small without touching their code.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"samovar {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_inspect(commands)
    return parser


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="make pictures from text",
        description="Make a picture from text with the built-in model, or any in diffusers format. The built-in one "
        "knows emoji by name, in three styles: noto, 3d and flat. What is not given is the model's own default.",
        epilog='examples:\n  samovar generate "a grinning cat, 3d style" -o cat.png\n'
        '  samovar generate "rocket, flat style" --seed 7 -n 4 -o rocket.png',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    generate.add_argument("prompt", help="what to draw")
    generate.add_argument("-o", "--output", metavar="FILE", default="out.png", help="PNG, JPEG or WebP (out.png)")
    generate.add_argument("--model", default="emoji", help="a built-in model or a folder in diffusers format (emoji)")
    generate.add_argument("--steps", type=int, dest="num_inference_steps", metavar="N", help="denoising steps")
    generate.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same picture")
    generate.add_argument("--height", type=int, metavar="PIXELS", help="a multiple of 8 for the built-in model")
    generate.add_argument("--width", type=int, metavar="PIXELS", help="likewise")
    generate.add_argument("--true-cfg-scale", type=float, metavar="X", help="how closely to follow the prompt")
    generate.add_argument("--guidance-scale", type=float, metavar="X", help="the same, for distilled models")
    generate.add_argument("--negative-prompt", metavar="TEXT", help="what not to draw")
    generate.add_argument("--max-sequence-length", type=int, metavar="TOKENS", help="tokens of text to read")
    generate.add_argument(
        "-n", type=int, dest="num_outputs_per_prompt", metavar="N", help="how many: out-1.png, out-2.png ..."
    )
    generate.add_argument("--dtype", default="auto", metavar="TYPE", help="float32, bfloat16 or float16 (auto)")
    generate.add_argument("--device", help="cpu, cuda, cuda:1 ... (a GPU if there is one)")
    generate.add_argument("--json", action="store_true", help="print JSON for programs")
    generate.add_argument("-q", "--quiet", action="store_true", help="no progress, only errors")
    generate.set_defaults(run=_generate)


def _add_inspect(commands: Any) -> None:
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


def _generate(options: argparse.Namespace) -> int:
    from .engine.request import OmniDiffusionSamplingParams

    names = [field.name for field in dataclasses.fields(OmniDiffusionSamplingParams)]
    params = OmniDiffusionSamplingParams(**{name: getattr(options, name) for name in names})
    files = _output_files(options.output, params.num_outputs_per_prompt or 1)
    with _Status("starting", options.quiet):
        from .omni import Omni

        omni = Omni(options.model, dtype=options.dtype, device=options.device, progress=_Status.is_shown(options.quiet))
    (result,) = omni.generate(options.prompt, params)
    for file, image in zip(files, result.images, strict=True):
        image.save(file)
    steps, made = result.params.num_inference_steps, zip(files, result.seeds, strict=True)
    if options.json:
        pictures = [{"file": str(file), "seed": seed} for file, seed in made]
        settings = result.params.given()
        seconds = {"seconds": result.seconds, "load_seconds": omni.load_seconds}
        report = {"pictures": pictures, **seconds, "settings": settings, "notes": result.notes}
        print(json.dumps(report, indent=2))
    elif not options.quiet:
        for file, seed in made:
            print(f"{file}  seed {seed}")
        print(f"{result.seconds:.1f} s for {len(files)} x {steps} steps; {omni.load_seconds:.1f} s to load the weights")
        for note in result.notes:
            print(f"note: {note}")
    return EXIT_OK


def _output_files(output: str, count: int) -> list[Path]:
    """Where the pictures go, checked before any is made: cat.png, or cat-1.png, cat-2.png ..."""
    file = Path(output).expanduser()
    if file.suffix.lower() not in _PICTURE_SUFFIXES:
        raise SettingError(
            f"{output!r} must end in {', '.join(_PICTURE_SUFFIXES)}, so that it is clear what kind of file to write."
        )
    if not file.parent.is_dir():
        raise SettingError(f"The folder {str(file.parent)!r} for {output!r} is not there. Make it first.")
    files = [file] if count == 1 else [file.with_stem(f"{file.stem}-{number}") for number in range(1, count + 1)]
    for file in files:
        try:
            was_there = file.exists()
            file.open("ab").close()
        except OSError as error:
            raise SettingError(f"{str(file)!r} cannot be written ({error.strerror}). Give another place.") from error
        if not was_there:
            file.unlink()
    return files


def _inspect(options: argparse.Namespace) -> int:
    with _Status("reading the model"):
        from .arch import survey, survey_by_running

        source = str(BUILTIN_MODELS.get(options.model.lower(), options.model))
        report = (survey_by_running if options.probe else survey)(source)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_report(report, _Paint(sys.stdout))
    return EXIT_OK


class _Status:
    """A line that says what is going on, for as long as it does. Only a terminal sees it."""

    def __init__(self, text: str, quiet: bool = False) -> None:
        self._text = f"samovar: {text} ..."
        self._is_shown = self.is_shown(quiet)

    @staticmethod
    def is_shown(quiet: bool) -> bool:
        return sys.stderr.isatty() and not quiet

    def __enter__(self) -> None:
        if self._is_shown:
            print(self._text, end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
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

    def yes_or_no(self, yes: bool | None) -> str:
        return self("yes", 32) if yes else self("?  ", 33) if yes is None else self("no ", 31)


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
    print(f"\n{paint.bold('ready for')}  {paint.dim('what can be attached; the changelog says what already is')}")
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
