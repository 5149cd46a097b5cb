"""The commands of the shell, and their exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__
from ..core.errors import EngineError, SamovarError, nearest
from . import arguments
from .generate import add_generate
from .inspect import add_inspect, add_plan
from .lab import add_calibrate, add_compare, add_tune
from .serve import add_serve

SHELLS = ("bash", "zsh", "fish")
EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 the engine failed, 2 bad input, 130 interrupted."""
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # The shell asks for completions.
        import argcomplete

        argcomplete.autocomplete(parser)
    options, rest = parser.parse_known_args(argv)
    if rest and not rest[0].startswith("-") and getattr(options, "positional_model", "") is None:
        options.positional_model = rest.pop(0)  # argparse takes an optional argument only right behind a required one.
    if rest:
        command = getattr(options, "parser", parser)
        command.error(_unknown(rest[0], command))
    if options.run is None:
        parser.print_help(sys.stderr)
        return EXIT_BAD_INPUT
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # Its advice on image processors is not for our users.
    from ..engine.models import hush_quantisers  # Importing it also sets what torch reads when it is imported.

    hush_quantisers()
    try:
        return int(options.run(options))
    except (SamovarError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # The reader has seen enough, as in `samovar inspect X | head`.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK
        print(f"samovar: {arguments.in_options(error, options.parser)}", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, EngineError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("samovar: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """Why an argument is refused that no option and no place takes."""
    if not word.startswith("-"):
        return f"{word!r} is one argument too many. Put a text of several words in quotes"
    option = word.partition("=")[0]
    return f"{option} is not an option. {nearest(option, parser._option_string_actions)}"


class Parser(argparse.ArgumentParser):
    """Refuses arguments in one line, as all our errors are."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message}{end} See {self.prog} --help.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What follows the switch --compile is not its value, but for the word graphs."""
        words: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            if word == "graphs" and words[-1:] == ["--compile=true"]:
                words[-1] = "--compile=graphs"
            else:
                words.append("--compile=true" if word == "--compile" else word)
        return super().parse_known_args(words, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r} is not known. {nearest(value, action.choices)}")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="samovar",
        description="Makes diffusion transformers fast and small without touching their code.",
        epilog="exit codes: 0 done, 1 the engine failed, 2 bad input, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"samovar {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (add_generate, add_serve, add_inspect, add_plan, add_compare, add_calibrate, add_tune):
        add(commands)
    arguments.add_command(commands, _completion).add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def _completion(options: argparse.Namespace) -> int:
    """Print a completion script for the shell.

    Print a script that lets the shell complete commands and options.

    examples:
      eval "$(samovar completion bash)"       in ~/.bashrc
      eval "$(samovar completion zsh)"        in ~/.zshrc, after compinit
      samovar completion fish > ~/.config/fish/completions/samovar.fish
    """
    from argcomplete.shell_integration import shellcode

    print(shellcode(["samovar"], shell=options.shell))
    return 0
