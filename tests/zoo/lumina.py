"""Lumina and Z-Image."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time
from .classic_images import angles

# 3x3 latent patches, 5 text tokens, two heads of 8 channels: lengths, their sums and the width all differ.
SIDE, TEXT, HEAD = 3, 5, 8
WIDTH = 2 * HEAD

# Z-Image pads each sequence to a multiple of 32: 6x6 patches become 64, the long text 96.
Z_SIDE, Z_LONG_TEXT, Z_JOINT = 6, 70, 64 + 32


def _lumina_next(step: int) -> dict[str, Any]:
    turns = angles(SIDE + 1, HEAD)
    return {
        "hidden_states": noise(step, 1, 4, 2 * SIDE, 2 * SIDE),
        "timestep": 1 - time(step, scale=1.0),
        "encoder_hidden_states": cond("text", 1, TEXT, 12),
        "encoder_mask": torch.tensor([[1] * (TEXT - 1) + [0]]),
        "image_rotary_emb": torch.polar(torch.ones_like(turns), turns),
        "cross_attention_kwargs": {},
    }


def _lumina2(step: int, *text_lengths: int) -> dict[str, Any]:
    batch = len(text_lengths)
    return {
        "hidden_states": noise(step, batch, 4, 2 * SIDE, 2 * SIDE),
        "timestep": 1 - time(step, batch, scale=1.0),
        "encoder_hidden_states": cond("text", batch, TEXT, 12),
        "encoder_attention_mask": torch.tensor([[1] * n + [0] * (TEXT - n) for n in text_lengths]),
    }


def _z_image(step: int, *text_lengths: int) -> dict[str, Any]:
    batch = len(text_lengths)
    return {
        "x": list(noise(step, batch, 4, 1, 2 * Z_SIDE, 2 * Z_SIDE).unbind()),
        "t": 1 - time(step, batch, scale=1.0),
        "cap_feats": [cond("text", length, 12) for length in text_lengths],
    }


def _z_image_controlnet(step: int) -> dict[str, Any]:
    samples = {block: noise(step, 1, Z_JOINT, WIDTH, name=f"control {block}") for block in (0, 1)}
    return _z_image(step, TEXT) | {"controlnet_block_samples": samples}


LUMINA = {
    "sample_size": 2 * SIDE,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": WIDTH,
    "num_layers": 3,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 8,
}
LUMINA_NEXT = LUMINA | {"cross_attention_dim": 12}
LUMINA2 = LUMINA | {
    "num_refiner_layers": 2,
    "axes_dim_rope": (4, 2, 2),
    "axes_lens": (16, 8, 8),
    "cap_feat_dim": 12,
}
Z_IMAGE = {
    "in_channels": 4,
    "dim": WIDTH,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 12,
    "axes_dims": [4, 2, 2],
    "axes_lens": [128, 8, 8],
}


CASES = (
    Case(
        "LuminaNextDiT2DModel",
        LUMINA_NEXT,
        _lumina_next,
        notes="The parameter `pad_token` is uninitialised memory, and unused.",
    ),
    Case("Lumina2Transformer2DModel", LUMINA2, lambda step: _lumina2(step, TEXT)),
    Case(
        "Lumina2Transformer2DModel",
        LUMINA2,
        lambda step: _lumina2(step, TEXT, TEXT - 2),
        variant="ragged",
    ),
    Case(
        "ZImageTransformer2DModel",
        Z_IMAGE,
        lambda step: _z_image(step, TEXT),
        notes="Takes and gives lists; the time embedding has a fixed width of 1024.",
    ),
    Case(
        "ZImageTransformer2DModel",
        Z_IMAGE,
        _z_image_controlnet,
        variant="controlnet",
        notes="The samples cover image and text alike.",
    ),
    Case(
        "ZImageTransformer2DModel",
        Z_IMAGE,
        lambda step: _z_image(step, TEXT, Z_LONG_TEXT),
        variant="ragged",
        notes="The shorter text is padded twice: with a pad token to 32, with zeros to the batch's 96.",
    ),
)
