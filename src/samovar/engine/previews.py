"""What does an image look like half-way? Its latents, decoded as the pipeline would at the end.

Pipelines keep latents in different layouts, and each undoes that in its own code. The common ones are known here; for
any other there is no preview.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from PIL.Image import Image


def decode_latents(pipeline: Any, latents: torch.Tensor, height: int | None, width: int | None) -> list[Image]:
    """An image for each of the latents; none if their layout is unknown or there is too little memory."""
    try:
        with torch.no_grad():
            if height is None or width is None:
                side = pipeline.default_sample_size * pipeline.vae_scale_factor
                height, width = height or side, width or side
            unpacked = _unpacked(pipeline, latents, (height, width))
            pixels = pipeline.vae.decode(unpacked.to(pipeline.vae.dtype), return_dict=False)[0]
            return [_to_image(each) for each in pixels]
    except BaseException as error:  # Of any kind: an image must not fail for its preview.
        if not isinstance(error, Exception):
            raise
        return []


def predict_clean(scheduler: Any, before: torch.Tensor | None, after: torch.Tensor, step: int) -> torch.Tensor:
    """Where the last step points, for flow matching, which moves along straight lines; else the latents themselves."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    if before is None or not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return after
    sigmas = scheduler.sigmas
    index = (scheduler.begin_index or 0) + step
    if before.shape != after.shape or index + 1 >= len(sigmas) or sigmas[index] == sigmas[index + 1]:
        return after
    start, end = sigmas[index].item(), sigmas[index + 1].item()
    clean: torch.Tensor = after.float() - end * (after.float() - before.float()) / (end - start)
    return clean.to(after.dtype)


def _unpacked(pipeline: Any, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Latents as the VAE takes them: unpacked, one frame, in its scale."""
    if latents.ndim == 3 and hasattr(pipeline.vae, "bn"):
        return _unpatched(pipeline, latents, size)
    if latents.ndim == 3 and not hasattr(pipeline, "_unpack_latents"):
        latents = _from_quads(pipeline, latents, size)
    elif latents.ndim == 3:
        unpack = pipeline._unpack_latents
        names = tuple(inspect.signature(unpack).parameters)
        if names[:4] == ("latents", "num_frames", "height", "width"):
            return _first_frame(pipeline, latents, size)
        if names != ("latents", "height", "width", "vae_scale_factor"):
            raise ValueError(f"_unpack_latents takes {names}, which is an unknown layout")
        latents = unpack(latents, *size, pipeline.vae_scale_factor)
    if latents.ndim == 5:
        latents = latents[:, :, :1]
    config = pipeline.vae.config
    channels = config.get("latent_channels", config.get("z_dim"))
    if latents.ndim < 4 or latents.shape[1] != channels:
        raise ValueError(f"the VAE needs {channels} channels, not latents of shape {tuple(latents.shape)}")
    if config.get("latents_mean") is not None and config.get("latents_std") is not None:
        shape = (1, channels, *[1] * (latents.ndim - 2))
        mean, deviation = (latents.new_tensor(config[name]).view(shape) for name in ("latents_mean", "latents_std"))
        return latents * deviation / (config.get("scaling_factor") or 1.0) + mean
    return latents / (config.get("scaling_factor") or 1.0) + (config.get("shift_factor") or 0.0)


def _from_quads(pipeline: Any, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The same for modular pipelines, whose blocks make a token of 2x2 latents. A VAE for videos wants a frame."""
    rows, columns = (side // (2 * pipeline.vae_scale_factor) for side in size)
    quads = latents.reshape(len(latents), rows, columns, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
    image = quads.reshape(len(latents), -1, 2 * rows, 2 * columns)
    return image[:, :, None] if "z_dim" in pipeline.vae.config else image


def _first_frame(pipeline: Any, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The same for LTX and others whose tokens are those of all frames, and whose VAE has its scale as tensors."""
    vae, patch = pipeline.vae, pipeline.transformer_spatial_patch_size
    if patch != 1:
        raise ValueError(f"patches of {patch} latents are an unknown layout")
    rows, columns = (side // pipeline.vae_spatial_compression_ratio for side in size)
    times = pipeline.transformer_temporal_patch_size
    frames = pipeline._unpack_latents(latents, latents.shape[1] // (rows * columns), rows, columns, patch, times)
    mean, deviation = (each.view(1, -1, 1, 1, 1).to(latents) for each in (vae.latents_mean, vae.latents_std))
    first: torch.Tensor = frames[:, :, :1] * deviation / vae.config.scaling_factor + mean
    return first


def _unpatched(pipeline: Any, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The same for FLUX.2, whose VAE scales patches of latents by a batch norm."""
    rows, columns = (side // (2 * pipeline.vae_scale_factor) for side in size)
    patches = latents.transpose(1, 2).reshape(len(latents), -1, rows, columns)
    mean, variance = (each.view(1, -1, 1, 1) for each in (pipeline.vae.bn.running_mean, pipeline.vae.bn.running_var))
    deviation = torch.sqrt(variance + pipeline.vae.config.batch_norm_eps)
    latents = pipeline._unpatchify_latents(patches * deviation + mean)
    return latents


def _to_image(pixels: torch.Tensor) -> Image:
    """From channels first and -1 to 1; the first frame of a video."""
    from PIL import Image

    frame = pixels[:, 0] if pixels.ndim == 4 else pixels
    levels = ((frame.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).cpu().numpy())
