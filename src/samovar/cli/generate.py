"""Images, videos and sounds from the shell: `samovar generate`."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import SettingError
from ..core.files import index_file, parse_yaml
from ..media import SUFFIXES, check_suffix, numbered, read_image, read_media, usual_suffix
from . import arguments
from .terminal import Status

if TYPE_CHECKING:
    from ..engine import GenerationResult
    from ..omni import Omni


_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Numbers that YAML takes for text."""
_OUTPUT = """
    --seed N                 the same seed gives the same output
    -n N :num_outputs_per_prompt  how many
    --frames N :num_frames   frames of a video
    --fps X                  frames per second
    --seconds X              duration, in place of --frames
    --option NAME=VALUE...   any argument of the pipeline's call
"""
_INPUTS = """
    --image FILE...          an image; again for several
    --strength X             how much of it to redraw, from 0 to 1
    --mask FILE              what to redraw of it: the white part of this image
    --input NAME=FILE...     last_image, control_image, control_video, video, audio, or any other input of the pipeline
"""


def add_generate(commands: Any) -> None:
    parser = arguments.add_command(commands, _generate)
    parser.add_argument("prompt", help="what to draw")
    arguments.add_model(parser)
    suffixes = "; ".join(" ".join(each) for each in SUFFIXES.values())
    parser.add_argument("-o", "--output", metavar="FILE", help=f"{suffixes} (out.png, out.mp4 or .gif, out.wav)")
    arguments.add_options(parser, arguments.OUTPUT)
    group = arguments.add_options(parser, arguments.IMAGE + _OUTPUT, "image, video or sound")
    text = "how much the adapters of --lora change (1)"
    group.add_argument("--lora-scale", type=float, metavar="X", help=text)
    arguments.add_options(parser, _INPUTS, "what to start from")
    arguments.add_engine_options(parser)


def _generate(options: argparse.Namespace) -> int:
    """Make images, videos or sound.

    Make images, videos or sound from text, images and more with a built-in model, or with any model in diffusers
    format. The built-in `emoji` (the default) knows emoji by name, in three styles: noto, 3d and flat; `motion` lets
    them move. Settings that are not given take the model's defaults.

    examples:
      samovar generate "a grinning cat, 3d style" -o cat.png
      samovar generate "rocket, flat style" --seed 7 -n 4 -o rocket.png      (rocket-1.png, rocket-2.png ...)
      samovar generate "pizza, noto style" --steps 50 --cache auto
      samovar generate "rocket flying up" --model motion -o rocket.mp4
      samovar generate "a samovar" ./flux --gpu-memory 12GiB
      samovar generate "at night" ./flux --task img2img --image day.png --strength 0.6
      samovar generate "a kettle that boils" ./wan --seconds 3 --option guidance_scale_2=3.5 -o kettle.mp4
      torchrun --nproc-per-node 2 -m samovar generate "a samovar" ./flux --parallel ulysses
    """
    from ..engine import OmniDiffusionSamplingParams, is_under_torchrun

    _check_prompt(options.prompt)
    options.model = arguments.model_of(options)
    given = arguments.settings_of(options, OmniDiffusionSamplingParams)
    texts = arguments.pairs(options.option, "option", "NAME=VALUE, such as guidance_scale_2=3.5")
    params = OmniDiffusionSamplingParams(**given, options={name: _read_option(name, texts[name]) for name in texts})
    inputs = _read_inputs(options)
    # All ranks make the output, and the first one writes it.
    is_first = not is_under_torchrun() or os.environ["RANK"] == "0"
    quiet = options.quiet or not is_first
    if options.output is not None and is_first:
        _check_output(options.output, params.num_outputs_per_prompt)
    settings = arguments.engine_settings(options) | {"progress": False}
    with Status("loading the model", quiet) as status:
        from ..omni import Omni

        with Omni(config=options.config, **settings) as omni:
            output = options.output or f"out{usual_suffix(omni.output.kind)}"
            if is_first:
                check_suffix(output, omni.output.kind)
                _check_output(output, params.num_outputs_per_prompt or omni.defaults.num_outputs_per_prompt)
            lora = [{"name": name, "scale": options.lora_scale} for name in settings.get("lora", ())]
            result, steps = _result(omni, options.prompt, params, status, lora=lora, **inputs)
            load_seconds = omni.load_seconds
    if is_under_torchrun():
        import torch.distributed as dist

        dist.destroy_process_group()
    if is_first:
        files = result.save(output)
        if options.json:
            print(json.dumps(_report(files, result, load_seconds), indent=2))
        elif not quiet:
            _print_result(files, result, steps, load_seconds)
    return 0


def _check_prompt(prompt: str) -> None:
    """Refuse a model in place of the prompt."""
    folder = Path(prompt).expanduser()
    is_path = " " not in prompt and (prompt.startswith(("/", "./", "../", "~/")) or ("/" in prompt and folder.is_dir()))
    if is_path or (len(prompt) < 256 and index_file(folder).is_file()):
        raise SettingError(
            f"The prompt {prompt!r} looks like a model. Give it by --model: samovar generate PROMPT --model {prompt}"
        )


def _read_option(name: str, value: str) -> Any:
    """The value of an argument of the pipeline's call, as in YAML."""
    try:
        return float(value) if _FLOAT.fullmatch(value) else parse_yaml(value)
    except ValueError as error:
        raise SettingError(f"--option {name}: {value!r} cannot be read: {error}", param="option") from error


def _read_inputs(options: argparse.Namespace) -> dict[str, Any]:
    """The images, videos and sounds to start from, by name."""
    files = arguments.pairs(options.input, "input", "NAME=FILE, such as last_image=end.png")
    inputs = {name: read_media(file, f"--input {name}") for name, file in files.items()}
    images = [read_image(file, "--image") for file in options.image or ()]
    if images:
        inputs["image"] = images[0] if len(images) == 1 else images
    if options.mask is not None:
        inputs["mask"] = read_image(options.mask, "--mask")
    return inputs


def _result(omni: Omni, prompt: str, params: Any, status: Status, **how: Any) -> tuple[GenerationResult, int | None]:
    """What was made, and in how many steps, which not every model has a default for."""
    from ..engine import Done, Failed, Progress

    steps: int | None = None
    status.update("generating")
    for event in omni.generate(prompt, params, stream=True, **how):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Progress):
            steps = event.num_steps
            number = f"{event.image_index + 1}/{event.num_images}, " if event.num_images > 1 else ""
            status.update(f"{number}step {event.step}/{event.num_steps}")
    assert isinstance(event, Done)  # The last event, if it is not a failure.
    return event.result, steps


def _report(files: list[Path], result: GenerationResult, load_seconds: float) -> dict[str, Any]:
    kind = "videos" if result.videos else "audios" if result.audios else "images"
    return {
        kind: [{"file": str(file), "seed": seed} for file, seed in zip(files, result.seeds, strict=True)],
        "seconds": result.seconds,
        "load_seconds": load_seconds,
        "settings": result.params.given(),
        "notes": result.notes,
        "cache": [stats.to_dict() if hasattr(stats, "to_dict") else str(stats) for stats in result.cache],
    }


def _print_result(files: list[Path], result: GenerationResult, steps: int | None, load_seconds: float) -> None:
    for file, seed in zip(files, result.seeds, strict=True):
        print(f"{file}  seed {seed}")
    what = f"{len(files)} x {steps} steps" if steps else str(len(files))
    print(f"{result.seconds:.1f} s for {what}; {load_seconds:.1f} s to load the weights")
    for stats in result.cache:
        print(stats)
    for note in result.notes:
        print(f"note: {note}")


def _check_output(output: str, count: int | None) -> None:
    """Refuse files that cannot be written, before anything is made."""
    check_suffix(output)
    for file in numbered(output, count or 1):
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise SettingError(f"--output {str(file)!r} cannot be written. Give a file in a folder that is there.")
