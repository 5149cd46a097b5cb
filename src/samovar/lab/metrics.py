"""How close an image or a video is to the exact one: PSNR, SSIM and LPIPS, and for a video its motion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..core.errors import SettingError

HIGHEST_PSNR = 100.0
"""In dB. Closer images, and equal ones, count as this, so that averages stay finite."""
_FRAMES = 16
"""Frames of a video that are looked at together."""
_WINDOW, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


class Quality(NamedTuple):
    """One image compared with the exact one; of a video, the mean over its frames."""

    psnr: float
    """In dB; higher is closer."""
    ssim: float
    """At most 1; higher is closer."""
    lpips: float
    """At least 0; lower is closer."""
    motion: float | None = None
    """PSNR of the differences from frame to frame in dB, of a video: it is low where things flicker or move otherwise,
    even if each frame is close."""

    @property
    def is_finite(self) -> bool:
        return all(value is None or math.isfinite(value) for value in self)


def measure(images: torch.Tensor, exact: torch.Tensor) -> list[Quality]:
    """The quality of each image or video; both tensors are (N, 3, height, width), or of videos (N, frames, 3, height,
    width), with values from 0 to 1."""
    if images.shape != exact.shape or images.ndim not in (4, 5) or images.shape[-3] != 3:
        raise SettingError(
            f"Images of shape {tuple(images.shape)} and {tuple(exact.shape)} cannot be compared; expected two equal "
            "shapes (N, 3, height, width) or (N, frames, 3, height, width)."
        )
    with torch.no_grad():
        images, exact = images.float(), exact.to(images.device).float()
        if images.ndim == 5:
            return [_measure_video(*pair) for pair in zip(images, exact, strict=True)]
        columns = [metric(images, exact).tolist() for metric in (psnr, ssim, lpips)]
    return [Quality(*row) for row in zip(*columns, strict=True)]


def _measure_video(frames: torch.Tensor, exact: torch.Tensor) -> Quality:
    parts = [slice(first, first + _FRAMES) for first in range(0, len(frames), _FRAMES)]
    mean = average([quality for part in parts for quality in measure(frames[part], exact[part])])
    changes = psnr(frames.diff(dim=0).flatten(0, 1)[None], exact.diff(dim=0).flatten(0, 1)[None])
    return mean._replace(motion=changes.item() if len(frames) > 1 else None)


def average(qualities: Sequence[Quality]) -> Quality:
    """The mean of each metric."""
    columns = zip(*qualities, strict=True)
    return Quality(*(None if None in column else sum(column) / len(column) for column in columns))  # type: ignore[arg-type]


def exactly_equal(images: torch.Tensor) -> list[Quality]:
    """The quality of the exact images or videos themselves."""
    moves = images.ndim == 5 and images.shape[1] > 1
    return [Quality(HIGHEST_PSNR, 1.0, 0.0, HIGHEST_PSNR if moves else None)] * len(images)


def psnr(images: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio of each image in dB."""
    error = (images - exact).pow(2).mean((1, 2, 3))
    return (-10 * error.log10()).clamp_max(HIGHEST_PSNR)


def ssim(images: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Structural similarity (Wang et al. 2004) with a Gaussian window of 11 pixels, averaged over channels."""
    x, y = images.double(), exact.double()  # Variances are small differences of large numbers.
    mean_x, mean_y = _blurred(x), _blurred(y)
    var_x, var_y = _blurred(x * x) - mean_x**2, _blurred(y * y) - mean_y**2
    covariance = _blurred(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _K1**2) / (mean_x**2 + mean_y**2 + _K1**2)
    structure = (2 * covariance + _K2**2) / (var_x + var_y + _K2**2)
    return (luminance * structure).mean((1, 2, 3)).float()


def _blurred(x: torch.Tensor) -> torch.Tensor:
    """Gaussian means where the whole window fits; an image smaller than the window gets a smaller one."""
    channels = x.shape[1]
    for axis in (2, 3):
        size = min(_WINDOW, x.shape[axis] - (x.shape[axis] + 1) % 2)
        offsets = torch.arange(size, dtype=x.dtype, device=x.device) - (size - 1) / 2
        kernel = torch.exp(-(offsets**2) / (2 * _SIGMA**2))
        shape = (1, 1, size, 1) if axis == 2 else (1, 1, 1, size)
        x = F.conv2d(x, (kernel / kernel.sum()).view(shape).repeat(channels, 1, 1, 1), groups=channels)
    return x


# ------------------------------------------------------------------------------------------------ LPIPS

_SMALLEST = 64
"""Images with a shorter side are enlarged: the network sees nothing in smaller ones."""
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_STRIDES, _PADDINGS, _POOLED = (4, 1, 1, 1, 1), (2, 2, 1, 1, 1), (1, 2)


def lpips(images: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Perceptual distance (Zhang et al. 2018), version 0.1 with AlexNet; 0 for equal images.

    The weights are shipped as 16-bit numbers, which changes values by less than 3e-5.
    """
    weights = _lpips_weights(str(images.device))
    total = torch.zeros(len(images), device=images.device)
    layers = zip(_activations(images, weights), _activations(exact, weights), strict=True)
    for number, (features, other) in enumerate(layers):
        total += F.conv2d((features - other).pow(2), weights[f"lin{number}.weight"]).mean((1, 2, 3))
    return total


def _activations(images: torch.Tensor, weights: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """AlexNet's five activations, normalised along their channels."""
    x = images.float() * 2 - 1
    shortest = min(x.shape[-2:])
    if shortest < _SMALLEST:
        x = F.interpolate(x, scale_factor=float(-(-_SMALLEST // shortest)))
    shift, scale = (torch.tensor(values, device=x.device).view(1, 3, 1, 1) for values in (_SHIFT, _SCALE))
    x = (x - shift) / scale
    for number in range(5):
        if number in _POOLED:
            x = F.max_pool2d(x, 3, 2)
        weight, bias = weights[f"conv{number}.weight"], weights[f"conv{number}.bias"]
        x = F.relu(F.conv2d(x, weight, bias, _STRIDES[number], _PADDINGS[number]))
        yield x / (x.pow(2).sum(1, keepdim=True).sqrt() + 1e-10)


@cache
def _lpips_weights(device: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    with resources.as_file(resources.files(__package__) / "data" / "lpips_alex_fp16.safetensors") as file:
        return {name: tensor.float() for name, tensor in load_file(file, device=device).items()}
