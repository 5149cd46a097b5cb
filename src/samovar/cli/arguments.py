"""Which options do several commands share, and how are their values read?"""

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
from ..core.settings import parse_name_or_json

_COMPONENT = re.compile(r"(\w+)=(.+)")


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


def add_output_options(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")


def add_image_options(group: Any) -> None:
    group.add_argument("--steps", type=int, dest="num_inference_steps", metavar="N", help="denoising steps")
    group.add_argument("--height", type=int, metavar="PIXELS", help="a multiple of 8 for the built-in model")
    group.add_argument("--width", type=int, metavar="PIXELS", help="likewise")
    group.add_argument("--guidance-scale", type=float, metavar="X", help="how closely to follow the prompt")
    group.add_argument("--true-cfg-scale", type=float, metavar="X", help="the same, for FLUX, Qwen and emoji")
    group.add_argument("--negative-prompt", metavar="TEXT", help="what to avoid")
    group.add_argument("--max-sequence-length", type=int, metavar="TOKENS", help="prompt tokens to read")


def add_device_options(group: Any) -> None:
    group.add_argument("--dtype", metavar="TYPE", help="float32, bfloat16 or float16 (bfloat16 on a GPU)")
    group.add_argument("--device", help="cpu, cuda, cuda:1 ... (a GPU if there is one)")


def add_memory_options(group: Any) -> None:
    group.add_argument("--gpu-memory", metavar="SIZE", help="use no more than this, such as 12GiB")
    group.add_argument("--host-memory", metavar="SIZE", help="hold no more weights than this in the host's memory")
    group.add_argument("--offload", metavar="SETTING", help="auto, model (components take turns) or layerwise")
    add_exclude(group)


def add_engine_options(parser: Any) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--config", metavar="FILE", help="settings by name, as YAML or JSON; options override them")
    add_device_options(group)
    group.add_argument(
        "--task", metavar="TASK", help="text2img, img2img, inpaint, controlnet ...: another pipeline of its family"
    )
    group.add_argument(
        "--controlnet", action="append", metavar="FOLDER", help="a ControlNet, or a hub name; again for more"
    )
    add_switch(group, "--trust-remote-code", "run Python files that come with the model")
    group = parser.add_argument_group("speed and memory", "Settings are a name, JSON, or a file.")
    group.add_argument("--cache", metavar="SETTING", help="skip steps: auto, forecast, tea_cache, or a tuned file")
    group.add_argument("--tolerance", metavar="X",
                       help="how much --cache auto may lose: exact, high, fast or a number; alone it means that cache"
    )  # fmt: skip
    add_memory_options(group)
    group.add_argument("--parallel", metavar="SETTING", help="""several GPUs, such as '{"ulysses_degree": 2}'""")
    add_quantization(group)
    group.add_argument("--lora", "--lora-modules", action="append", dest="lora", metavar="NAME=ADAPTER",
                       help="a LoRA adapter: a .safetensors file, a folder, or a hub name; again for more")  # fmt: skip
    group.add_argument("--lora-memory", metavar="SIZE", help="of adapters that stay loaded, such as 2GiB (all)")
    group.add_argument("--compile", action=SwitchOrWord, words=("graphs",), default=None,
                       help="compile the denoiser's blocks; or replay its forwards: --compile graphs")  # fmt: skip
    group.add_argument("--compile-cache", metavar="FOLDER", help="keep compiled blocks here for later processes")
    group.add_argument("--attention", metavar="NAME", help="other kernels: cudnn, flash, flash3, sage ...")
    add_switch(group, "--vae-tiling", "decode in tiles: less memory, slightly other pixels")
    add_switch(group, "--vae-slicing", "decode the images of a batch in turn: less memory")
    add_switch(group, "--vae-channels-last", "decode with channels last: faster on most GPUs")
    group.add_argument("--max-batch", type=int, metavar="N", help="images to make at once (1)")
    group = parser.add_argument_group("vllm-omni's names for the same")
    for name, alias in ALIASES.items():
        option, text = f"--{name.replace('_', '-')}", f"see --{alias.setting}"
        if alias.kind == "bool":
            add_switch(group, option, text)
        else:
            group.add_argument(option, type=int if alias.kind == "int" else str, metavar="VALUE", help=text)


def add_exclude(group: Any) -> None:
    group.add_argument("--exclude", metavar="NAMES", help="components that offload leaves alone, with commas")


def add_quantization(group: Any) -> None:
    kinds = "int8, fp8, int4, nf4, a .gguf file, or COMPONENT=KIND"
    group.add_argument("--quantization", action="append", metavar="KIND", help=kinds)
    group.add_argument("--loss", metavar="LEVEL", help="exact, int8 or int4: what the planner may lose (exact)")


def quantization_of(texts: list[str]) -> Any:
    """The setting that options hold: one kind, JSON, or kinds by component."""
    if len(texts) == 1 and not _COMPONENT.match(texts[0]):
        return read_setting("quantization", texts[0])
    texts = [part for text in texts for part in (text.split(",") if _COMPONENT.match(text) else [text])]
    whole = [text for text in texts if not _COMPONENT.match(text)]
    if whole:
        raise SettingError(
            f"quantization={whole[0]!r} is given beside others. Say for each which component it is for, such as "
            f"transformer={whole[0]}.",
            param="quantization",
        )
    kinds: dict[str, str] = {}
    for name, kind in (match.groups() for text in texts if (match := _COMPONENT.match(text))):
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


def add_switch(group: Any, option: str, text: str, **more: Any) -> None:
    """An option that is None unless given, so that a file may have it instead."""
    group.add_argument(option, action="store_true", default=None, help=text, **more)


class SwitchOrWord(argparse.Action):
    """An option that is a switch, or has one of a few words behind it."""

    def __init__(self, words: Sequence[str], metavar: str | None = None, **more: Any) -> None:
        super().__init__(nargs="?", const=True, metavar="|".join(words), **more)
        self._words = words

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, {"true": True, "false": False}.get(str(values).lower(), values))

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


def engine_settings(options: argparse.Namespace, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The settings of `Omni` that were given, or those of some names."""
    from ..engine import OmniDiffusionConfig

    settings = given(options, OmniDiffusionConfig) | given(options, ALIASES) if names is None else given(options, names)
    if "quantization" in settings:
        settings["quantization"] = quantization_of(settings["quantization"])
    if "lora" in settings:
        settings["lora"] = lora_of(settings["lora"])
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
