"""How near is a picture to the exact one? PSNR, SSIM and LPIPS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..errors import SettingError
from .lpips import lpips

HIGHEST_PSNR = 100.0
"""In dB. What is nearer counts as this, and equal pictures too, so that averages stay numbers."""

_WINDOW, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


class Quality(NamedTuple):
    """One picture beside the exact one."""

    psnr: float
    """In dB; higher is nearer."""
    ssim: float
    """Up to 1; higher is nearer."""
    lpips: float
    """From 0; lower is nearer."""


def measure(pictures: torch.Tensor, exact: torch.Tensor) -> list[Quality]:
    """The quality of each of several pictures, (N, 3, height, width) with values from 0 to 1."""
    if pictures.shape != exact.shape or pictures.ndim != 4 or pictures.shape[1] != 3:
        raise SettingError(
            f"Pictures of shape {tuple(pictures.shape)} and {tuple(exact.shape)} cannot be compared; two equal shapes "
            "(number, 3, height, width) were expected."
        )
    with torch.no_grad():
        pictures, exact = pictures.float(), exact.to(pictures.device).float()
        columns = [metric(pictures, exact).tolist() for metric in (psnr, ssim, lpips)]
    return [Quality(*row) for row in zip(*columns, strict=True)]


def average(qualities: list[Quality]) -> Quality:
    """Of several pictures, each metric on its own."""
    return Quality(*(sum(column) / len(column) for column in zip(*qualities, strict=True)))


def psnr_of_mean_error(qualities: Sequence[Quality]) -> float:
    """In dB: the PSNR of the mean square error of several pictures, in which the worst of them count most."""
    return -10 * math.log10(sum(10 ** (-quality.psnr / 10) for quality in qualities) / len(qualities))


def psnr(pictures: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio in dB, over all pixels and channels of a picture."""
    error = (pictures - exact).pow(2).mean((1, 2, 3))
    return (-10 * error.log10()).clamp_max(HIGHEST_PSNR)


def ssim(pictures: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Structural similarity (Wang et al. 2004): Gaussian window of 11 pixels, of each channel, then the mean."""
    x, y = pictures.double(), exact.double()  # Variances are small differences of large numbers.
    mean_x, mean_y = _blurred(x), _blurred(y)
    var_x, var_y = _blurred(x * x) - mean_x**2, _blurred(y * y) - mean_y**2
    covariance = _blurred(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _K1**2) / (mean_x**2 + mean_y**2 + _K1**2)
    structure = (2 * covariance + _K2**2) / (var_x + var_y + _K2**2)
    return (luminance * structure).mean((1, 2, 3)).float()


def _blurred(x: torch.Tensor) -> torch.Tensor:
    """The mean under a Gaussian, where the whole window fits; a picture smaller than it has a smaller one."""
    channels = x.shape[1]
    for axis in (2, 3):
        size = min(_WINDOW, x.shape[axis] - (x.shape[axis] + 1) % 2)
        places = torch.arange(size, dtype=x.dtype, device=x.device) - (size - 1) / 2
        kernel = torch.exp(-(places**2) / (2 * _SIGMA**2))
        shape = (1, 1, size, 1) if axis == 2 else (1, 1, 1, size)
        x = F.conv2d(x, (kernel / kernel.sum()).view(shape).repeat(channels, 1, 1, 1), groups=channels)
    return x
