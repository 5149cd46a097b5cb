"""AnyFlow and Helios: video models that go on from earlier frames."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time

# Latents of 6 channels and 8x12 pixels in patches of 2x2: 24 tokens in a frame, 72 in three frames.
LATENT, SIZE, FRAME, FRAMES = 6, (8, 12), 24, 3
HEADS, HEAD_WIDTH, TEXT_WIDTH = 2, 12, 14
# FAR: three chunks are done, of which the first is kept at a quarter of its tokens and the others in full.
CHUNKS, FULL_CHUNKS = [1, FRAMES, FRAMES, FRAMES], 3
# Helios: frames of the long, middle and short history.
HISTORY = 4, 2, 1


def _text() -> dict[str, Any]:
    return {"encoder_hidden_states": cond("text", 1, 10, TEXT_WIDTH)}


def _any_flow(step: int) -> dict[str, Any]:
    return _text() | {
        "hidden_states": noise(step, 1, FRAMES, LATENT, *SIZE),
        "timestep": time(step, FRAMES)[None],
        "r_timestep": time(step + 1, FRAMES)[None],
    }


def _far_cache(layer: int) -> dict[str, torch.Tensor]:
    lengths = {"full_cache": FULL_CHUNKS * FRAMES * FRAME, "compressed_cache": 2 * FRAMES * FRAME // 4}
    return {name: cond(f"{name} {layer}", 2, 1, HEADS, length, HEAD_WIDTH) for name, length in lengths.items()}


def _far(step: int) -> dict[str, Any]:
    return _any_flow(step) | {
        "chunk_partition": CHUNKS,
        "kv_cache": {layer: _far_cache(layer) for layer in range(FAR["num_layers"])},
        "kv_cache_flag": {"num_cached_chunks": 3, "is_cache_step": False},
    }


def _helios(step: int) -> dict[str, Any]:
    frames = torch.arange(1 + sum(HISTORY) + FRAMES)
    first, long, middle, short, current = torch.split(frames, [1, *HISTORY, FRAMES])
    return _text() | {
        "hidden_states": noise(step, 1, LATENT, FRAMES, *SIZE),
        "timestep": time(step),
        "indices_hidden_states": current[None],
        "indices_latents_history_short": torch.cat([first, short])[None],
        "indices_latents_history_mid": middle[None],
        "indices_latents_history_long": long[None],
        "latents_history_short": cond("first and last frame", 1, LATENT, 2, *SIZE),
        "latents_history_mid": cond("middle history", 1, LATENT, 2, *SIZE),
        "latents_history_long": cond("long history", 1, LATENT, 4, *SIZE),
    }


BASE: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_WIDTH,
    "in_channels": LATENT,
    "out_channels": LATENT,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 32,
    "ffn_dim": 44,
    "num_layers": 3,
}
ANY_FLOW = BASE | {"rope_max_seq_len": 16}
FAR = ANY_FLOW | {
    "compressed_patch_size": (1, 4, 4),
    "full_chunk_limit": FULL_CHUNKS,
    "chunk_partition": tuple(CHUNKS),
}

CASES = (
    Case("AnyFlowTransformer3DModel", ANY_FLOW, _any_flow),
    Case(
        "AnyFlowFARTransformer3DModel",
        FAR,
        _far,
        notes="the earlier chunks are keys and values in kv_cache, not tokens; flex attention",
    ),
    Case(
        "HeliosTransformer3DModel",
        BASE | {"rope_dim": (4, 4, 4)},
        _helios,
        notes="the tokens of earlier frames stand before the noisy ones",
    ),
)
