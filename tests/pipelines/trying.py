"""Tries what works with a pipeline: it is loaded, run, cached and offloaded, and its output saved and read back."""

from __future__ import annotations

import inspect
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from samovar import Omni
from samovar.media import Audio, Video, read_media

from .builder import Recipe, build
from .standins import standins

CHECKS = ("loaded", "runs", "saved", "offloaded", "cached")
STEPS = 6
CACHE = {"backend": "tea_cache", "rel_l1_thresh": 100.0, "min_steps": 2}


NEEDED = json.loads((Path(__file__).parent / "needed.json").read_text())
"""By pipeline, what it fails without although its signature has a default for it."""


@dataclass
class Row:
    """One pipeline."""

    name: str
    makes: str = ""
    works: dict[str, bool] = field(default_factory=dict)
    problem: str = ""


def media(name: str, width: int, height: int) -> Any:
    """A tiny input for an argument."""
    if "audio" in name:
        return Audio(np.sin(np.linspace(0, 20, 32, dtype=np.float32))[None].repeat(2, 0), 8)
    ramp = np.linspace(0, 255, height * width * 3).reshape(height, width, 3).astype(np.uint8)
    if "video" in name or name in ("conditioning_frames", "controls"):
        return [Image.fromarray(np.roll(ramp, 3 * number, 1)) for number in range(9)]
    if "mask" in name:
        return Image.fromarray((ramp[..., 0] > 100).astype(np.uint8) * 255)
    return Image.fromarray(ramp)


def call_of(omni: Omni, recipe: Recipe) -> dict[str, Any]:
    """The arguments of `generate` for a tiny output."""
    facts = omni._open().facts  # type: ignore[union-attr]
    size = {"height": 32, "width": 48}
    wish: dict[str, Any] = {"seed": 3, "num_inference_steps": STEPS, **size, "max_sequence_length": 16}
    wish["negative_prompt"] = "a dog"
    if facts.output.kind == "video" and facts.output.frames_argument:
        wish["num_frames"] = 9
    wish |= recipe.call
    wish = {name: value for name, value in wish.items() if name in {*facts.takes, "seed", "num_frames", *recipe.call}}
    sides = wish.get("width", 48) or 48, wish.get("height", 32) or 32
    names = (*facts.inputs.needs, *NEEDED.get(facts.class_name, ()), *recipe.inputs)
    needed = {name: media(name, *sides) for name in names if name not in wish}
    if facts.inputs.mask:
        needed |= {name: media(name, *sides) for name in ("image", "mask_image")}
    return {name: value for name, value in (wish | needed).items() if value is not None or name in recipe.call}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Audio):
        return np.array_equal(one.samples, other.samples)
    if isinstance(one, Video):
        return np.array_equal(one.frames, other.frames) and (one.audio is None or same(one.audio, other.audio))
    return np.array_equal(np.asarray(one), np.asarray(other))


def try_pipeline(cls: Any, recipe: Recipe) -> Row:
    """All that is checked; the first thing that goes wrong ends it and is the row's problem."""
    row = Row(cls.__name__)
    prompt = recipe.prompt if "prompt" in inspect.signature(cls.__call__).parameters else ""
    how: dict[str, Any] = {"device": "cpu", "dtype": recipe.dtype, "progress": False}
    with tempfile.TemporaryDirectory() as folder, standins():
        step = "built"
        try:
            pipe = build(cls, recipe)
            if getattr(pipe, "safety_checker", None) is not None:  # A stand-in, which cannot be saved.
                pipe.register_modules(safety_checker=None)
            pipe.save_pretrained(folder)
            step = "loaded"
            with Omni(folder, **how) as omni:
                row.makes, row.works[step] = str(omni.output), True
                step = "runs"
                call = call_of(omni, recipe)
                torch.manual_seed(0)  # Some encode their input with noise of no generator.
                (plain,) = omni.generate(prompt, **call)
                row.works[step] = bool(plain.outputs)
            step = "saved"
            row.works[step] = _is_read_back(plain, Path(folder))
            step = "offloaded"
            with Omni(folder, offload="layerwise", **how) as omni:
                torch.manual_seed(0)
                row.works[step] = same(omni.generate(prompt, **call)[0].outputs[0], plain.outputs[0])
            step = "cached"
            with Omni(folder, cache=CACHE, **how) as omni:
                stats = omni.generate(prompt, **call)[0].cache[0]
                row.works[step] = stats.skipped > 0
                row.problem = "" if stats.skipped else f"cached: no step was skipped: {stats}"
        except Exception as error:  # Whatever it is, it is the row's.
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            row.problem = f"{step}: {f'{recipe.cause} ({said})' if recipe.cause else said}"
    return row


def _is_read_back(result: Any, folder: Path) -> bool:
    suffix = {"Video": ".mp4", "Audio": ".wav"}.get(type(result.outputs[0]).__name__, ".png")
    (file, *_) = result.save(folder / f"out{suffix}")
    again, made = read_media(file, "file"), result.outputs[0]
    if isinstance(made, Video):
        return again.frames.shape == made.frames.shape
    if isinstance(made, Audio):
        return again.samples.shape == made.samples.shape and again.rate == made.rate
    return same(again.convert(made.mode), made)
