"""Options of commands: declared as lines of text or made from tables of settings, and read by these tables."""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from ..core.aliases import ALIASES
from ..core.errors import SettingError
from ..core.settings import Setting, Settings, parse_flag, table

_LINE = re.compile(
    r"^ *(?P<names>(?:-\S+ )+)(?:(?P<metavar>[^\s:]+?)(?P<more>\.\.\.)?)?(?: ?:(?P<dest>\w+))?  +(?P<help>.+)$",
    re.MULTILINE,
)
_COMPONENT = re.compile(r"(\w+)=(.+)")

IMAGE = """
    --steps N :num_inference_steps  denoising steps
    --height PIXELS          a multiple of 8 for the built-in model
    --width PIXELS           likewise
    --guidance-scale X       how closely to follow the prompt
    --true-cfg-scale X       the same, for FLUX, Qwen and emoji
    --negative-prompt TEXT   what to avoid
    --max-sequence-length TOKENS  prompt tokens to read
"""
OUTPUT = """
    --json                   print JSON for programs
    -q --quiet               print errors only
"""
DEVICE = """
    --dtype TYPE             float32, bfloat16 or float16 (bfloat16 on a GPU)
    --device DEVICE          cpu, cuda, cuda:1 ... (a GPU if there is one)
"""
EXCLUDE = """
    --exclude NAMES          components that offload leaves alone, with commas
"""
MEMORY = f"""
    --gpu-memory SIZE        use no more than this, such as 12GiB
    --host-memory SIZE       hold no more weights than this in the host's memory
    --offload SETTING        auto, model (components take turns) or layerwise
{EXCLUDE}"""
QUANTIZATION = """
    --quantization KIND...   int8, fp8, int4, nf4, a .gguf file, or COMPONENT=KIND
    --loss LEVEL             exact, int8 or int4: what the planner may lose (exact)
"""
TRUST = """
    --trust-remote-code      run Python files that come with the model
"""
_MODEL = f"""
    --config FILE            settings by name, as YAML or JSON; options override them
{DEVICE}
    --task TASK              text2img, img2img, inpaint ...: another pipeline of its family
{TRUST}"""
_SPEED = f"""
    --cache SETTING          skip steps: auto, tea_cache, or a tuned file
    --tolerance LEVEL        how much --cache auto may lose: exact, high, fast or a number; alone it means that cache
{MEMORY}
    --parallel SETTING       several GPUs, such as '{{"ulysses_degree": 2}}'
{QUANTIZATION}
    --lora --lora-modules NAME=ADAPTER...  a LoRA adapter: a .safetensors file, a folder, or a hub name; again for more
    --compile-cache FOLDER   keep compiled blocks here for later processes
    --attention NAME         other kernels: cudnn, flash, flash3, sage ...
    --vae-tiling             decode in tiles: less memory, slightly other pixels
    --vae-slicing            decode the images of a batch in turn: less memory
    --vae-channels-last      decode with channels last: faster on most GPUs
    --max-batch N            images to make at once (1)
"""


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> Any:
    """Add the command that a function runs. Its name is the command's, its docstring is the help."""
    help, _, text = (inspect.getdoc(run) or "").partition("\n\n")
    description, _, examples = text.partition("\n\nexamples:\n")
    parser = commands.add_parser(
        run.__name__.lstrip("_"),
        help=help[0].lower() + help[1:].rstrip("."),
        description=textwrap.fill(" ".join(description.split()), 80),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_options(parser: Any, source: str | type[Settings], title: str = "", description: str | None = None) -> Any:
    """Add an option for each setting of a class that has one, or for each line, such as
    `--steps N :num_inference_steps  denoising steps`: its names, how its value is shown (dots for one that may be
    repeated), where it is kept, and its help. Without a value it is a switch. An option that is not given is None, so
    that a file may have it instead; others are text, which `settings_of` reads."""
    group = parser.add_argument_group(title, description) if title else parser
    lines = source if isinstance(source, str) else "\n".join(map(_line, table(source).values()))
    for match in _LINE.finditer(lines):
        action = "store_true" if match["metavar"] is None else "append" if match["more"] else "store"
        more = {name: match[name] for name in ("metavar", "dest") if match[name] is not None}
        group.add_argument(*match["names"].split(), action=action, default=None, help=match["help"], **more)
    return group


def _line(row: Setting) -> str:
    """The line of a setting; of one without an option it is none."""
    text = row.help.partition(". ")[0].rstrip(".").replace("%", "%%")
    shown = f"{row.default:.9g}" if isinstance(row.default, float) else row.default
    default = f" ({shown})" * (row.default not in (None, False, ()))
    value = f"{row.kind.metavar or ''}{'...' * (row.default == ())}"
    return f"{row.option} {value} :{row.name}  {text[0].lower()}{text[1:]}{default}" if row.option else ""


def add_model(parser: Any, what: str = "a built-in model, a folder in diffusers format, or a hub name") -> None:
    """A model is given as an argument or by --model; `model_of` reads it."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=f"{what} (emoji)")
    parser.add_argument("--model", metavar="MODEL", help="the model, as an option instead of an argument")


def model_of(options: argparse.Namespace) -> str | None:
    """The model, whichever way it is given."""
    first: str | None = options.positional_model
    if first is not None and options.model not in (None, first):
        raise SettingError(f"Two models are given: {first!r} and --model {options.model!r}. Give one.", param="model")
    return first or options.model


def add_compile(group: Any) -> None:
    """A switch that may have one word behind it: see `Parser.parse_known_args`."""
    group.add_argument("--compile", nargs="?", metavar="graphs", type=parse_flag, default=None,
                       help="compile the denoiser's blocks; or replay its forwards: --compile graphs")  # fmt: skip


def add_engine_options(parser: Any) -> None:
    add_options(parser, _MODEL, "model")
    add_compile(add_options(parser, _SPEED, "speed and memory", "Settings are a name, JSON, or a file."))
    lines = (f"--{name.replace('_', '-')} {alias.kind.metavar or ''}  see --{alias.setting}"
             for name, alias in ALIASES.items())  # fmt: skip
    add_options(parser, "\n".join(lines), "vllm-omni's names for the same")


def pairs(texts: Iterable[str] | None, option: str, expected: str) -> dict[str, str]:
    """Values by name, from options such as NAME=VALUE."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not (name and sign) or name in found:
            raise SettingError(f"--{option} {text!r}; expected {expected}, each name once.", param=option)
        found[name] = value
    return found


def quantization_of(texts: list[str]) -> Any:
    """The setting that options hold: one kind, JSON, or kinds by component."""
    if len(texts) == 1 and not _COMPONENT.match(texts[0]):
        return texts[0]
    return pairs(",".join(texts).split(","), "quantization", "one KIND, or COMPONENT=KIND,COMPONENT=KIND")


def lora_of(texts: list[str]) -> dict[str, str]:
    """Adapters by name, from options such as pixel=./pixel.safetensors."""
    return pairs(texts, "lora", "NAME=ADAPTER")


_JOINED: dict[str, Callable[[list[str]], Any]] = {"quantization": quantization_of, "lora": lora_of}


def settings_of(options: argparse.Namespace, cls: type[Settings], names: Iterable[str] = ()) -> dict[str, Any]:
    """The settings of a class, or those of some names, that options give."""
    return _read(options, [row for row in table(cls).values() if not names or row.name in names])


def engine_settings(options: argparse.Namespace, names: Iterable[str] = ()) -> dict[str, Any]:
    """Likewise the settings of `Omni`, with vllm-omni's names for them."""
    from ..engine import OmniDiffusionConfig

    aliases = [] if names else [Setting(name, None, each.kind, "", True, None) for name, each in ALIASES.items()]
    return settings_of(options, OmniDiffusionConfig, names) | _read(options, aliases)


def _read(options: argparse.Namespace, rows: Iterable[Setting]) -> dict[str, Any]:
    found = {}
    for row in rows:
        if (value := getattr(options, row.name, None)) is not None:
            value = _JOINED[row.name](value) if row.name in _JOINED else value
            found[row.name] = row.parse(value) if isinstance(value, str) else value
    return found


def in_options(error: BaseException, parser: argparse.ArgumentParser) -> str:
    """An error's message with the options of a command in place of Python's names for its settings. A list of all that
    is known stays as it is: --option takes these names."""
    options = {
        action.dest: next((name for name in action.option_strings if name.startswith("--")), action.option_strings[0])
        for action in parser._actions
        if action.option_strings
    }

    def option(match: re.Match[str]) -> str:
        name, sign = match[1], match[2]
        begins = match.start() == 0 and name == getattr(error, "param", None)  # Elsewhere it may be a mere word.
        return options[name] + " " * len(sign) if name in options and (sign or "_" in name or begins) else match[0]

    text, *known = re.split(r"(?=Known: )", str(error), maxsplit=1)
    return "".join((re.sub(r"(?<![\w-])(\w+)(=?)", option, text), *known))
