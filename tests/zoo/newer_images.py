"""Newer image models with one sequence for text and image: Krea 2, Ideogram 4, ERNIE-Image."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time
from .flux import COLUMNS, IMAGE, ROWS, TEXT, positions


def _krea2(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, IMAGE, 4),
        "encoder_hidden_states": cond("layers of the text encoder", 1, TEXT, 3, 12),
        "timestep": time(step, scale=1.0),
        "position_ids": torch.cat([torch.zeros(TEXT, 3), positions(1, ROWS, COLUMNS)]),
        "encoder_attention_mask": torch.tensor([[True] * 4 + [False] * (TEXT - 4)]),
    }


def _ideogram4(step: int) -> dict[str, Any]:
    """A packed sequence of 2 padding, 4 text and 20 image tokens; time runs from 0 to 1 here."""
    pad, text = [0] * 2, [3] * (TEXT - 2)
    text_positions = torch.arange(len(text))[:, None].expand(-1, 3)
    image_positions = positions(1, ROWS, COLUMNS).long() + 65536
    features = torch.zeros(1, TEXT + IMAGE, 12)
    features[:, len(pad) : TEXT] = cond("text", 1, len(text), 12)
    return {
        "hidden_states": torch.cat([torch.zeros(1, TEXT, 4), noise(step, 1, IMAGE, 4)], dim=1),
        "encoder_hidden_states": features,
        "timestep": 1.0 - time(step, scale=1.0),
        "position_ids": torch.cat([torch.zeros(len(pad), 3).long(), text_positions, image_positions])[None],
        "segment_ids": torch.tensor([[-1] * len(pad) + [1] * (len(text) + IMAGE)]),
        "indicator": torch.tensor([pad + text + [2] * IMAGE]),
    }


def _ernie(step: int) -> dict[str, Any]:
    """Both halves of a guided batch, in which the empty prompt comes first and is padded."""
    return {
        "hidden_states": noise(step, 1, 4, ROWS, COLUMNS).repeat(2, 1, 1, 1),
        "timestep": time(step, batch=2),
        "text_bth": cond("text", 2, TEXT, 12),
        "text_lens": torch.tensor([2, TEXT]),
    }


KREA2 = {
    "in_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "timestep_embed_dim": 32,
    "text_hidden_dim": 12,
    "num_text_layers": 3,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 18,
    "num_layerwise_text_blocks": 2,
    "num_refiner_text_blocks": 3,
    "axes_dims_rope": (2, 2, 4),
}
IDEOGRAM4 = {
    "in_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "adaln_dim": 10,
    "llm_features_dim": 12,
    "mrope_section": (2, 1, 1),
}
ERNIE = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 24,
    "text_in_dim": 12,
    "rope_axes_dim": (2, 2, 4),
}


CASES = (
    Case(
        "Krea2Transformer2DModel",
        KREA2,
        _krea2,
        notes="the layerwise blocks take text tokens as the batch and the encoder's layers as the sequence",
    ),
    Case(
        "Ideogram4Transformer2DModel",
        IDEOGRAM4,
        _ideogram4,
        notes="text and image are added, each zero where the other has its tokens",
    ),
    Case(
        "ErnieImageTransformer2DModel",
        ERNIE,
        _ernie,
        notes="the sequence is the first axis, the batch the second",
    ),
)
