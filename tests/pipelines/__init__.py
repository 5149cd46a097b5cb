"""Whole pipelines that are tried: real diffusers classes, tiny, with random weights, on a CPU.

`PIPELINES` has one for each way in which a pipeline drives its denoiser: with both branches in one call
or each in its own, saying which branch it is or not, with one denoiser or two, with a ControlNet.
Importing this package imports no model: `TinyPipeline.build()` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch

from . import images, videos

PROMPT, NEGATIVE = "a cat", "a dog"


@dataclass(frozen=True, eq=False)
class TinyPipeline:
    """One pipeline, and how it is called so that it has two branches."""

    name: str
    build: Callable[[int], Any]
    """A new pipeline with the weights of a seed."""
    settings: dict[str, Any]
    """The arguments of a call, less those of `run`."""
    cfg: Literal["separate", "fused", "none"]
    """Whether the branches are calls of their own, or halves of one batch, or there is only one."""
    denoisers: tuple[str, ...] = ("transformer",)
    """The components that denoise, in the order in which they run."""

    def run(self, pipe: Any, steps: int = 4, seed: int = 0, **overrides: Any) -> torch.Tensor:
        """The latents that a call of the pipeline gives; pixels with `output_type="pt"`. Only this seed counts."""
        call = {"output_type": "latent", "num_inference_steps": steps, **self.settings, **overrides}
        generator = torch.Generator().manual_seed(seed)
        result: torch.Tensor = pipe(generator=generator, return_dict=False, **self.arguments(pipe, call))[0]
        return result

    def arguments(self, pipe: Any, call: dict[str, Any]) -> dict[str, Any]:
        """The call in the words of this pipeline."""
        return call


class _EmbeddedNegative(TinyPipeline):
    """A pipeline that has a negative branch, but takes no negative prompt other than as embeddings."""

    def arguments(self, pipe: Any, call: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in call.items() if name != "negative_prompt"}
        encoding = {name: call[name] for name in ("max_sequence_length", "text_encoder_out_layers")}
        with torch.no_grad():
            embeds, _ = pipe.encode_prompt(call["negative_prompt"], **encoding)
        return rest | {"negative_prompt_embeds": embeds}


def tiny_flux_pipeline(seed: int = 0) -> Any:
    """A FluxPipeline of 16x16 pictures: two dual and three single blocks, two text encoders and a VAE."""
    return _build(images.flux, seed)


def _build(make: Callable[[], Any], seed: int) -> Any:
    """The pipeline in float32 and eval mode, with nothing left at zero or uninitialised, as `zoo.Case.build` does."""
    with torch.random.fork_rng(devices=[]), mock.patch("torch.empty", torch.zeros):
        torch.manual_seed(seed)
        pipe = make()
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval()
                for parameter in component.parameters():
                    if not parameter.detach().any():
                        torch.nn.init.normal_(parameter, std=0.1)
    pipe.set_progress_bar_config(disable=True)
    return pipe


_PROMPTS = {"prompt": PROMPT, "negative_prompt": NEGATIVE}
_FLUX = _PROMPTS | {"true_cfg_scale": 2.0, "height": 16, "width": 24, "max_sequence_length": 8}
_IMAGE = _PROMPTS | {"guidance_scale": 2.0, "height": 16, "width": 24, "max_sequence_length": 20}
_CONTROL = torch.linspace(0.0, 1.0, 3 * 16 * 24).reshape(1, 3, 16, 24)

PIPELINES: dict[str, TinyPipeline] = {
    pipeline.name: pipeline
    for pipeline in (
        TinyPipeline("flux", partial(_build, images.flux), _FLUX, "separate"),
        TinyPipeline(
            "flux-controlnet",
            partial(_build, images.flux_controlnet),
            _FLUX | {"control_image": _CONTROL, "controlnet_conditioning_scale": 1.0},
            "separate",
        ),
        TinyPipeline(
            "qwen-image",
            partial(_build, images.qwen_image),
            _PROMPTS | {"true_cfg_scale": 2.0, "height": 16, "width": 24},
            "separate",
        ),
        _EmbeddedNegative(
            "flux2-klein",
            partial(_build, images.flux2_klein),
            _IMAGE | {"text_encoder_out_layers": (1, 2, 3)},
            "separate",
        ),
        TinyPipeline("sd3", partial(_build, images.sd3), _IMAGE, "fused"),
        TinyPipeline(
            "wan",
            partial(_build, videos.wan),
            _PROMPTS | {"guidance_scale": 2.0, "height": 32, "width": 48, "num_frames": 9, "max_sequence_length": 16},
            "separate",
            denoisers=("transformer", "transformer_2"),
        ),
        TinyPipeline(
            "z-image",
            partial(_build, images.z_image),
            _IMAGE | {"height": 24, "width": 32},  # Else the image would be padded to the length of the text.
            "fused",
        ),
        TinyPipeline(
            "ltx",
            partial(_build, videos.ltx),
            _PROMPTS | {"guidance_scale": 2.0, "height": 64, "width": 96, "num_frames": 17, "max_sequence_length": 16},
            "fused",
        ),
    )
}
