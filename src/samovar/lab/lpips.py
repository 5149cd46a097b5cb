"""How different do two pictures look? LPIPS (Zhang et al. 2018), version 0.1 with AlexNet, with no download.

The weights lie beside this file, as 16 bit numbers, which changes values by less than 3e-5.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import resources

import torch
import torch.nn.functional as F

SMALLEST = 64
"""Pixels of a side below which a picture is enlarged: the network sees nothing in smaller ones."""

_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_STRIDES, _PADDINGS, _POOLED = (4, 1, 1, 1, 1), (2, 2, 1, 1, 1), (1, 2)


def lpips(pictures: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """One number for each pair, 0 for equal ones. Pictures are (N, 3, height, width) with values from 0 to 1."""
    weights = _weights(str(pictures.device))
    total = torch.zeros(len(pictures), device=pictures.device)
    layers = zip(_layers(pictures, weights), _layers(others, weights), strict=True)
    for number, (features, other) in enumerate(layers):
        total += F.conv2d((features - other).pow(2), weights[f"lin{number}.weight"]).mean((1, 2, 3))
    return total


def _layers(pictures: torch.Tensor, weights: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The five activations, each of length 1 along its channels."""
    x = pictures.float() * 2 - 1
    smallest = min(x.shape[-2:])
    if smallest < SMALLEST:
        x = F.interpolate(x, scale_factor=float(-(-SMALLEST // smallest)))
    shift, scale = (torch.tensor(values, device=x.device).view(1, 3, 1, 1) for values in (_SHIFT, _SCALE))
    x = (x - shift) / scale
    for number in range(5):
        if number in _POOLED:
            x = F.max_pool2d(x, 3, 2)
        weight, bias = weights[f"conv{number}.weight"], weights[f"conv{number}.bias"]
        x = F.relu(F.conv2d(x, weight, bias, _STRIDES[number], _PADDINGS[number]))
        yield x / (x.pow(2).sum(1, keepdim=True).sqrt() + 1e-10)


@cache
def _weights(device: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    with resources.as_file(resources.files(__package__) / "data" / "lpips_alex_fp16.safetensors") as file:
        return {name: tensor.float() for name, tensor in load_file(file, device=device).items()}
