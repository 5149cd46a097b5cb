"""The small transformers that sit inside a UNet, built from the basic block."""

from __future__ import annotations

from typing import Any

from . import Case, cond, noise, time, tokens

# Feature maps of 12 channels and 4x5 pixels, blocks of width 16.
CHANNELS, WIDTH, CROSS = 12, 16, 10
TEXT, FRAMES = 6, 7


def _feature_map(step: int, text: int = TEXT) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, CHANNELS, 4, 5),
        "encoder_hidden_states": cond("text", 1, text, CROSS),
    }


def _dual(step: int) -> dict[str, Any]:
    return _feature_map(step, text=77 + 257)


def _patches(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, 4, 10, 10),
        "timestep": time(step),
        "class_labels": tokens("class", 1, vocabulary=9),
    }


def _temporal(step: int) -> dict[str, Any]:
    return {"hidden_states": noise(step, FRAMES, CHANNELS, 4, 5), "num_frames": FRAMES}


BASE = {
    "num_attention_heads": 2,
    "attention_head_dim": WIDTH // 2,
    "in_channels": CHANNELS,
    "num_layers": 3,
    "norm_num_groups": 4,
}
CROSSED = BASE | {"cross_attention_dim": CROSS}
ADA_NORM_ZERO = BASE | {
    "in_channels": 4,
    "sample_size": 10,
    "patch_size": 2,
    "num_embeds_ada_norm": 9,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
}

CASES = (
    Case("Transformer2DModel", CROSSED, _feature_map, notes="no timestep: its UNet adds it"),
    Case(
        "Transformer2DModel",
        ADA_NORM_ZERO,
        _patches,
        variant="ada-norm-zero",
        notes="after the last block the model reads the weights of block 0 (norm1.emb)",
    ),
    Case(
        "DualTransformer2DModel",
        CROSSED | {"num_layers": 2},
        _dual,
        notes="two whole models side by side on the same input, the second first; text lengths are fixed",
    ),
    Case(
        "DreamLiteTransformer2DModel",
        CROSSED | {"use_linear_projection": True, "qk_norm": "rms_norm", "ff_mult": 3},
        _feature_map,
    ),
    Case(
        "TransformerTemporalModel",
        BASE,
        _temporal,
        notes="pixels are the batch of the blocks, frames their tokens; no text, no timestep",
    ),
)
