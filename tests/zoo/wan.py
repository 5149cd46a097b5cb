"""Wan and the models made from it."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time

# Latents of 6 channels and 8x10 pixels in patches of 2x2: 20 tokens in a frame, 60 in three frames.
LATENT, SIZE, FRAME = 6, (8, 10), 20
CONDITION = 4 + LATENT
HEADS, HEAD_WIDTH, TEXT_WIDTH, IMAGE_WIDTH = 2, 12, 14, 18
WIDTH = HEADS * HEAD_WIDTH


def _text(step: int, tokens: int = 11) -> dict[str, Any]:
    return {"timestep": time(step), "encoder_hidden_states": cond("text", 1, tokens, TEXT_WIDTH)}


def _wan(step: int, frames: int = 3) -> dict[str, Any]:
    return _text(step) | {"hidden_states": noise(step, 1, LATENT, frames, *SIZE)}


def _image_to_video(step: int, frames: int = 3) -> dict[str, Any]:
    latents = noise(step, 1, LATENT, frames, *SIZE)
    # The attention takes the last 512 tokens for text, whatever the configuration.
    return _text(step, tokens=512) | {
        "hidden_states": torch.cat([latents, cond("mask, first frame", 1, CONDITION, frames, *SIZE)], dim=1),
        "encoder_hidden_states_image": cond("image", 1, 5, IMAGE_WIDTH),
    }


def _ti2v(step: int) -> dict[str, Any]:
    latents = noise(step, 1, LATENT, 3, *SIZE)
    latents[:, :, :1] = cond("first frame", 1, LATENT, 1, *SIZE)
    return _wan(step) | {
        "hidden_states": latents,
        "timestep": torch.cat([torch.zeros(FRAME), time(step, 2 * FRAME)])[None],
    }


def _diffusion_forcing(step: int) -> dict[str, Any]:
    return _wan(step, frames=4) | {
        "timestep": torch.cat([time(step + 1, 2), time(step, 2)])[None],
        "enable_diffusion_forcing": True,
        "fps": [1],
    }


def _chrono_edit(step: int) -> dict[str, Any]:
    return _image_to_video(step, frames=2)


def _vace(step: int) -> dict[str, Any]:
    return _wan(step) | {
        "control_hidden_states": cond("control", 1, VACE["vace_in_channels"], 3, *SIZE),
        "control_hidden_states_scale": torch.tensor([1.0, 0.5]),
    }


def _animate(step: int) -> dict[str, Any]:
    return _image_to_video(step, frames=4) | {
        "pose_hidden_states": cond("pose", 1, LATENT, 3, *SIZE),
        "face_pixel_values": cond("face", 1, 3, 9, 16, 16),
    }


def _animate_2(step: int) -> dict[str, Any]:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    cache = WanAnimate2KVCache(ANIMATE_2["num_layers"])
    for number, layer in enumerate(cache.layer_caches):
        shape = 1, 2 * FRAME, HEADS, HEAD_WIDTH
        layer.store(cond(f"reference keys {number}", *shape), cond(f"reference values {number}", *shape))
    return {
        "hidden_states": [noise(step, LATENT, 3, *SIZE)],
        "timestep": time(step),
        "encoder_hidden_states": [cond("text", 11, TEXT_WIDTH)],
        "condition_latents": [cond("mask and reference", CONDITION, 3, *SIZE)],
        "kv_cache": cache,
        "kv_cache_mode": "cached",
        "seq_len": 3 * FRAME,
        "reference_grid_sizes": torch.tensor([[2, 4, 5]]),
        "origin_len": 5,
        "origin_area": [8 * side for side in SIZE],
    }


WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_WIDTH,
    "in_channels": LATENT,
    "out_channels": LATENT,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 32,
    "ffn_dim": 44,
    "num_layers": 3,
    "rope_max_seq_len": 16,
}
IMAGE_TO_VIDEO = WAN | {
    "in_channels": LATENT + CONDITION,
    "image_dim": IMAGE_WIDTH,
    "added_kv_proj_dim": WIDTH,
}
VACE = WAN | {"num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 28}
ANIMATE = IMAGE_TO_VIDEO | {
    "latent_channels": LATENT,
    "num_layers": 4,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 9,
    "face_encoder_hidden_dim": 8,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}
ANIMATE_2: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "text_len": 13,
    "in_dim": LATENT + CONDITION,
    "dim": WIDTH,
    "ffn_dim": 44,
    "freq_dim": 32,
    "text_dim": TEXT_WIDTH,
    "out_dim": LATENT,
    "num_heads": HEADS,
    "num_layers": 3,
    "use_img_emb": False,
}

CASES = (
    Case("WanTransformer3DModel", WAN, _wan),
    Case("WanTransformer3DModel", IMAGE_TO_VIDEO, _image_to_video, variant="image-to-video"),
    Case(
        "WanTransformer3DModel",
        WAN,
        _ti2v,
        variant="ti2v",
        notes="the tokens of the first frame are the given image, at timestep 0",
    ),
    Case("SkyReelsV2Transformer3DModel", WAN, _wan),
    Case(
        "SkyReelsV2Transformer3DModel",
        WAN | {"inject_sample_info": True, "num_frame_per_block": 2},
        _diffusion_forcing,
        variant="diffusion-forcing",
        notes="a timestep for each frame, the later frames one step behind; causal mask over frames",
    ),
    Case("ChronoEditTransformer3DModel", IMAGE_TO_VIDEO, _chrono_edit),
    Case(
        "WanVACETransformer3DModel",
        VACE,
        _vace,
        notes="vace block 0 adds the noisy tokens to the control stream; hints go in after blocks 0 and 2",
    ),
    Case(
        "WanAnimateTransformer3DModel",
        ANIMATE,
        _animate,
        notes="face_adapter is called after blocks 0 and 2",
    ),
    Case(
        "WanAnimate2Transformer3DModel",
        ANIMATE_2,
        _animate_2,
        notes="flex attention over a cache of reference keys; no image embedder, its width is fixed at 1280",
    ),
)
