"""How is a picture made from the shell? `samovar generate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from .terminal import Status

if TYPE_CHECKING:
    from ..engine import GeneratedPictures

_PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def add_generate(commands: Any) -> None:
    """Make the command known."""
    generate = commands.add_parser(
        "generate",
        help="make pictures from text",
        description="Make a picture from text with the built-in model, or any in diffusers format. The built-in one "
        "knows emoji by name, in three styles: noto, 3d and flat. What is not given is the model's own default.",
        epilog='examples:\n  samovar generate "a grinning cat, 3d style" -o cat.png\n'
        '  samovar generate "rocket, flat style" --seed 7 -n 4 -o rocket.png\n'
        '  samovar generate "pizza, noto style" --steps 50 --cache-backend forecast\n'
        '  samovar generate "a samovar" --model ./flux --gpu-memory 12GiB\n'
        '  torchrun --nproc-per-node 2 -m samovar generate "a samovar" --model ./flux --ulysses-degree 2',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    generate.add_argument("prompt", help="what to draw")
    generate.add_argument("-o", "--output", metavar="FILE", default="out.png", help="PNG, JPEG or WebP (out.png)")
    generate.add_argument("--json", action="store_true", help="print JSON for programs")
    generate.add_argument("-q", "--quiet", action="store_true", help="no progress, only errors")
    _add_picture_options(generate.add_argument_group("the picture"))
    add_model_options(generate.add_argument_group("the model"))
    add_speed_options(generate.add_argument_group("speed and memory"))
    generate.set_defaults(run=_generate)


def _add_picture_options(group: Any) -> None:
    group.add_argument("--steps", type=int, dest="num_inference_steps", metavar="N", help="denoising steps")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same picture")
    group.add_argument("--height", type=int, metavar="PIXELS", help="a multiple of 8 for the built-in model")
    group.add_argument("--width", type=int, metavar="PIXELS", help="likewise")
    group.add_argument("--true-cfg-scale", type=float, metavar="X", help="how closely to follow the prompt")
    group.add_argument("--guidance-scale", type=float, metavar="X", help="the same, for distilled models")
    group.add_argument("--negative-prompt", metavar="TEXT", help="what not to draw")
    group.add_argument("--max-sequence-length", type=int, metavar="TOKENS", help="tokens of text to read")
    group.add_argument("--image", metavar="FILE", help="a picture to start from, for models that edit")
    group.add_argument("--strength", type=float, metavar="X", help="how much of it is drawn anew, from 0 to 1")
    group.add_argument(
        "-n", type=int, dest="num_outputs_per_prompt", metavar="N", help="how many: out-1.png, out-2.png ..."
    )


def add_model_options(group: Any) -> None:
    group.add_argument("--model", help="a built-in model, a folder in diffusers format, or a name of the hub (emoji)")
    group.add_argument("--config", metavar="FILE", help="settings by name as YAML or JSON; what is given here wins")
    group.add_argument("--dtype", metavar="TYPE", help="float32, bfloat16 or float16 (auto)")
    group.add_argument("--device", help="cpu, cuda, cuda:1 ... (a GPU if there is one)")
    _add_yes(group, "--trust-remote-code", "run Python files that come with the model")


def add_speed_options(group: Any) -> None:
    group.add_argument("--cache-backend", metavar="NAME", help="skip steps: forecast, tea_cache or cache_dit (none)")
    group.add_argument(
        "--cache-config", metavar="JSON", help="""its settings, such as '{"rel_l1_thresh": 0.2}', or a file"""
    )
    group.add_argument("--gpu-memory", metavar="SIZE", help="stay within it, such as 12GiB, and offload what must be")
    _add_yes(group, "--enable-cpu-offload", "components take turns on the GPU")
    _add_yes(group, "--enable-layerwise-offload", "blocks stream to the GPU")
    group.add_argument("--ulysses-degree", type=int, metavar="N", help="processes that share heads (1)")
    group.add_argument("--ring-degree", type=int, metavar="N", help="processes that pass keys round (1)")
    group.add_argument("--cfg-parallel-size", type=int, metavar="N", help="processes that share guidance (1)")
    _add_yes(group, "--compile", "compile the blocks of the denoiser: the first picture takes longer")
    group.add_argument("--max-batch", type=int, metavar="N", help="pictures that are made at once (1)")


def _add_yes(group: Any, option: str, text: str) -> None:
    """An option that is None where it is not given, so that a file may say it instead."""
    group.add_argument(option, action="store_true", default=None, help=text)


def _generate(options: argparse.Namespace) -> int:
    from ..engine import OmniDiffusionConfig, OmniDiffusionSamplingParams, is_under_torchrun

    params = OmniDiffusionSamplingParams(**taken(options, OmniDiffusionSamplingParams))
    image = None if options.image is None else _read_picture(options.image)
    # All ranks make the picture, and the first one writes it.
    is_first = not is_under_torchrun() or os.environ["RANK"] == "0"
    quiet = options.quiet or not is_first
    files = _output_files(options.output, params.num_outputs_per_prompt or 1) if is_first else []
    settings = taken(options, OmniDiffusionConfig) | {"progress": Status.is_shown(quiet)}
    if options.cache_config is not None:
        settings["cache_config"] = read_settings("--cache-config", options.cache_config)
    with Status("starting", quiet):
        from ..omni import Omni

        omni = Omni(config=options.config, **settings)
    with omni:
        (result,) = omni.generate(options.prompt, params, image=image)
        load_seconds = omni.load_seconds
    if is_under_torchrun():
        import torch.distributed as dist

        dist.destroy_process_group()
    if is_first:
        for file, image in zip(files, result.images, strict=True):
            image.save(file)
        if options.json:
            print(json.dumps(_report(files, result, load_seconds), indent=2))
        elif not quiet:
            _print_result(files, result, load_seconds)
    return 0


def taken(options: argparse.Namespace, cls: Any) -> dict[str, Any]:
    """The options that were given and are fields of a class."""
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def _report(files: list[Path], result: GeneratedPictures, load_seconds: float) -> dict[str, Any]:
    return {
        "pictures": [{"file": str(file), "seed": seed} for file, seed in zip(files, result.seeds, strict=True)],
        "seconds": result.seconds,
        "load_seconds": load_seconds,
        "settings": result.params.given(),
        "notes": result.notes,
        "cache": [stats.to_dict() if hasattr(stats, "to_dict") else str(stats) for stats in result.cache],
    }


def _print_result(files: list[Path], result: GeneratedPictures, load_seconds: float) -> None:
    for file, seed in zip(files, result.seeds, strict=True):
        print(f"{file}  seed {seed}")
    steps = result.params.num_inference_steps
    print(f"{result.seconds:.1f} s for {len(files)} x {steps} steps; {load_seconds:.1f} s to load the weights")
    for stats in result.cache:
        print(stats)
    for note in result.notes:
        print(f"note: {note}")


def read_settings(option: str, text: str) -> dict[str, Any] | str:
    """Settings that are given on the command line, as JSON or as a file."""
    from ..engine.sources import read_name_or_json

    try:
        value: dict[str, Any] | str = read_name_or_json(text)
        return value
    except ValueError as error:
        raise SettingError(f"{option} {text!r} cannot be read: {error}") from error


def _read_picture(file: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as picture:
            picture.load()
            return picture
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise SettingError(f"--image {file!r} is no picture that can be read: {error}") from error


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
