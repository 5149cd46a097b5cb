"""HunyuanVideo, its relatives and the video models built like it."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time

# Latent video of 3 frames of 4x6: 18 patches of 2x2. Of the 7 text tokens the last 2 are padding.
LATENTS = (1, 4, 3, 4, 6)
TEXT, PROMPT = 7, 5


def _mask(length: int = TEXT, valid: int = PROMPT) -> torch.Tensor:
    return (torch.arange(length) < valid).float().unsqueeze(0)


def _with_first_frame(latents: torch.Tensor, given: bool) -> torch.Tensor:
    """The latents, the first frame to start from (zeros if none is given) and its mask, as channels."""
    frames, mask = torch.zeros_like(latents), torch.zeros_like(latents[:, :1])
    if given:
        frames[:, :, :1] = cond("first frame", *latents[:, :, :1].shape)
        mask[:, :, :1] = 1.0
    return torch.cat([latents, frames, mask], dim=1)


def _hunyuan(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, *LATENTS),
        "timestep": time(step),
        "encoder_hidden_states": cond("text", 1, TEXT, 12),
        "encoder_attention_mask": _mask(),
        "pooled_projections": cond("pooled", 1, 10),
        "guidance": torch.full((1,), 6000.0),
    }


def _token_replace(step: int) -> dict[str, Any]:
    latents = noise(step, *LATENTS)
    latents[:, :, :1] = cond("first frame", *latents[:, :, :1].shape)
    return _hunyuan(step) | {"hidden_states": latents}


def _framepack(step: int) -> dict[str, Any]:
    prefix, window, recent, older, oldest = torch.split(torch.arange(11), [1, 3, 1, 2, 4])
    _, channels, _, height, width = LATENTS
    return _hunyuan(step) | {
        "image_embeds": cond("image", 1, 3, 14),
        "indices_latents": window,
        "latents_clean": cond("clean", 1, channels, 2, height, width),
        "indices_latents_clean": torch.cat([prefix, recent]),
        "latents_history_2x": cond("older", 1, channels, 2, height, width),
        "indices_latents_history_2x": older,
        "latents_history_4x": cond("oldest", 1, channels, 4, height, width),
        "indices_latents_history_4x": oldest,
    }


def _hunyuan_15(step: int, image: bool = False) -> dict[str, Any]:
    return {
        "hidden_states": _with_first_frame(noise(step, 1, 4, 3, 2, 3), given=image),
        "timestep": time(step),
        "encoder_hidden_states": cond("text", 1, TEXT, 12),
        "encoder_attention_mask": _mask(),
        "encoder_hidden_states_2": cond("glyphs", 1, 5, 14),
        "encoder_attention_mask_2": _mask(5, 2),
        "image_embeds": cond("image", 1, 3, 10) if image else torch.zeros(1, 3, 10),
    }


def _hunyuan_15_image(step: int) -> dict[str, Any]:
    return _hunyuan_15(step, image=True) | {"timestep_r": time(step + 1)}


def _motif(step: int, image: bool = False) -> dict[str, Any]:
    return {
        "hidden_states": _with_first_frame(noise(step, *LATENTS), given=image),
        "timestep": time(step),
        "encoder_hidden_states": cond("text", 1, TEXT, 12),
        "encoder_attention_mask": _mask().bool(),
    }


def _motif_image(step: int) -> dict[str, Any]:
    return _motif(step, image=True) | {"image_embeds": cond("image", 1, 4, 10)}


def _minimax(step: int) -> dict[str, Any]:
    """One sequence of text, sound and video rows; sound has a schedule of its own. Time runs from 0 to 1."""
    text, audio, video = torch.split(torch.arange(5 + 6 + 18), [5, 6, 18])
    tags = torch.cat([torch.full_like(text, 1), torch.full_like(audio, 2), torch.full_like(video, 0)])
    now = 1.0 - time(step, scale=1.0)
    timestep, indices = torch.unique(torch.where(tags == 2, now / 2, now), return_inverse=True)
    frames, rows, columns = (torch.arange(size).double() for size in (3, 2, 3))
    still = torch.zeros(1, dtype=torch.float64)
    return {
        "hidden_states": noise(step, 1, len(video), 8),
        "audio_hidden_states": noise(step, 1, len(audio), 10, name="audio"),
        "encoder_hidden_states": cond("text", 1, len(text), 12),
        "timestep": timestep,
        "timestep_indices": indices,
        "token_tags": tags,
        "position_ids": torch.cat(
            [
                torch.cartesian_prod(text.double(), still, still),
                torch.cartesian_prod(5 + torch.arange(len(audio)).double(), still, still),
                torch.cartesian_prod(5 + 4 * frames, rows, columns),
            ]
        ),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


BASE = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "mlp_ratio": 2.0,
    "text_embed_dim": 12,
    "rope_axes_dim": (2, 2, 4),
}
HUNYUAN = BASE | {
    "num_refiner_layers": 2,
    "num_layers": 3,
    "num_single_layers": 4,
    "pooled_projection_dim": 10,
    "guidance_embeds": True,
}
FRAMEPACK = HUNYUAN | {"has_image_proj": True, "image_proj_dim": 14, "has_clean_x_embedder": True}
HUNYUAN_15 = BASE | {
    "in_channels": 9,
    "num_refiner_layers": 2,
    "num_layers": 3,
    "text_embed_2_dim": 14,
    "image_embed_dim": 10,
}
MOTIF = BASE | {
    "in_channels": 9,
    "num_layers": 2,
    "num_single_layers": 5,
    "num_decoder_layers": 2,
    "enable_text_cross_attention_dual": True,
    "enable_text_cross_attention_single": True,
}
MINIMAX = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 24,
    "num_layers": 3,
    "num_refiner_layers": 2,
    "ffn_dim": 40,
    "in_channels": 2,
    "audio_in_channels": 10,
    "text_dim": 12,
    "time_embed_hidden_dim": 20,
    "time_embed_dim": 14,
    "rope_freq_dim": 2,
}


MOTIF_NOTES = (
    "One list in two parts: the last 2 single blocks are a decoder that starts again from the embedded "
    "latents and takes the video of the first 3 in place of the text."
)
HUNYUAN_15_NOTES = "4.3 million parameters: the second text projection is 2048 wide whatever the config says."

CASES = (
    Case(
        "HunyuanVideoTransformer3DModel",
        HUNYUAN,
        _hunyuan,
        notes="The token refiner gets the timestep: its output moves though its input does not.",
    ),
    Case(
        "HunyuanVideoTransformer3DModel",
        HUNYUAN | {"image_condition_type": "token_replace"},
        _token_replace,
        variant="token-replace",
        notes="The first frame of the latents is the given image: a third of the tokens never moves.",
    ),
    Case(
        "HunyuanVideoFramepackTransformer3DModel",
        FRAMEPACK,
        _framepack,
        notes="The video sequence starts with the tokens of earlier frames, which are given.",
    ),
    Case(
        "HunyuanVideo15Transformer3DModel",
        HUNYUAN_15,
        _hunyuan_15,
        notes=HUNYUAN_15_NOTES,
    ),
    Case(
        "HunyuanVideo15Transformer3DModel",
        HUNYUAN_15 | {"use_meanflow": True},
        _hunyuan_15_image,
        variant="image-to-video",
        notes=HUNYUAN_15_NOTES,
    ),
    Case("MotifVideoTransformer3DModel", MOTIF, _motif, notes=MOTIF_NOTES),
    Case(
        "MotifVideoTransformer3DModel",
        MOTIF | {"image_embed_dim": 10},
        _motif_image,
        variant="image-to-video",
        notes=MOTIF_NOTES,
    ),
    Case(
        "MiniMaxH3Transformer3DModel",
        MINIMAX,
        _minimax,
        notes="Gets each distinct timestep once: one at step 0, where sound and video agree, then two.",
    ),
)
