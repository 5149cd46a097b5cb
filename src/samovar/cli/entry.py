"""What can be done from the shell? Every command, and what their exit codes mean."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import EngineError, SamovarError
from .completion import add_completion
from .generation import add_generate
from .inspection import add_inspect
from .laboratory import add_bench, add_calibrate, add_compare, add_tune
from .planning import add_plan
from .serving import add_serve

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code says how it went: 0 done, 1 the engine failed, 2 bad input, 130
    interrupted."""
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
        return EXIT_FAILED if isinstance(error, EngineError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("samovar: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samovar",
        description="Makes diffusion transformers fast and small without touching their code.",
        epilog="exit codes: 0 done, 1 the engine failed, 2 bad input, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"samovar {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_generate(commands)
    add_serve(commands)
    add_inspect(commands)
    add_plan(commands)
    for add in (add_compare, add_calibrate, add_tune, add_bench):
        add(commands)
    add_completion(commands, _parser)
    return parser
