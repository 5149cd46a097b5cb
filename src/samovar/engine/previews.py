"""What does a picture look like half-way? Its latents, decoded as the pipeline would decode them at the end.

Pipelines keep latents in different shapes, and each undoes that in its own code. What is known here are the common
ways; for latents of any other kind there is no preview.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

_UNKNOWN_KIND = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What comes of decoding latents of a kind that is not known, or of too little memory to do it."""


def decoded(pipeline: Any, latents: torch.Tensor, height: int | None, width: int | None) -> list[Image]:
    """A picture for each of the latents; none if it is not known how they are decoded."""
    try:
        with torch.no_grad():
            size = _size(pipeline, height, width)
            spread = _spread(pipeline, latents, size)
            pixels = pipeline.vae.decode(spread.to(pipeline.vae.dtype), return_dict=False)[0]
            return [_picture(each) for each in pixels]
    except _UNKNOWN_KIND:
        return []


def clean(scheduler: Any, before: torch.Tensor | None, after: torch.Tensor, step: int) -> torch.Tensor:
    """Where the latents are heading, by the last step alone: for schedulers that move along straight lines."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    if before is None or not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return after
    sigmas = scheduler.sigmas
    index = (scheduler.begin_index or 0) + step
    if before.shape != after.shape or index + 1 >= len(sigmas) or sigmas[index] == sigmas[index + 1]:
        return after
    start, end = sigmas[index].item(), sigmas[index + 1].item()
    clean_latents: torch.Tensor = after.float() - end * (after.float() - before.float()) / (end - start)
    return clean_latents.to(after.dtype)


def _size(pipeline: Any, height: int | None, width: int | None) -> tuple[int, int]:
    if height is not None and width is not None:
        return height, width
    side = pipeline.default_sample_size * pipeline.vae_scale_factor
    return height or side, width or side


def _spread(pipeline: Any, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Latents as the VAE takes them: unpacked, of one frame, and of its scale."""
    if latents.ndim == 3 and hasattr(pipeline.vae, "bn"):
        return _spread_normed(pipeline, latents, size)
    if latents.ndim == 3:
        unpack = pipeline._unpack_latents
        names = tuple(inspect.signature(unpack).parameters)
        if names != ("latents", "height", "width", "vae_scale_factor"):
            raise ValueError(f"{names} is no way of packing that is known here")
        latents = unpack(latents, *size, pipeline.vae_scale_factor)
    if latents.ndim == 5:
        latents = latents[:, :, :1]
    config = pipeline.vae.config
    channels = config.get("latent_channels", config.get("z_dim"))
    if latents.shape[1] != channels:
        raise ValueError(f"{latents.shape[1]} channels are not the {channels} of the VAE")
    if config.get("latents_mean") is not None and config.get("latents_std") is not None:
        shape = (1, channels, *[1] * (latents.ndim - 2))
        mean, deviation = (latents.new_tensor(config[name]).view(shape) for name in ("latents_mean", "latents_std"))
        return latents * deviation / (config.get("scaling_factor") or 1.0) + mean
    return latents / (config.get("scaling_factor") or 1.0) + (config.get("shift_factor") or 0.0)


def _spread_normed(pipeline: Any, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The same for FLUX.2, whose VAE keeps the scale of patches of latents as a batch norm."""
    rows, columns = (side // (2 * pipeline.vae_scale_factor) for side in size)
    patches = latents.transpose(1, 2).reshape(len(latents), -1, rows, columns)
    mean, variance = (each.view(1, -1, 1, 1) for each in (pipeline.vae.bn.running_mean, pipeline.vae.bn.running_var))
    deviation = torch.sqrt(variance + pipeline.vae.config.batch_norm_eps)
    spread: torch.Tensor = pipeline._unpatchify_latents(patches * deviation + mean)
    return spread


def _picture(pixels: torch.Tensor) -> Image:
    """Channels first, from -1 to 1; of a film the first frame."""
    from PIL import Image as pictures

    frame = pixels[:, 0] if pixels.ndim == 4 else pixels
    levels = ((frame.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return pictures.fromarray(levels.permute(1, 2, 0).cpu().numpy())
