"""Tiny modular pipelines, put together of the parts of the tiny pipelines that are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers

from . import _build, images, videos

_MAKERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "flux": ("FluxModularPipeline", images.flux),
    "qwen": ("QwenImageModularPipeline", images.qwen_image),
    "sd3": ("StableDiffusion3ModularPipeline", images.sd3),
    "wan": ("Wan22ModularPipeline", videos.wan),
    "z-image": ("ZImageModularPipeline", images.z_image),
}
CALLS: dict[str, dict[str, Any]] = {
    "flux": {"height": 16, "width": 32, "max_sequence_length": 8},
    "qwen": {"height": 16, "width": 32, "negative_prompt": "a dog"},
    "sd3": {"height": 16, "width": 32, "max_sequence_length": 20, "negative_prompt": "a dog"},
    "wan": {"height": 32, "width": 48, "num_frames": 5, "max_sequence_length": 16, "negative_prompt": "a dog"},
    "z-image": {"height": 32, "width": 48, "max_sequence_length": 20, "negative_prompt": "a dog"},
}
"""The arguments of a small call of each."""


def tiny_modular(name: str, blocks: Any = None, **more: Any) -> Any:
    """A modular pipeline of a name in `CALLS`, with blocks of its own or those of diffusers, and more components."""
    class_name, make = _MAKERS[name]
    cls = getattr(diffusers, class_name)
    pipe = cls(blocks or getattr(diffusers, cls.default_blocks_name)())
    parts = {part: value for part, value in _build(make, 0).components.items() if value is not None}
    pipe.update_components(**{part: value for part, value in (parts | more).items() if part in pipe.component_names})
    return pipe


def save_modular(pipe: Any, folder: Path) -> Path:
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


def without_decoder(pipe: Any) -> Any:
    """The blocks of a pipeline but the last, which makes images of latents."""
    from diffusers.modular_pipelines import SequentialPipelineBlocks

    rest = dict(list(pipe.blocks.sub_blocks.items())[:-1])
    return SequentialPipelineBlocks.from_blocks_dict(rest)
