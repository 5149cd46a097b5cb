"""Image models that came early or stand alone: DiT, PixArt, HunyuanDiT, AuraFlow, Sana, PRX, OmniGen ..."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time, tokens

# 3x3 latent patches, 5 text tokens, two heads of 8 channels: lengths, their sums and the width all differ.
SIDE, TEXT, HEAD = 3, 5, 8
IMAGE, WIDTH = SIDE * SIDE, 2 * HEAD
HEADS = {"num_attention_heads": 2, "attention_head_dim": HEAD}
PATCHES = HEADS | {"in_channels": 4, "patch_size": 2, "sample_size": 2 * SIDE}


def angles(side: int, head: int) -> torch.Tensor:
    """The angles by which a rotary embedding turns each pair of channels, rows before columns."""
    grid = torch.arange(side).float()
    positions = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), dim=-1)
    return torch.kron(positions, 0.1 ** torch.arange(head // 4))


def _text_mask() -> torch.Tensor:
    """The last token is padding."""
    return torch.tensor([[1] * (TEXT - 1) + [0]])


def _latents(step: int) -> dict[str, Any]:
    return {"hidden_states": noise(step, 1, 4, 2 * SIDE, 2 * SIDE), "timestep": time(step)}


def _text(step: int) -> dict[str, Any]:
    return _latents(step) | {"encoder_hidden_states": cond("text", 1, TEXT, 12)}


def _dit(step: int) -> dict[str, Any]:
    return _latents(step) | {"class_labels": tokens("class", 1, vocabulary=7)}


def _pixart(step: int) -> dict[str, Any]:
    return _text(step) | {
        "encoder_attention_mask": _text_mask(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _prior(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, 12),
        "timestep": time(step),
        "proj_embedding": cond("pooled", 1, 12),
        "encoder_hidden_states": cond("text", 1, TEXT, 12),
        "attention_mask": _text_mask().bool(),
    }


def _hunyuan(step: int) -> dict[str, Any]:
    turns = angles(SIDE, HEAD).flatten(0, 1).repeat_interleave(2, dim=1)
    return _text(step) | {
        "text_embedding_mask": _text_mask(),
        "encoder_hidden_states_t5": cond("t5", 1, 6, 24),
        "text_embedding_mask_t5": torch.tensor([[1, 1, 1, 0, 0, 0]]),
        "image_meta_size": torch.tensor([[48.0, 48.0, 48.0, 48.0, 0.0, 0.0]]),
        "style": torch.tensor([0]),
        "image_rotary_emb": (turns.cos(), turns.sin()),
    }


def _hunyuan_controlnet(step: int) -> dict[str, Any]:
    return _hunyuan(step) | {"controlnet_block_samples": [noise(step, 1, IMAGE, WIDTH, name="control")]}


def _auraflow(step: int) -> dict[str, Any]:
    return _text(step) | {"timestep": time(step, scale=1.0)}


def _sana(step: int) -> dict[str, Any]:
    return _text(step) | {
        "hidden_states": noise(step, 1, 4, SIDE, SIDE),
        "encoder_attention_mask": _text_mask(),
    }


def _sana_controlnet(step: int) -> dict[str, Any]:
    samples = tuple(noise(step, 1, IMAGE, WIDTH, name=f"control {block}") for block in range(2))
    return _sana(step) | {"controlnet_block_samples": samples}


def _prx(step: int) -> dict[str, Any]:
    return _text(step) | {"timestep": time(step, scale=1.0), "attention_mask": _text_mask().bool()}


def _omnigen(step: int) -> dict[str, Any]:
    length = TEXT + 1 + IMAGE
    mask = torch.ones(1, length, length).tril()
    mask[:, -IMAGE:] = 1
    return _latents(step) | {
        "timestep": 1 - time(step, scale=1.0),
        "input_ids": tokens("text", 1, TEXT, vocabulary=11),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": mask,
        "position_ids": torch.arange(length)[None],
    }


DIT = PATCHES | {"out_channels": 8, "num_layers": 3, "num_embeds_ada_norm": 7}
PIXART = PATCHES | {
    "out_channels": 8,
    "num_layers": 3,
    "cross_attention_dim": WIDTH,
    "caption_channels": 12,
}
PRIOR = HEADS | {"num_layers": 3, "embedding_dim": 12, "num_embeddings": TEXT, "additional_embeddings": 4}
HUNYUAN = PATCHES | {
    "hidden_size": WIDTH,
    "num_layers": 4,
    "mlp_ratio": 2.0,
    "cross_attention_dim": 12,
    "cross_attention_dim_t5": 24,
    "pooled_projection_dim": 10,
    "text_len": TEXT,
    "text_len_t5": 6,
}
AURAFLOW = PATCHES | {
    "out_channels": 4,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 3,
    "joint_attention_dim": 12,
    "caption_projection_dim": WIDTH,
    "pos_embed_max_size": 16,
}
SANA = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 1,
    "sample_size": SIDE,
    "num_layers": 3,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": WIDTH,
    "caption_channels": 12,
}
PRX = {
    "in_channels": 4,
    "patch_size": 2,
    "context_in_dim": 12,
    "hidden_size": WIDTH,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 3,
    "axes_dim": [4, 4],
}
OMNIGEN = {
    "in_channels": 4,
    "patch_size": 2,
    "hidden_size": WIDTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_layers": 3,
    "pad_token_id": 0,
    "vocab_size": 11,
    "rope_scaling": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]},
    "pos_embed_max_size": 4,
}


SKIPS = "Needs an even number of blocks; the last takes the first one's output as `skip`, too."

CASES = (
    Case(
        "DiTTransformer2DModel",
        DIT,
        _dit,
        notes="The output layer uses the time and class embedding inside block 0.",
    ),
    Case("PixArtTransformer2DModel", PIXART, _pixart),
    Case(
        "PriorTransformer",
        PRIOR,
        _prior,
        notes="Denoises one vector: text, pooled text, time, vector and an answer token are one sequence.",
    ),
    Case("HunyuanDiT2DModel", HUNYUAN, _hunyuan, notes=SKIPS),
    Case(
        "HunyuanDiT2DModel",
        HUNYUAN,
        _hunyuan_controlnet,
        variant="controlnet",
        notes="The samples are added to `skip`, and forward empties the caller's list.",
    ),
    Case("AuraFlowTransformer2DModel", AURAFLOW, _auraflow),
    Case("SanaTransformer2DModel", SANA, _sana),
    Case(
        "SanaTransformer2DModel",
        SANA,
        _sana_controlnet,
        variant="controlnet",
        notes="Samples are added after the second and after the last block, not after the first.",
    ),
    Case("PRXTransformer2DModel", PRX, _prx),
    Case(
        "OmniGenTransformer2DModel",
        OMNIGEN,
        _omnigen,
        notes="The time is a token between text and image; no block takes it as an argument.",
    ),
)
