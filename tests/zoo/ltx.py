"""LTX-Video, LTX-2 with sound, and the SANA-WM refiner made from it."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time

# 3 frames of 2x3 latents, 5 audio frames, 7 text tokens of which some are padding.
FRAMES, HEIGHT, WIDTH = 3, 2, 3
VIDEO, AUDIO, TEXT, PROMPT = FRAMES * HEIGHT * WIDTH, 5, 7, 4
VIDEO_DIM, AUDIO_DIM = 16, 8
LAYERS = 3


def _video(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, VIDEO, 4),
        "encoder_hidden_states": cond("text", 1, TEXT, 12),
        "timestep": time(step),
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
    }


def _ltx(step: int) -> dict[str, Any]:
    return _video(step) | {
        "encoder_attention_mask": (torch.arange(TEXT) < PROMPT).long().unsqueeze(0),
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def _ltx2(step: int) -> dict[str, Any]:
    return _video(step) | {
        "audio_hidden_states": noise(step, 1, AUDIO, 6, name="audio"),
        "audio_encoder_hidden_states": cond("audio text", 1, TEXT, 12),
        "sigma": time(step),
        "encoder_attention_mask": torch.ones(1, TEXT),
        "audio_encoder_attention_mask": torch.ones(1, TEXT),
        "fps": 24.0,
        "audio_num_frames": AUDIO,
    }


def _ltx23(step: int) -> dict[str, Any]:
    return _ltx2(step) | {
        "encoder_hidden_states": cond("text", 1, TEXT, VIDEO_DIM),
        "audio_encoder_hidden_states": cond("audio text", 1, TEXT, AUDIO_DIM),
        "use_cross_timestep": True,
    }


def _rotary(name: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = cond(name, 1, length, VIDEO_DIM // 2).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def _refiner(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, VIDEO, 4),
        "encoder_hidden_states": cond("text", 1, TEXT, 12),
        "timestep": time(step, VIDEO, scale=909.0).unsqueeze(0),
        "video_rotary_emb": _rotary("frames", VIDEO),
        "encoder_attention_mask": (torch.arange(TEXT) >= TEXT - PROMPT).long().unsqueeze(0),
    }


def _refiner_chunk(step: int) -> dict[str, Any]:
    """A later chunk: its queries also see the first frame and the frames of the chunk before."""
    from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

    cache = SanaWMRefinerKVCache(LAYERS)
    frame = HEIGHT * WIDTH
    cache.sink_pe = _rotary("sink", frame)
    for index, layer in enumerate(cache.layer_caches):
        first, before = (1, frame, VIDEO_DIM), (1, VIDEO, VIDEO_DIM)
        layer.store_sink(cond(f"sink keys {index}", *first), cond(f"sink values {index}", *first))
        layer.store_history(cond(f"past keys {index}", *before), cond(f"past values {index}", *before))
    return _refiner(step) | {"kv_cache": cache, "kv_cache_mode": "inject"}


LTX = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": VIDEO_DIM // 2,
    "cross_attention_dim": VIDEO_DIM,
    "num_layers": LAYERS,
    "caption_channels": 12,
}
LTX2 = LTX | {
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": AUDIO_DIM // 2,
    "audio_cross_attention_dim": AUDIO_DIM,
}
LTX23 = LTX2 | {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "perturbed_attn": True,
    "rope_type": "split",
    "use_prompt_embeddings": False,
}


REFINER_NOTES = "The audio half of the weights is never used."

CASES = (
    Case("LTXVideoTransformer3DModel", LTX, _ltx),
    Case("LTX2VideoTransformer3DModel", LTX2, _ltx2),
    Case(
        "LTX2VideoTransformer3DModel",
        LTX23,
        _ltx23,
        variant="2.3",
        notes="Prompts come as wide as the streams; keys and values of the text know the timestep.",
    ),
    Case("SanaWMLTX2RefinerTransformer3DModel", LTX2, _refiner, notes=REFINER_NOTES),
    Case(
        "SanaWMLTX2RefinerTransformer3DModel",
        LTX2,
        _refiner_chunk,
        variant="kv-cache",
        notes=f"{REFINER_NOTES} Each block gets its own cache of keys and values as an object.",
    ),
)
