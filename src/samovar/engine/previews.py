"""What does an image look like half-way? Its latents, decoded as the pipeline would at the end.

Pipelines keep latents in different layouts, and each undoes that in its own code. The common ones are known here; for
any other there is no preview, and the result says so.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from PIL.Image import Image, fromarray

_MOST_OFF = math.log(1.1)
"""How far an aspect ratio may be from another: sides are rounded to whole tokens."""


class NoPreview(Exception):
    """Why latents cannot be shown."""


def decode_latents(pipeline: Any, latents: torch.Tensor, height: int | None, width: int | None) -> list[Image]:
    """An image for each of the latents; NoPreview if their layout is unknown or there is too little memory."""
    if getattr(pipeline, "vae", None) is None:
        raise NoPreview(f"{type(pipeline).__name__} has no VAE")
    if not any(isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)) for module in pipeline.vae.modules()):
        raise NoPreview(f"the VAE of {type(pipeline).__name__} makes no images")
    try:
        with torch.no_grad():
            if latents.ndim == 3 and (height is None or width is None):  # The only ones that do not tell it.
                side = pipeline.default_sample_size * pipeline.vae_scale_factor
                height, width = height or side, width or side
            unpacked = _unpacked(pipeline, latents, (height or 0, width or 0))
            pixels = pipeline.vae.decode(unpacked.to(pipeline.vae.dtype), return_dict=False)[0]
            return [_to_image(each) for each in pixels]
    except BaseException as error:  # Of any kind: an image must not fail for its preview.
        if not isinstance(error, Exception):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NoPreview(f"latents of {type(pipeline).__name__} cannot be decoded half-way: {reason}") from error


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
    if latents.ndim == 6 and latents.shape[1] == 1:  # The images of one request.
        latents = latents[:, 0]
    if latents.ndim in (3, 4) and hasattr(pipeline.vae, "bn"):
        return _unpatched(pipeline, latents, size)
    if latents.ndim == 3 and not hasattr(pipeline, "_unpack_latents"):
        latents = _from_quads(pipeline, latents, size)
    elif latents.ndim == 3:
        names = tuple(inspect.signature(pipeline._unpack_latents).parameters)
        if names[:4] == ("latents", "num_frames", "height", "width"):
            return _first_frame(pipeline, latents, size)
        if latents.shape[2] == _channels(pipeline.vae):  # A token is one latent, not a patch of four.
            latents = _laid_out(latents, _grid(latents, size))
        else:
            latents = _unpacked_by_itself(pipeline, names, latents, size)
    config, channels = pipeline.vae.config, _channels(pipeline.vae)
    if latents.ndim == 5:
        scale = getattr(pipeline, "vae_scale_factor_spatial", getattr(pipeline, "vae_scale_factor", 8))
        latents = _channels_first(latents, channels, size, scale)[:, :, :1]
    latents = _as_many_axes(pipeline.vae, latents)
    if latents.ndim < 4 or latents.shape[1] != channels:
        raise ValueError(f"the VAE needs {channels} channels, not latents of shape {tuple(latents.shape)}")
    if config.get("latents_mean") is not None and config.get("latents_std") is not None:
        shape = (1, channels, *[1] * (latents.ndim - 2))
        mean, deviation = (latents.new_tensor(config[name]).view(shape) for name in ("latents_mean", "latents_std"))
        return latents * deviation / (config.get("scaling_factor") or 1.0) + mean
    return latents / (config.get("scaling_factor") or 1.0) + (config.get("shift_factor") or 0.0)


def _channels(vae: Any) -> int:
    found: int = vae.config.get("latent_channels") or vae.config.z_dim
    return found


def _unpacked_by_itself(
    pipeline: Any, names: tuple[str, ...], latents: torch.Tensor, size: tuple[int, int]
) -> torch.Tensor:
    """Latents, unpacked by a pipeline's own method. Its tokens may be those of another size than was asked for."""
    scale = pipeline.vae_scale_factor
    known = {"latents": latents, "patch_size": 2, "vae_scale_factor": scale, "height": size[0], "width": size[1]}
    if not set(names) <= set(known):
        raise ValueError(f"_unpack_latents takes {names}, which is an unknown layout")
    try:
        unpacked: torch.Tensor = pipeline._unpack_latents(*(known[name] for name in names))
    except RuntimeError:
        rows, columns = _grid(latents, size)
        known |= {"height": 2 * scale * rows, "width": 2 * scale * columns}
        unpacked = pipeline._unpack_latents(*(known[name] for name in names))
    return unpacked


def _grid(latents: torch.Tensor, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of all tokens, whose aspect ratio is that of the image; it may have another size."""
    count, (height, width) = latents.shape[1], size
    off = {
        rows: abs(math.log(count * height / (rows * rows * width))) for rows in range(1, count + 1) if not count % rows
    }
    best = min(off, key=lambda rows: off[rows])
    if off[best] > _MOST_OFF:
        raise ValueError(f"{count} tokens make no image of {width}x{height}, or of its shape")
    return best, count // best


def _laid_out(tokens: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    return tokens.transpose(1, 2).reshape(*tokens.shape[::2], *grid)


def _channels_first(latents: torch.Tensor, channels: int, size: tuple[int, int], scale: int) -> torch.Tensor:
    """Latents of a video whose channels come first, after the frames, or last, alone or before a condition and a mask.
    Where several axes are as long, the sides tell which are which, or the aspect ratio if the video is of another size.
    """
    found = []
    for axis, order in ((1, (0, 1, 2, 3, 4)), (2, (0, 2, 1, 3, 4)), (4, (0, 4, 1, 2, 3))):
        if latents.shape[axis] in (channels, 2 * channels + 1):
            found.append(latents.narrow(axis, 0, channels).permute(order))
    sides = tuple(side // scale for side in size)
    ratio = math.log(max(1, size[0]) / max(1, size[1]))

    def unlike(each: torch.Tensor) -> tuple[bool, float]:
        rows, columns = each.shape[3:]
        return (rows, columns) != sides, abs(math.log(rows / columns) - ratio)

    return min(found, key=unlike, default=latents)


def _as_many_axes(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """With an axis of frames if the VAE convolves over them, and without it if not: some use one for the other."""
    has_frames = "z_dim" in vae.config or any(isinstance(module, torch.nn.Conv3d) for module in vae.modules())
    if latents.ndim == 5 and not has_frames:
        return latents[:, :, 0]
    return latents.unsqueeze(2) if latents.ndim == 4 and has_frames else latents


def _from_quads(pipeline: Any, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The same for modular pipelines, whose blocks make a token of 2x2 latents. A VAE for videos wants a frame."""
    rows, columns = _grid(latents, size)
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
    """The same for FLUX.2 and others whose VAE scales patches of latents by a batch norm."""
    patches = _laid_out(latents, _grid(latents, size)) if latents.ndim == 3 else latents
    if patches.shape[1] == _channels(pipeline.vae):
        count, channels, height, width = patches.shape
        quads = patches.reshape(count, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
        patches = quads.reshape(count, 4 * channels, height // 2, width // 2)
    mean, variance = (each.view(1, -1, 1, 1) for each in (pipeline.vae.bn.running_mean, pipeline.vae.bn.running_var))
    scaled = patches * torch.sqrt(variance + pipeline.vae.config.batch_norm_eps) + mean
    if hasattr(pipeline, "_unpatchify_latents"):
        unpatched: torch.Tensor = pipeline._unpatchify_latents(scaled)
        return unpatched
    patch: int = pipeline.patch_size  # Of Ideogram, whose channels come last in a patch.
    count, channels, rows, columns = scaled.shape
    quads = scaled.reshape(count, patch, patch, channels // patch**2, rows, columns).permute(0, 3, 4, 1, 5, 2)
    unpatched = quads.reshape(count, channels // patch**2, rows * patch, columns * patch)
    return unpatched


def _to_image(pixels: torch.Tensor) -> Image:
    """From channels first and -1 to 1; the first frame of a video."""
    frame = pixels[:, 0] if pixels.ndim == 4 else pixels
    levels = ((frame.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return fromarray(levels.permute(1, 2, 0).cpu().numpy())
