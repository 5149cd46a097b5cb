"""Stable Diffusion 3 and other image models of two streams: CogView, GLM-Image, HiDream, HunyuanImage."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time, tokens

# 3x3 latent patches, 5 text tokens, two heads of 8 channels: lengths, their sums and the width all differ.
SIDE, TEXT, HEAD = 3, 5, 8
IMAGE, WIDTH = SIDE * SIDE, 2 * HEAD
LLAMA_TEXT, LLAMA_LAYERS = 3, 3
HEADS = {"num_attention_heads": 2, "attention_head_dim": HEAD}


def _text_to_image(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, 4, 2 * SIDE, 2 * SIDE),
        "encoder_hidden_states": cond("text", 1, TEXT, 12),
        "timestep": time(step),
    }


def _sd3(step: int) -> dict[str, Any]:
    return _text_to_image(step) | {"pooled_projections": cond("pooled", 1, 10)}


def _sd3_controlnet(step: int) -> dict[str, Any]:
    samples = [noise(step, 1, IMAGE, WIDTH, name=f"control {block}") for block in range(3)]
    return _sd3(step) | {"block_controlnet_hidden_states": samples}


def _sd3_skip_layers(step: int) -> dict[str, Any]:
    return _sd3(step) | {"skip_layers": [1]}


def _sized(step: int) -> dict[str, Any]:
    return _text_to_image(step) | {
        "target_size": torch.tensor([[48.0, 48.0]]),
        "crop_coords": torch.zeros(1, 2),
    }


def _cogview(step: int) -> dict[str, Any]:
    return _sized(step) | {"original_size": torch.tensor([[96.0, 64.0]])}


def _glm(step: int) -> dict[str, Any]:
    return _sized(step) | {
        "timestep": time(step) - 1,
        "prior_token_id": tokens("prior", 1, IMAGE),
        "prior_token_drop": torch.zeros(1, IMAGE, dtype=torch.bool),
    }


def _hidream(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, 4, 2 * SIDE, 2 * SIDE),
        "timesteps": time(step),
        "encoder_hidden_states_t5": cond("t5", 1, TEXT, 14),
        "encoder_hidden_states_llama3": cond("llama", LLAMA_LAYERS, 1, LLAMA_TEXT, 18),
        "pooled_embeds": cond("pooled", 1, 10),
    }


def _hunyuan(step: int) -> dict[str, Any]:
    return _text_to_image(step) | {
        "hidden_states": noise(step, 1, 4, SIDE, SIDE),
        "encoder_attention_mask": torch.tensor([[1] * (TEXT - 1) + [0]]),
    }


SD3 = HEADS | {
    "sample_size": 2 * SIDE,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "joint_attention_dim": 12,
    "caption_projection_dim": WIDTH,
    "pooled_projection_dim": 10,
    "pos_embed_max_size": 4,
}
SIZED = HEADS | {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "text_embed_dim": 12,
    "time_embed_dim": 20,
    "condition_dim": 8,
}
COGVIEW = SIZED | {"pos_embed_max_size": 4, "sample_size": 2 * SIDE}
GLM = SIZED | {"prior_vq_quantizer_codebook_size": 16}
HIDREAM = {
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 6,
    "caption_channels": [14, 18],
    "text_emb_dim": 10,
    "num_routed_experts": 2,
    "num_activated_experts": 1,
    "axes_dims_rope": (2, 2, 2),
    "max_resolution": (2 * SIDE, 2 * SIDE),
    "llama_layers": [0, 1, 2, 2, 2],
}
HUNYUAN = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": (1, 1),
    "num_layers": 3,
    "num_single_layers": 4,
    "num_refiner_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 12,
    "rope_axes_dim": (4, 4),
}


CASES = (
    Case("SD3Transformer2DModel", SD3, _sd3, notes="The last block returns None for the text."),
    Case(
        "SD3Transformer2DModel",
        SD3,
        _sd3_controlnet,
        variant="controlnet",
        notes="Nothing is added after the last block.",
    ),
    Case(
        "SD3Transformer2DModel",
        SD3,
        _sd3_skip_layers,
        variant="skip-layers",
        notes="Block 1 is never called.",
    ),
    Case(
        "SD3Transformer2DModel",
        SD3 | {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
        _sd3,
        variant="dual-attention",
        notes="Blocks 0 and 1 have a second attention, the last has not.",
    ),
    Case(
        "CogView3PlusTransformer2DModel",
        COGVIEW,
        _cogview,
        notes="Text and image enter block 0 as views of one tensor.",
    ),
    Case("CogView4Transformer2DModel", COGVIEW, _cogview),
    Case(
        "GlmImageTransformer2DModel",
        GLM,
        _glm,
        notes="Embedded prior tokens, a conditioning, are added to the image tokens before the blocks.",
    ),
    Case(
        "HiDreamImageTransformer2DModel",
        HIDREAM,
        _hidream,
        notes="Before each block Llama tokens of that block are appended to the text, after it cut off.",
    ),
    Case(
        "HunyuanImageTransformer2DModel",
        HUNYUAN,
        _hunyuan,
        notes="Without the second text encoder: its projection has a fixed width of 2048.",
    ),
)
