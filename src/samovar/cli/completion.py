"""How does the shell complete our commands? `samovar completion bash | zsh | fish` prints the script, made from the
parser itself, so that it knows every option."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

SHELLS = ("bash", "zsh", "fish")


def add_completion(commands: Any, parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Make the command known. `parser` makes the one that is completed, this command included."""
    completion = commands.add_parser(
        "completion",
        help="print a script for the shell's completion",
        description="Print a script that lets the shell complete commands and options.",
        epilog='examples:\n  eval "$(samovar completion bash)"       in ~/.bashrc\n'
        '  eval "$(samovar completion zsh)"        in ~/.zshrc, after compinit\n'
        "  samovar completion fish > ~/.config/fish/completions/samovar.fish",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=SHELLS, help="which shell")
    completion.set_defaults(run=partial(_complete, parser))


def _complete(parser: Callable[[], argparse.ArgumentParser], options: argparse.Namespace) -> int:
    scripts = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
    print(scripts[options.shell](options_of(parser())))
    return 0


def options_of(parser: argparse.ArgumentParser) -> dict[str, dict[str, str]]:
    """The commands, each with its options and what they are for."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {
        name: {
            option: (action.help or "").replace("%%", "%")
            for action in command._actions
            for option in action.option_strings
            if option.startswith("--")
        }
        for name, command in commands.choices.items()
    }


def bash_script(commands: Mapping[str, Mapping[str, str]]) -> str:
    """Words after the command; files where no option begins."""
    cases = "\n".join(f'    {name}) words="{" ".join(options)}" ;;' for name, options in commands.items())
    return f"""_samovar() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$current"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  case "$current" in
    -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
    *) COMPREPLY=($(compgen -f -- "$current")) ;;
  esac
}}
complete -o filenames -F _samovar samovar"""


def zsh_script(commands: Mapping[str, Mapping[str, str]]) -> str:
    def described(name: str, text: str) -> str:
        clean = text.replace("'", "").replace(":", ";")
        return f"'{name}:{clean}'"

    cases = "\n".join(
        f"    {name}) choices=({' '.join(described(option, text) for option, text in options.items())}) ;;"
        for name, options in commands.items()
    )
    return f"""_samovar() {{
  local -a commands choices
  commands=({" ".join(commands)})
  if (( CURRENT == 2 )); then
    compadd -- $commands
    return
  fi
  case "${{words[2]}}" in
{cases}
  esac
  if [[ "$PREFIX" == -* ]]; then
    _describe 'option' choices
  else
    _files
  fi
}}
compdef _samovar samovar"""


def fish_script(commands: Mapping[str, Mapping[str, str]]) -> str:
    lines = [f"complete -c samovar -n __fish_use_subcommand -f -a {name}" for name in commands]
    for name, options in commands.items():
        for option, text in options.items():
            clean = text.replace("'", "")
            condition = f"'__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c samovar -n {condition} -l {option.removeprefix('--')} -d '{clean}'")
    return "\n".join(lines)
