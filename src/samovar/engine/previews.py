"""Previews: the latents of a step, decoded as the pipeline would at the end.

Pipelines keep latents in different layouts, and each undoes that in its own code. The common ones are known here:
tokens of one latent or of a patch of 2x2, frames after channels, the VAE's scale as numbers, by channel or as a batch
norm. For any other there is no preview, and the result says so.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from PIL.Image import Image, fromarray


class NoPreview(Exception):
    """Why latents cannot be shown."""


def decode_latents(pipeline: Any, latents: torch.Tensor, size: tuple[int | None, int | None]) -> Image:
    """The image, or the first frame, of some latents of this height and width; NoPreview if their layout is unknown or
    there is too little memory."""
    vae: Any = getattr(pipeline, "vae", torch.nn.Identity())
    name = type(pipeline).__name__
    if not any(isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)) for module in vae.modules()):
        raise NoPreview(f"{name} has no VAE that makes images")
    try:
        with torch.no_grad():
            usual = getattr(pipeline, "default_sample_size", 0) * getattr(pipeline, "vae_scale_factor", 0)
            wanted = _for_vae(pipeline, latents, (size[0] or usual, size[1] or usual))
            (pixels,) = vae.decode(wanted.to(vae.dtype), return_dict=False)[0]
            frame = pixels[:, 0] if pixels.ndim == 4 else pixels
            levels = ((frame.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
            return fromarray(levels.permute(1, 2, 0).cpu().numpy())
    except BaseException as error:  # Of any kind: an image must not fail for its preview.
        if not isinstance(error, Exception):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NoPreview(f"latents of {name} cannot be decoded half-way: {reason}") from error


def predict_clean(scheduler: Any, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Where the last step points, for flow matching, which moves along straight lines; else the latents themselves."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler) or before.shape != after.shape:
        return after
    start, end = scheduler.sigmas[scheduler.step_index - 1 : scheduler.step_index + 1].tolist()
    clean: torch.Tensor = after.float() - end * (after.float() - before.float()) / (end - start)
    return clean.to(after.dtype) if start != end else after


def _for_vae(pipeline: Any, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Latents as the VAE takes them: unpacked, of one frame, in its scale."""
    vae = pipeline.vae
    channels: int = vae.config.get("latent_channels") or vae.config.z_dim
    if hasattr(vae, "bn") and getattr(pipeline, "patch_size", None) and not hasattr(pipeline, "_unpack_latents"):
        raise ValueError("the order of channels in its patches is unknown")
    names = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
    scale = next((value for name in names if (value := getattr(pipeline, name, None))), 8)
    sides = size[0] // scale, size[1] // scale
    if latents.ndim == 3:
        if getattr(pipeline, "vae_temporal_compression_ratio", 1) > 1:  # Frame after frame.
            latents = latents[:, : sides[0] * sides[1]]
        latents = _laid_out(latents, math.isqrt(latents.shape[2] // channels), sides)
    elif latents.ndim == 5:
        latents = _first_frame(latents, channels, sides)
    if hasattr(vae, "bn"):
        if latents.shape[1] == channels:
            latents = torch.nn.functional.pixel_unshuffle(latents, 2)
        mean, variance = (each.view(1, -1, 1, 1) for each in (vae.bn.running_mean, vae.bn.running_var))
        latents = _unpatched(latents * torch.sqrt(variance + vae.config.batch_norm_eps) + mean, channels)
    else:
        latents = _scaled(vae, _unpatched(latents, channels))
    has_frames = "z_dim" in vae.config or any(isinstance(module, torch.nn.Conv3d) for module in vae.modules())
    return latents[:, :, None] if has_frames else latents


def _scaled(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    known = {**vae.config, **dict(vae.named_buffers(recurse=False))}
    mean, deviation = known.get("latents_mean"), known.get("latents_std")
    scale = known.get("scaling_factor") or 1.0
    if mean is None or deviation is None:
        return latents / scale + (known.get("shift_factor") or 0.0)
    mean, deviation = (torch.as_tensor(each).to(latents).view(1, -1, 1, 1) for each in (mean, deviation))
    return latents * deviation / scale + mean


def _laid_out(tokens: torch.Tensor, side: int, sides: tuple[int, int]) -> torch.Tensor:
    """Tokens, each of a patch of `side` latents a side, in rows and columns."""
    rows, columns = (each // side for each in sides)
    if tokens.shape[1] != rows * columns:
        raise ValueError(f"{tokens.shape[1]} tokens make no image of {sides[1]}x{sides[0]} latents")
    return tokens.transpose(1, 2).reshape(len(tokens), -1, rows, columns)


def _first_frame(latents: torch.Tensor, channels: int, sides: tuple[int, int]) -> torch.Tensor:
    """Of a video whose frames come after its channels."""
    if latents.shape[2] == channels or (latents.shape[4] == channels and latents.shape[3:] != sides):
        raise ValueError(f"{tuple(latents.shape)} may have its axes in another order")
    return latents[:, :, 0]


def _unpatched(patches: torch.Tensor, channels: int) -> torch.Tensor:
    """Of one latent or of 2x2, whose channels come first."""
    side = math.isqrt(patches.shape[1] // channels)
    if side not in (1, 2) or side * side * channels != patches.shape[1]:
        raise ValueError(f"the VAE needs {channels} channels, not latents of shape {tuple(patches.shape)}")
    return torch.nn.functional.pixel_shuffle(patches, side)
