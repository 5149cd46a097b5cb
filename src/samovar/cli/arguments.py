"""Options of commands: declared as lines of text or made from tables of settings, and read in one way."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..core.aliases import ALIASES
from ..core.errors import SettingError
from ..core.files import brief, is_file_name, read_mapping, read_settings
from ..core.settings import Setting, Settings, parse_name_or_json, table

_LINE = re.compile(
    r"(?P<names>(?:-\S+ )+)(?:(?P<metavar>[^\s:]+?)(?P<more>\.\.\.)?)?(?: ?:(?P<dest>\w+))?\s\s+(?P<help>.*)"
)
_TYPES = dict.fromkeys(("N", "PIXELS", "TOKENS"), int) | dict.fromkeys(("X", "S", "DB"), float)
"""Types of values by how the help shows them; others are text."""
_COMPONENT = re.compile(r"(\w+)=(.+)")
_SWITCHES: dict[str, Any] = {"true": True, "false": False}

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
    --task TASK              text2img, img2img, inpaint, controlnet ...: another pipeline of its family
    --controlnet FOLDER...   a ControlNet, or a hub name; again for more
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
        run.__name__.lstrip("_").replace("_", "-"),
        help=help[0].lower() + help[1:].rstrip("."),
        description=textwrap.fill(" ".join(description.split()), 80),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_options(parser: Any, lines: str, title: str = "", description: str | None = None) -> Any:
    """Add an option for each line, such as `--steps N :num_inference_steps  denoising steps`: its names, how its value
    is shown (dots for one that may be repeated), where it is kept, and its help. Without a value it is a switch. An
    option that is not given is None, so that a file may have it instead."""
    group = parser.add_argument_group(title, description) if title else parser
    for line in filter(None, map(str.strip, lines.splitlines())):
        match = _LINE.fullmatch(line)
        assert match is not None, line
        more: dict[str, Any] = {"help": match["help"], "default": None}
        if match["dest"] is not None:
            more["dest"] = match["dest"]
        if match["metavar"] is None:
            more["action"] = "store_true"
        else:
            kind = _TYPES.get(match["metavar"], str)
            more |= {"metavar": match["metavar"], "type": kind, "action": "append" if match["more"] else "store"}
        group.add_argument(*match["names"].split(), **more)
    return group


def add_settings(parser: Any, cls: type[Settings], title: str) -> None:
    """Add an option for each setting of a class that has one."""
    group = parser.add_argument_group(title)
    for row in [row for row in table(cls).values() if row.option is not None]:
        text = row.help.partition(". ")[0].rstrip(".").replace("%", "%%")
        text = f"{text[0].lower()}{text[1:]}" + f" ({_shown(row.default)})" * (row.default not in (None, False, ()))
        shown: dict[str, Any] = {"metavar": row.kind.metavar, "action": "append" if row.default == () else "store"}
        shown = shown if row.kind.metavar else {"action": "store_true"}
        group.add_argument(row.option, dest=row.name, default=None, help=text, **shown)


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def settings_of(options: argparse.Namespace, cls: type[Settings]) -> dict[str, Any]:
    """The settings of a class that options give."""
    return {name: _parsed(table(cls)[name], value) for name, value in given(options, table(cls)).items()}


def _parsed(row: Setting, value: Any) -> Any:
    return row.parse(value) if isinstance(value, str) else row.read(value)


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


def add_engine_options(parser: Any) -> None:
    add_options(parser, _MODEL, "model")
    group = add_options(parser, _SPEED, "speed and memory", "Settings are a name, JSON, or a file.")
    group.add_argument("--compile", action=SwitchOrWord, words=("graphs",), default=None,
                       help="compile the denoiser's blocks; or replay its forwards: --compile graphs")  # fmt: skip
    lines = (f"--{name.replace('_', '-')} {alias.kind.metavar or ''}  see --{alias.setting}"
             for name, alias in ALIASES.items())  # fmt: skip
    add_options(parser, "\n".join(lines), "vllm-omni's names for the same")


def quantization_of(texts: list[str]) -> Any:
    """The setting that options hold: one kind, JSON, or kinds by component."""
    if len(texts) == 1 and not _COMPONENT.match(texts[0]):
        return read_setting("quantization", texts[0])
    texts = [part for text in texts for part in (text.split(",") if _COMPONENT.match(text) else [text])]
    kinds: dict[str, str] = {}
    for text in texts:
        match = _COMPONENT.match(text)
        if match is None:
            message = f"quantization={text!r} is given beside others. Say for each which component it is for, such as"
            raise SettingError(f"{message} transformer={text}.", param="quantization")
        name, kind = match.groups()
        if name in kinds:
            message = f"quantization={name}={kind}, and {name}={kinds[name]} is given too. Give each component once."
            raise SettingError(message, param="quantization")
        kinds[name] = kind
    return kinds


def lora_of(texts: list[str]) -> dict[str, str]:
    """Adapters by name, from options such as pixel=./pixel.safetensors."""
    adapters: dict[str, str] = {}
    for text in texts:
        name, sign, source = text.partition("=")
        if not (name and sign and source) or name in adapters:
            problem = "is given twice" if name in adapters else "has no name"
            raise SettingError(f"--lora {text!r} {problem}. Expected NAME=ADAPTER, each name once.", param="lora")
        adapters[name] = source
    return adapters


class SwitchOrWord(argparse.Action):
    """An option that is a switch, or has one of a few words behind it."""

    def __init__(self, words: Sequence[str], metavar: str | None = None, **more: Any) -> None:
        super().__init__(nargs="?", const=True, metavar="|".join(words), **more)
        self._words = words

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, _SWITCHES.get(str(values).lower(), values))

    def joined(self, words: Sequence[str]) -> list[str]:
        """The words of a command line, with the value of this option in one of them."""
        found: list[str] = []
        for word in words:
            if found and found[-1] in self.option_strings and word in self._words:
                found[-1] += f"={word}"
            else:
                found.append(word)
        return [f"{word}=true" if word in self.option_strings else word for word in found]


def given(options: argparse.Namespace, names: Iterable[str] | type) -> dict[str, Any]:
    """The options that were given, of these names or of the fields of this class."""
    if isinstance(names, type):
        names = [field.name for field in dataclasses.fields(names)]
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


_READERS: dict[str, Callable[[list[str]], Any]] = {"quantization": quantization_of, "lora": lora_of}


def engine_settings(options: argparse.Namespace, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The settings of `Omni` that were given, or those of some names."""
    from ..engine import OmniDiffusionConfig

    settings = given(options, OmniDiffusionConfig) | given(options, ALIASES) if names is None else given(options, names)
    settings |= {name: read(settings[name]) for name, read in _READERS.items() if name in settings}
    return {name: read_setting(name, v) if isinstance(v, str) else v for name, v in settings.items()}


def read_setting(name: str, text: str) -> Any:
    """A name or a file as it is, or the settings that JSON text holds."""
    try:
        return parse_name_or_json(text)
    except ValueError as error:
        raise SettingError(f"{name}={brief(text)} cannot be read: {error}", param=name) from error


def use_saved_steps(options: argparse.Namespace, caches: Iterable[str | None]) -> None:
    """Take the number of steps from a saved cache setting, unless it is given. A schedule is for one number only."""
    for file in filter(is_file_name, (cache for cache in caches if not str(cache).startswith("{"))):
        content = read_mapping(str(file), "cache")
        steps, wanted = content.get("num_inference_steps"), options.num_inference_steps
        if steps is not None and wanted is None:
            options.num_inference_steps = steps
            if not options.quiet:
                print(f"samovar: {steps} steps, as saved in {file}", file=sys.stderr)
        elif steps not in (None, wanted) and "schedule" in read_settings(str(file), "cache"):
            raise SettingError(
                f"num_inference_steps={wanted}, but {file!r} has a schedule for {steps} steps. Leave it out, or "
                "tune again with this number.",
                param="num_inference_steps",
            )


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
