"""Bria's models, and Ovis and LongCat: all built after Flux."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time
from .flux import BASE, COLUMNS, IMAGE, ROWS, TEXT, packed, positions


def _bria(step: int) -> dict[str, Any]:
    return packed(step) | {"timestep": time(step)}


def _bria_fibo(step: int) -> dict[str, Any]:
    """Both halves of a guided batch, in which the empty prompt comes first and is padded."""
    mask = torch.ones(2, 1, 1, TEXT + IMAGE, dtype=torch.bool)
    mask[0, ..., 1:TEXT] = False
    return packed(step) | {
        "hidden_states": noise(step, 1, IMAGE, 4).repeat(2, 1, 1),
        "encoder_hidden_states": cond("text", 2, TEXT, 28),
        "text_encoder_layers": [cond(f"layer {index}", 2, TEXT, 14) for index in range(5)],
        "timestep": time(step, batch=2),
        "joint_attention_kwargs": {"attention_mask": mask},
    }


def _bria_fibo2(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, 3, 2 * ROWS, 2 * COLUMNS),
        "encoder_hidden_states": cond("bundles", 1, 3, TEXT, 28),
        "timestep": time(step, scale=1.0),
    }


def _ovis(step: int) -> dict[str, Any]:
    """Text positions run along the diagonal of the grid."""
    diagonal = torch.arange(TEXT)[:, None] * torch.tensor([0.0, 1.0, 1.0])
    return packed(step) | {"txt_ids": diagonal}


def _longcat(step: int) -> dict[str, Any]:
    """As Ovis, with the image beyond the longest prompt."""
    return _ovis(step) | {"img_ids": positions(1, ROWS, COLUMNS) + torch.tensor([1.0, 512.0, 512.0])}


FIBO = BASE | {"joint_attention_dim": 28, "text_encoder_dim": 14}

FIBO2 = {
    "in_channels": 3,
    "dim": 24,
    "n_heads": 2,
    "n_refiner_layers": 2,
    "perceiver_num_layers": 3,
    "n_layers": 4,
    "cap_feat_dim": 28,
    "injection_layer_ids": (1, 2),
    "min_num_gist_tokens": 4,
    "max_num_gist_tokens": 8,
    "gist_step": 1,
    "gist_min_text_len": 4,
    "gist_max_text_len": 12,
    "axes_dims": (4, 4, 4),
    "axes_lens": (16, 8, 8),
}

CASES = (
    Case("BriaTransformer2DModel", BASE, _bria),
    Case(
        "BriaFiboTransformer2DModel",
        FIBO,
        _bria_fibo,
        notes="half the text channels are replaced before each block; single blocks: cat, then split",
    ),
    Case(
        "BriaFibo2Transformer2DModel",
        FIBO2,
        _bria_fibo2,
        notes="the perceiver starts from learned queries; the time embedder alone is of 288k parameters",
    ),
    Case("OvisImageTransformer2DModel", BASE | {"out_channels": 4}, _ovis),
    Case("LongCatImageTransformer2DModel", BASE, _longcat),
)
