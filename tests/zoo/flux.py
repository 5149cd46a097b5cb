"""Flux and its closest kin."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time

# 4x5 latent patches, 6 text tokens, 16 channels: all lengths differ, so that no stream is taken for another.
ROWS, COLUMNS, TEXT, WIDTH = 4, 5, 6, 16
IMAGE = ROWS * COLUMNS


def positions(*sizes: int) -> torch.Tensor:
    """The coordinates of all points of a grid, the last axis fastest, as rotary embeddings want them."""
    return torch.cartesian_prod(*(torch.arange(size) for size in sizes)).float()


def packed(step: int) -> dict[str, Any]:
    """What all kin of Flux take: latents packed into tokens, prompt embeddings, the positions of both."""
    return {
        "hidden_states": noise(step, 1, IMAGE, 4),
        "encoder_hidden_states": cond("text", 1, TEXT, 12),
        "timestep": time(step, scale=1.0),
        "img_ids": positions(1, ROWS, COLUMNS),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def _flux(step: int) -> dict[str, Any]:
    return packed(step) | {"pooled_projections": cond("pooled", 1, 8), "guidance": torch.full((1,), 3.5)}


def _flux_controlnet(step: int) -> dict[str, Any]:
    return _flux(step) | {
        "controlnet_block_samples": [noise(step, 1, IMAGE, WIDTH, name="control")],
        "controlnet_single_block_samples": [noise(step, 1, IMAGE, WIDTH, name="single control")],
    }


def _flux_equal(step: int) -> dict[str, Any]:
    return _flux(step) | {
        "encoder_hidden_states": cond("text", 1, IMAGE, 12),
        "txt_ids": torch.zeros(IMAGE, 3),
    }


def _flux2(step: int) -> dict[str, Any]:
    return packed(step) | {
        "img_ids": positions(1, ROWS, COLUMNS, 1)[None],
        "txt_ids": positions(1, 1, 1, TEXT)[None],
        "guidance": torch.full((1,), 4.0),
    }


def _flux3(step: int) -> dict[str, Any]:
    return packed(step) | {
        "img_ids": 0.5 * positions(1, ROWS, COLUMNS, 1),
        "txt_ids": positions(1, 1, 1, TEXT),
    }


def _flux3_reference(step: int) -> dict[str, Any]:
    return _flux3(step) | {
        "image_cond_hidden_states": cond("reference", 1, 9, 10),
        "image_cond_ids": 0.5 * positions(1, 3, 3, 1) - torch.tensor([0.0, 0.0, 0.0, 1.0]),
    }


def _chroma(step: int) -> dict[str, Any]:
    mask = torch.ones(1, TEXT + IMAGE)
    mask[:, TEXT - 1] = 0.0
    return packed(step) | {"attention_mask": mask}


BASE = {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "axes_dims_rope": (2, 2, 4),
}
FLUX = BASE | {"pooled_projection_dim": 8, "guidance_embeds": True}
FLUX2 = BASE | {"axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 32}
FLUX3 = BASE | {"axes_dims_rope": (2, 2, 2, 2), "timestep_channels": 32, "cond_in_channels": 10}
CHROMA = BASE | {"approximator_num_channels": 32, "approximator_hidden_dim": 24, "approximator_layers": 2}


CASES = (
    Case("FluxTransformer2DModel", FLUX, _flux),
    Case("FluxTransformer2DModel", FLUX, _flux_controlnet, variant="controlnet"),
    Case("FluxTransformer2DModel", FLUX, _flux_equal, variant="equal-lengths"),
    Case("Flux2Transformer2DModel", FLUX2, _flux2),
    Case(
        "Flux3Transformer2DModel",
        FLUX3,
        _flux3,
        notes="mode_blocks.image_cond is there but never called without reference images",
    ),
    Case(
        "Flux3Transformer2DModel",
        FLUX3,
        _flux3_reference,
        variant="reference",
        notes="the reference tokens follow the image tokens in the image stream of the single blocks",
    ),
    Case(
        "ChromaTransformer2DModel",
        CHROMA,
        _chroma,
        notes="the mask is of floats, as the pipeline makes it; the approximator's layers have no attention",
    ),
)
