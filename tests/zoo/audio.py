"""Music, speech and sound."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time

# 11 sound tokens beside 7 text tokens; latents of 6 channels in models of width 16 or 24.
SOUND, TEXT, CHANNELS = 11, 7, 6


def _text_mask() -> torch.Tensor:
    """One prompt whose last token is padding."""
    return (torch.arange(TEXT) < TEXT - 1)[None]


def _ace_step(step: int) -> dict[str, Any]:
    frames = 2 * SOUND
    return {
        "hidden_states": noise(step, 1, frames, CHANNELS),
        "timestep": time(step, scale=1.0),
        "timestep_r": time(step, scale=1.0),
        "encoder_hidden_states": cond("text", 1, TEXT, 20),
        "context_latents": torch.cat([cond("source", 1, frames, CHANNELS), torch.ones(1, frames, CHANNELS)], dim=-1),
    }


def _longcat(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, SOUND, CHANNELS),
        "encoder_hidden_states": cond("text", 1, TEXT, 20),
        "encoder_attention_mask": _text_mask(),
        "timestep": time(step, scale=1.0),
        "attention_mask": torch.ones(1, SOUND, dtype=torch.bool),
        "latent_cond": torch.zeros(1, SOUND, CHANNELS),
    }


def _minimax_music(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, CHANNELS, SOUND),
        "timestep": 1.0 - time(step, scale=1.0),  # this model counts upwards
        "encoder_hidden_states": cond("frames", 1, SOUND, 20),
    }


def _minimax_depth(step: int) -> dict[str, Any]:
    return {"inputs_embeds": noise(step, 1, 4, 16)}


def _rotary(length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** -torch.arange(0, 1, 2 / width)
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _stable_audio(step: int) -> dict[str, Any]:
    start, end = cond("start", 1, 1, 10), cond("end", 1, 1, 10)
    return {
        "hidden_states": noise(step, 1, CHANNELS, SOUND),
        "timestep": time(step, scale=1.0),
        "encoder_hidden_states": torch.cat([cond("text", 1, TEXT, 10), start, end], dim=1),
        "global_hidden_states": torch.cat([start, end], dim=2),
        "rotary_embedding": _rotary(1 + SOUND, 4),
    }


def _stable_audio3(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, CHANNELS, SOUND),
        "timestep": time(step, scale=1.0),
        "encoder_hidden_states": cond("text", 1, TEXT, 20),
        "global_hidden_states": cond("duration", 1, 10),
        "encoder_attention_mask": _text_mask(),
    }


def _t5_film(step: int) -> dict[str, Any]:
    return {
        "encodings_and_masks": [
            (cond("notes", 1, TEXT, 16), _text_mask()),
            (cond("sound so far", 1, 5, 16), torch.ones(1, 5)),
        ],
        "decoder_input_tokens": noise(step, 1, SOUND, CHANNELS),
        "decoder_noise_time": time(step, scale=0.999),
    }


ACE_STEP = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "in_channels": 3 * CHANNELS,
    "audio_acoustic_hidden_dim": CHANNELS,
    "sliding_window": 3,
    "encoder_hidden_size": 20,
}

LONGCAT = {
    "dit_dim": 24,
    "dit_depth": 3,
    "dit_heads": 2,
    "dit_text_dim": 20,
    "latent_dim": CHANNELS,
    "ff_mult": 2.0,
}

MINIMAX_MUSIC = {
    "in_channels": CHANNELS,
    "condition_dim": 20,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "ff_inner_dim": 24,
    "rotary_dim": 4,
    "fourier_embedding_dim": 8,
}

MINIMAX_DEPTH = {
    "hidden_size": 16,
    "num_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "audio_vocab_size": 10,
    "num_codebooks": 5,
    "max_position_embeddings": 8,
}

STABLE_AUDIO = {
    "sample_size": SOUND,
    "in_channels": CHANNELS,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_attention_heads": 1,
    "out_channels": CHANNELS,
    "cross_attention_dim": 8,
    "time_proj_dim": 18,
    "global_states_input_dim": 20,
    "cross_attention_input_dim": 10,
}

STABLE_AUDIO3 = {
    "io_channels": CHANNELS,
    "embed_dim": 16,
    "depth": 3,
    "num_heads": 2,
    "cond_token_dim": 20,
    "global_cond_dim": 10,
    "local_add_cond_dim": CHANNELS + 1,
    "timestep_features_dim": 18,
    "ff_mult": 2.0,
    "num_memory_tokens": 3,
}

T5_FILM = {
    "input_dims": CHANNELS,
    "targets_length": SOUND,
    "d_model": 16,
    "num_layers": 3,
    "num_heads": 2,
    "d_kv": 8,
    "d_ff": 24,
}

CASES = (
    Case(
        "AceStepTransformer1DModel",
        ACE_STEP,
        _ace_step,
        notes="the mask alternates between blocks: windowed, none, windowed",
    ),
    Case(
        "LongCatAudioDiTTransformer",
        LONGCAT,
        _longcat,
        notes="the input of the stack is added to its output once more",
    ),
    Case(
        "MiniMaxMusic3Transformer1DModel",
        MINIMAX_MUSIC,
        _minimax_music,
        notes="conditioning has the length of the latents and joins their channels; the timestep is a token",
    ),
    Case(
        "MiniMaxMusic3RVQDepthDecoder",
        MINIMAX_DEPTH,
        _minimax_depth,
        notes="no denoiser: autoregressive, and its sequence really grows by one token each call",
    ),
    Case(
        "StableAudioDiTModel",
        STABLE_AUDIO,
        _stable_audio,
        notes="one token of duration and timestep stands before the sound tokens",
    ),
    Case(
        "StableAudio3DiTModel",
        STABLE_AUDIO3,
        _stable_audio3,
        notes="learned memory tokens stand before the sound tokens",
    ),
    Case(
        "T5FilmDecoder",
        T5_FILM,
        _t5_film,
        notes="blocks return a 1-tuple, the model a plain tensor",
    ),
)
