"""How does the shell complete commands and options? `samovar completion`; the work is argcomplete's."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .options import add_command

SHELLS = ("bash", "zsh", "fish")


def add_completion(commands: Any) -> None:
    completion = add_command(
        commands,
        "completion",
        _print_script,
        help="print a completion script for the shell",
        description="Print a script that lets the shell complete commands and options.",
        examples='  eval "$(samovar completion bash)"       in ~/.bashrc\n'
        '  eval "$(samovar completion zsh)"        in ~/.zshrc, after compinit\n'
        "  samovar completion fish > ~/.config/fish/completions/samovar.fish",
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell")


def _print_script(options: argparse.Namespace) -> int:
    import argcomplete

    print(argcomplete.shellcode(["samovar"], shell=options.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and exit, if it is the shell that called."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
