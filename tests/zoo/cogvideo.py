"""CogVideoX and other earlier video models."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time

# Latent video of 3 frames of 4x6: 18 patches of 2x2. 7 text tokens.
FRAMES, HEIGHT, WIDTH = 3, 4, 6
VIDEO, TEXT = 18, 7


def _rotary(length: int, size: int, halves: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of angles that turn neighbouring channels, or those of the two halves."""
    angles = cond("rotary", length, size // 2)
    angles = angles.repeat(1, 2) if halves else angles.repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def _mask(valid: int = 5) -> torch.Tensor:
    return (torch.arange(TEXT) < valid).unsqueeze(0)


def _video(step: int, frames: int = FRAMES, text: int = 12) -> dict[str, Any]:
    """Channels first, as most of these models want it."""
    return {
        "hidden_states": noise(step, 1, 4, frames, HEIGHT, WIDTH),
        "encoder_hidden_states": cond("text", 1, TEXT, text),
        "timestep": time(step),
    }


def _cogvideo(step: int) -> dict[str, Any]:
    return _video(step) | {
        "hidden_states": noise(step, 1, FRAMES, 4, HEIGHT, WIDTH),
        "timestep": time(step).long(),
    }


def _from_image(step: int, frames: int) -> torch.Tensor:
    """The latents and the given first frame, followed by nothing, as channels."""
    latents = noise(step, 1, frames, 4, HEIGHT, WIDTH)
    image = torch.zeros_like(latents)
    image[:, :1] = cond("first frame", 1, 1, 4, HEIGHT, WIDTH)
    return torch.cat([latents, image], dim=2)


def _cogvideo_15(step: int) -> dict[str, Any]:
    return _cogvideo(step) | {
        "hidden_states": _from_image(step, frames=2 * FRAMES),
        "ofs": torch.full((1,), 2.0),
        "image_rotary_emb": _rotary(VIDEO, 8),
    }


def _consisid(step: int) -> dict[str, Any]:
    return _cogvideo(step) | {
        "hidden_states": _from_image(step, frames=FRAMES),
        "image_rotary_emb": _rotary(VIDEO, 12),
        "id_cond": cond("identity", 1, 10),
        "id_vit_hidden": [cond(f"face {scale}", 1, 5, 8) for scale in range(2)],
    }


def _allegro(step: int) -> dict[str, Any]:
    sizes = (FRAMES, HEIGHT // 2, WIDTH // 2)
    axes = [torch.arange(size) for size in sizes]
    positions = torch.cartesian_prod(*axes).T.unsqueeze(1)
    tables = tuple(_rotary(size, 4, halves=True) for size in sizes)
    return _video(step) | {
        "encoder_attention_mask": _mask().long(),
        "image_rotary_emb": (tables, tuple(positions)),
    }


def _latte(step: int) -> dict[str, Any]:
    return _video(step, frames=5) | {"timestep": time(step).long(), "enable_temporal_attentions": True}


def _mochi(step: int) -> dict[str, Any]:
    return _video(step, text=24) | {"timestep": 1000.0 - time(step), "encoder_attention_mask": _mask()}


COGVIDEO = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 20,
    "text_embed_dim": 12,
    "num_layers": 3,
    "sample_width": WIDTH,
    "sample_height": HEIGHT,
    "sample_frames": 4 * (FRAMES - 1) + 1,
    "max_text_seq_length": TEXT,
}
COGVIDEO_15 = COGVIDEO | {
    "in_channels": 8,
    "patch_size_t": 2,
    "ofs_embed_dim": 20,
    "use_rotary_positional_embeddings": True,
    "patch_bias": False,
}
CONSISID = COGVIDEO | {
    "in_channels": 8,
    "attention_head_dim": 12,
    "num_layers": 4,
    "use_rotary_positional_embeddings": True,
    "is_train_face": True,
    "cross_attn_interval": 2,
    "cross_attn_dim_head": 4,
    "cross_attn_num_heads": 2,
    "LFE_id_dim": 10,
    "LFE_vit_dim": 8,
    "LFE_depth": 2,
    "LFE_dim_head": 4,
    "LFE_num_heads": 2,
    "LFE_num_id_token": 2,
    "LFE_num_querie": 3,
    "LFE_output_dim": 16,
    "LFE_ff_mult": 2,
    "LFE_num_scale": 2,
}
ALLEGRO = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "cross_attention_dim": 24,
    "sample_height": HEIGHT,
    "sample_width": WIDTH,
    "sample_frames": FRAMES,
    "caption_channels": 12,
}
LATTE = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 3,
    "cross_attention_dim": 16,
    "attention_bias": True,
    "sample_size": 8,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "caption_channels": 12,
    "video_length": 5,
}
MOCHI = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 3,
    "pooled_projection_dim": 10,
    "in_channels": 4,
    "text_embed_dim": 24,
    "time_embed_dim": 20,
}
EASYANIMATE = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "sample_width": WIDTH,
    "sample_height": HEIGHT,
    "num_layers": 3,
    "mmdit_layers": 2,
    "time_embed_dim": 20,
    "text_embed_dim": 12,
    "add_norm_text_encoder": True,
}


CASES = (
    Case(
        "CogVideoXTransformer3DModel",
        COGVIDEO,
        _cogvideo,
        notes="Both streams enter as slices of one tensor.",
    ),
    Case("CogVideoXTransformer3DModel", COGVIDEO_15, _cogvideo_15, variant="1.5"),
    Case(
        "ConsisIDTransformer3DModel",
        CONSISID,
        _consisid,
        notes="The output of a face module is added to the video after blocks 0 and 2.",
    ),
    Case("AllegroTransformer3DModel", ALLEGRO, _allegro),
    Case(
        "LatteTransformer3DModel",
        LATTE,
        _latte,
        notes="After each spatial block a temporal one on the same video with frames and patches swapped.",
    ),
    Case(
        "MochiTransformer3DModel",
        MOCHI,
        _mochi,
        notes="Text is narrower than video; the last block hands it back unchanged. Time runs upwards.",
    ),
    Case(
        "EasyAnimateTransformer3DModel",
        EASYANIMATE,
        _video,
        notes="The last block has no weights of its own for the text.",
    ),
)
