"""Kandinsky 5 and 6: video, video with sound, and super-resolution."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time

# Three frames of 2x3 patches and 9 sound frames beside 7 text tokens. The super-resolution model needs whole
# tiles of 8x8 tokens: two frames of two tiles.
VIDEO = (3, 4, 6)
TILES = (2, 8, 16)
CHANNELS, SOUND, TEXT = 4, 9, 7


def _conditioned(latents: torch.Tensor) -> torch.Tensor:
    """Latents in the layout (latent, latent to continue, mask of what is given), with nothing given."""
    return torch.cat([latents, torch.zeros_like(latents), torch.zeros_like(latents[..., :1])], dim=-1)


def _common(step: int) -> dict[str, Any]:
    return {
        "hidden_states": _conditioned(noise(step, 1, *VIDEO, CHANNELS)),
        "encoder_hidden_states": cond("text", 1, TEXT, 20),
        "pooled_projections": cond("pooled", 1, 10),
        "timestep": time(step),
    }


def _kandinsky5(step: int) -> dict[str, Any]:
    frames, height, width = VIDEO
    return _common(step) | {
        "visual_rope_pos": [torch.arange(frames), torch.arange(height // 2), torch.arange(width // 2)],
        "text_rope_pos": torch.arange(TEXT),
        "scale_factor": (1.0, 2.0, 2.0),
    }


def _kandinsky6_silent(step: int) -> dict[str, Any]:
    return _common(step) | {"encoder_attention_mask": (torch.arange(TEXT) < TEXT - 1)[None]}


def _kandinsky6(step: int) -> dict[str, Any]:
    return _kandinsky6_silent(step) | {"audio_hidden_states": noise(step, 1, SOUND, 6, name="sound")}


def _kandinsky6_sr(step: int) -> dict[str, Any]:
    return {"hidden_states": _conditioned(noise(step, 1, *TILES, CHANNELS)), "timestep": time(step)}


VISUAL = {
    "in_visual_dim": CHANNELS,
    "out_visual_dim": CHANNELS,
    "time_dim": 12,
    "model_dim": 16,
    "ff_dim": 28,
    "num_visual_blocks": 3,
    "axes_dims": (4, 2, 2),
}
KANDINSKY5 = VISUAL | {"in_text_dim": 20, "in_text_dim2": 10, "num_text_blocks": 2, "visual_cond": True}
KANDINSKY6 = KANDINSKY5 | {
    "in_audio_dim": 6,
    "out_audio_dim": 6,
    "model_dim_a": 24,
    "time_dim_a": 14,
    "ff_dim_a": 30,
    "text_token_padding": True,
    "ca_rope": True,
    "cross_gates": True,
    "fix_modulation": True,
    "visual_token_type_num_embeddings": 2,
}
KANDINSKY6_SR = VISUAL | {"out_visual_dim": 2 * CHANNELS, "nabla_window": (1, 1, 1)}


CASES = (
    Case(
        "Kandinsky5Transformer3DModel",
        KANDINSKY5,
        _kandinsky5,
        notes="attention rounds query and key to bfloat16 at any precision of the model",
    ),
    Case(
        "Kandinsky6Transformer3DModel",
        KANDINSKY6,
        _kandinsky6,
        notes="two denoised streams of different width, each with its own text stack",
    ),
    Case(
        "Kandinsky6Transformer3DModel",
        KANDINSKY6,
        _kandinsky6_silent,
        variant="no-audio",
        notes="blocks take and return None as the audio stream; the audio text stack runs for nothing",
    ),
    Case(
        "Kandinsky6SRTransformer3DModel",
        KANDINSKY6_SR,
        _kandinsky6_sr,
        notes="no text; flex attention with a block mask computed from query and key",
    ),
)
