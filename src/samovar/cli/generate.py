"""How are images made from the shell? `samovar generate`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from . import arguments
from .terminal import Status

if TYPE_CHECKING:
    from ..engine import GenerationResult
    from ..omni import Omni

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def add_generate(commands: Any) -> None:
    parser = arguments.add_command(commands, _generate)
    parser.add_argument("prompt", help="what to draw")
    arguments.add_model(parser)
    parser.add_argument("-o", "--output", metavar="FILE", default="out.png", help="PNG, JPEG or WebP (out.png)")
    arguments.add_output_options(parser)
    group = parser.add_argument_group("image")
    arguments.add_image_options(group)
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same image")
    group.add_argument("--image", metavar="FILE", help="an image to start from, for models that edit")
    group.add_argument("--strength", type=float, metavar="X", help="how much of that image to redraw, from 0 to 1")
    group.add_argument("--lora-scale", type=float, metavar="X", help="how much the adapters of --lora change (1)")
    group.add_argument("-n", type=int, dest="num_outputs_per_prompt", metavar="N", help="how many images")
    arguments.add_engine_options(parser)


def _generate(options: argparse.Namespace) -> int:
    """Make images from text.

    Make images from text with the built-in model, or with any model in diffusers format. The built-in one knows
    emoji by name, in three styles: noto, 3d and flat. Settings that are not given take the model's defaults.

    examples:
      samovar generate "a grinning cat, 3d style" -o cat.png
      samovar generate "rocket, flat style" --seed 7 -n 4 -o rocket.png      (rocket-1.png, rocket-2.png ...)
      samovar generate "pizza, noto style" --steps 50 --cache forecast
      samovar generate "a samovar" ./flux --gpu-memory 12GiB
      torchrun --nproc-per-node 2 -m samovar generate "a samovar" ./flux --parallel ulysses
    """
    from ..engine import OmniDiffusionSamplingParams, is_under_torchrun

    _check_prompt(options.prompt)
    options.model = arguments.model_of(options)
    arguments.use_saved_steps(options, [options.cache, options.cache_config])
    params = OmniDiffusionSamplingParams(**arguments.given(options, OmniDiffusionSamplingParams))
    image = None if options.image is None else _read_image(options.image)
    # All ranks make the image, and the first one writes it.
    is_first = not is_under_torchrun() or os.environ["RANK"] == "0"
    quiet = options.quiet or not is_first
    files = _output_files(options.output, params.num_outputs_per_prompt or 1) if is_first else []
    settings = arguments.engine_settings(options) | {"progress": False}
    with Status("loading the model", quiet) as status:
        from ..omni import Omni

        with Omni(config=options.config, **settings) as omni:
            lora = [{"name": name, "scale": options.lora_scale} for name in settings.get("lora", ())]
            result = _result(omni, options.prompt, params, status, image=image, lora=lora)
            load_seconds = omni.load_seconds
    if is_under_torchrun():
        import torch.distributed as dist

        dist.destroy_process_group()
    if is_first:
        for file, made in zip(files, result.images, strict=True):
            made.save(file)
        if options.json:
            print(json.dumps(_report(files, result, load_seconds), indent=2))
        elif not quiet:
            _print_result(files, result, load_seconds)
    return 0


def _check_prompt(prompt: str) -> None:
    """Refuse a model in place of the prompt."""
    folder = Path(prompt).expanduser()
    is_path = " " not in prompt and (prompt.startswith(("/", "./", "../", "~/")) or ("/" in prompt and folder.is_dir()))
    if is_path or (len(prompt) < 256 and (folder / "model_index.json").is_file()):
        raise SettingError(
            f"The prompt {prompt!r} looks like a model. Give it by --model: samovar generate PROMPT --model {prompt}"
        )


def _result(omni: Omni, prompt: str, params: Any, status: Status, **how: Any) -> GenerationResult:
    from ..engine import Done, Failed, Progress

    status.update("generating")
    for event in omni.generate(prompt, params, stream=True, **how):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Progress):
            number = f"image {event.image_index + 1}/{event.num_images}, " if event.num_images > 1 else ""
            status.update(f"{number}step {event.step}/{event.num_steps}")
    assert isinstance(event, Done)  # The last event, if it is not a failure.
    return event.result


def _report(files: list[Path], result: GenerationResult, load_seconds: float) -> dict[str, Any]:
    return {
        "images": [{"file": str(file), "seed": seed} for file, seed in zip(files, result.seeds, strict=True)],
        "seconds": result.seconds,
        "load_seconds": load_seconds,
        "settings": result.params.given(),
        "notes": result.notes,
        "cache": [stats.to_dict() if hasattr(stats, "to_dict") else str(stats) for stats in result.cache],
    }


def _print_result(files: list[Path], result: GenerationResult, load_seconds: float) -> None:
    for file, seed in zip(files, result.seeds, strict=True):
        print(f"{file}  seed {seed}")
    steps = result.params.num_inference_steps
    print(f"{result.seconds:.1f} s for {len(files)} x {steps} steps; {load_seconds:.1f} s to load the weights")
    for stats in result.cache:
        print(stats)
    for note in result.notes:
        print(f"note: {note}")


def _read_image(file: str) -> Any:
    from PIL import Image

    try:
        with Image.open(file) as image:
            image.load()
            return image
    except (OSError, Image.DecompressionBombError) as error:
        raise SettingError(f"--image {file!r} cannot be read: {error}", param="image") from error


def _output_files(output: str, count: int) -> list[Path]:
    """The files to write, checked before any image is made: cat.png, or cat-1.png, cat-2.png ..."""
    file = Path(output).expanduser()
    if file.suffix.lower() not in _SUFFIXES:
        raise SettingError(f"--output {output!r} must end in {', '.join(_SUFFIXES)}.")
    if not file.parent.is_dir():
        raise SettingError(f"--output {output!r}: there is no folder {str(file.parent)!r}. Create it first.")
    files = [file] if count == 1 else [file.with_stem(f"{file.stem}-{number}") for number in range(1, count + 1)]
    for file in files:
        was_there = file.exists()
        try:
            file.open("ab").close()
        except OSError as error:
            raise SettingError(f"--output {str(file)!r} cannot be written: {error.strerror}.") from error
        if not was_there:
            file.unlink()
    return files
