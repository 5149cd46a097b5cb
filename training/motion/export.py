"""Turns the trained weights into a WanPipeline folder, and files small enough to carry away."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import checkpoint
from training.export import check_sizes, edit_json, write_notices
from training.models import part_weights, set_weights
from training.motion import models
from training.motion.clips import FRAMES, SIDE
from training.motion.settings import MotionConfig

LARGEST = 24 * 2**20
PART = 15 * 2**20
RATE = 12  # frames per second
STEPS, GUIDANCE, SHIFT = 24, 3.0, 2.0  # until the evaluation chooses better ones


def defaults(config: MotionConfig, guidance: float = GUIDANCE) -> dict[str, Any]:
    """What `samovar.json` says."""
    return {
        "height": SIDE, "width": SIDE, "num_frames": FRAMES, "num_inference_steps": STEPS,
        "guidance_scale": guidance, "negative_prompt": "", "max_sequence_length": config.text_tokens,
    }  # fmt: skip


def export(
    out: Path, config: MotionConfig, vae: dict[str, Tensor], flow: dict[str, Tensor], scale: tuple[Tensor, Tensor],
    tokenizer: Any, sources: dict[str, Any],
) -> int:  # fmt: skip
    """Write the pipeline folder and return its size in bytes. `scale`: the latents' mean and deviation."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    parts: dict[str, Any] = {
        "vae": models.build_vae(config),
        "transformer": models.build_transformer(config),
        "text_encoder": models.build_text_encoder(config, tokenizer),
    }
    mean, std = (value.flatten().tolist() for value in scale)
    parts["vae"].register_to_config(latents_mean=mean, latents_std=std)
    weights = {"vae": vae, **{part: part_weights(flow, part) for part in models.PARTS}}
    every = {f"{part}.{k}": v.detach().float().cpu() for part, some in weights.items() for k, v in some.items()}
    dtype = min((torch.float16, torch.bfloat16), key=lambda kind: checkpoint.rounding(every, kind))
    for part, module in parts.items():
        set_weights(module, weights[part])
        module.to(dtype).eval()
    if out.exists():
        shutil.rmtree(out)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT)
    WanPipeline(**parts, tokenizer=tokenizer, scheduler=scheduler).save_pretrained(out, max_shard_size="14MB")
    edit_json(out / "text_encoder" / "config.json", dtype="float32")  # loads in the type its config names
    edit_json(out / "model_index.json", tokenizer=["transformers", "T5TokenizerFast"])
    edit_json(out / "tokenizer" / "tokenizer_config.json", tokenizer_class="T5TokenizerFast")
    write_defaults(out, defaults(config), SHIFT)
    write_notices(out, {"sources": sources})
    size = check_sizes(out)
    if size > LARGEST:
        raise ValueError(f"{out} has {size} bytes, over {LARGEST}: make the model smaller")
    return size


def write_defaults(out: Path, values: dict[str, Any], shift: float) -> None:
    """What the engine takes from the folder: the call's arguments, the frame rate and the scheduler's shift."""
    (out / "samovar.json").write_text(json.dumps({**values, "fps": RATE}, indent=2) + "\n")
    edit_json(out / "scheduler" / "scheduler_config.json", shift=shift)


def pack(folder: Path, out: Path) -> list[Path]:
    """The folder as `model.tar.0`, `model.tar.1`, ... in `out`; `cat model.tar.* | tar x` unpacks them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, arcname=folder.name)
    data = buffer.getvalue()
    written = []
    for number, start in enumerate(range(0, len(data), PART)):
        path = out / f"model.tar.{number}"
        path.write_bytes(data[start : start + PART])
        written.append(path)
    return written
