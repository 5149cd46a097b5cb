"""World models for video: Cosmos, Cosmos 3, Sana-Video and Sana-WM."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time, tokens

# Three frames of 2x3 patches, 18 video tokens, beside 7 text tokens.
FRAMES, HEIGHT, WIDTH = 3, 4, 6
VIDEO, TEXT = 18, 7
CHANNELS, HIDDEN = 4, 24


def _text_mask() -> torch.Tensor:
    """One prompt whose last token is padding."""
    return (torch.arange(TEXT) < TEXT - 1).long()[None]


def _after_first_frame(step: int, height: int, width: int) -> torch.Tensor:
    """A video whose first frame is given and stays clean."""
    first = cond("first frame", 1, CHANNELS, 1, height, width)
    return torch.cat([first, noise(step, 1, CHANNELS, FRAMES - 1, height, width)], dim=2)


def _cosmos(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, CHANNELS, FRAMES, HEIGHT, WIDTH),
        "timestep": time(step, scale=1.0),
        "encoder_hidden_states": cond("text", 1, TEXT, 20),
        "fps": 16,
    }


def _cosmos_transfer(step: int) -> dict[str, Any]:
    given = torch.zeros(1, 1, FRAMES, 1, 1)
    given[:, :, 0] = 1
    return {
        "hidden_states": _after_first_frame(step, HEIGHT, WIDTH),
        "timestep": 0.1 * given + (1 - given) * time(step, scale=1.0),
        "encoder_hidden_states": cond("text", 1, TEXT, 28),
        "block_controlnet_hidden_states": [noise(step, 1, VIDEO, HIDDEN, name=f"control {block}") for block in (0, 2)],
        "condition_mask": given.expand(-1, -1, -1, HEIGHT, WIDTH),
    }


def _cosmos_image_context(step: int) -> dict[str, Any]:
    contexts = (cond("text", 1, TEXT, 20), cond("image", 1, 5, 10))
    return _cosmos(step) | {"encoder_hidden_states": contexts}


def _cosmos3(step: int) -> dict[str, Any]:
    text = torch.arange(TEXT)
    grid = torch.cartesian_prod(torch.arange(FRAMES), torch.arange(HEIGHT // 2), torch.arange(WIDTH // 2)).T
    video = TEXT + torch.arange(VIDEO)
    return {
        "input_ids": tokens("text", TEXT),
        "text_indexes": text,
        "position_ids": torch.cat([text.expand(3, -1), grid + torch.tensor([[100], [0], [0]])], dim=1),
        "und_len": TEXT,
        "sequence_length": TEXT + VIDEO,
        "vision_tokens": [noise(step, 1, CHANNELS, FRAMES, HEIGHT, WIDTH)],
        "vision_token_shapes": [(FRAMES, HEIGHT // 2, WIDTH // 2)],
        "vision_sequence_indexes": video,
        "vision_mse_loss_indexes": video,
        "vision_timesteps": time(step, batch=VIDEO),
        "vision_noisy_frame_indexes": [torch.arange(FRAMES)],
    }


def _sana_video(step: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, 1, CHANNELS, FRAMES, HEIGHT, WIDTH),
        "encoder_hidden_states": cond("text", 1, TEXT, 20),
        "timestep": time(step),
        "encoder_attention_mask": _text_mask(),
    }


def _cameras() -> torch.Tensor:
    """A pinhole camera that walks forwards: a flat 4x4 pose and (fx, fy, cx, cy) for each frame."""
    poses = torch.eye(4).repeat(FRAMES, 1, 1)
    poses[:, 2, 3] = 0.1 * torch.arange(FRAMES)
    lens = torch.tensor([2.0, 2.0, 1.5, 1.0]).expand(FRAMES, -1)
    return torch.cat([poses.flatten(1), lens], dim=1)[None]


def _sana_wm(step: int) -> dict[str, Any]:
    height, width = HEIGHT // 2, WIDTH // 2  # patches of one latent pixel
    timestep = time(step).expand(1, 1, FRAMES).clone()
    timestep[..., 0] = 0
    return {
        "hidden_states": _after_first_frame(step, height, width),
        "timestep": timestep,
        "encoder_hidden_states": cond("text", 1, 1, TEXT, 20),
        "mask": _text_mask(),
        "data_info": {"img_hw": torch.tensor([[64.0, 96.0]])},
        "camera_conditions": _cameras(),
        "chunk_plucker": cond("rays", 1, 6, FRAMES, height, width),
    }


COSMOS = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "num_attention_heads": 2,
    "attention_head_dim": HIDDEN // 2,
    "num_layers": 3,
    "mlp_ratio": 2.0,
    "text_embed_dim": 20,
    "adaln_lora_dim": 6,
    "max_size": (4, 8, 8),
    "concat_padding_mask": False,  # would need torchvision
}
COSMOS_TRANSFER = COSMOS | {
    "in_channels": CHANNELS + 1,
    "extra_pos_embed_type": None,
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": 28,
    "encoder_hidden_states_channels": 20,
    "controlnet_block_every_n": 2,
}
COSMOS_IMAGE_CONTEXT = COSMOS | {
    "img_context_dim_in": 10,
    "img_context_num_tokens": 5,
    "img_context_dim_out": HIDDEN,
}

COSMOS3 = {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 40,
    "latent_channel": CHANNELS,
    "latent_patch_size": 2,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "patch_latent_dim": 4 * CHANNELS,
    "vocab_size": 16,
    "rope_axes_dim": (4, 2, 2),
}

SANA_VIDEO = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "num_attention_heads": 2,
    "attention_head_dim": HIDDEN // 2,
    "num_layers": 3,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": HIDDEN // 2,
    "cross_attention_dim": HIDDEN,
    "caption_channels": 20,
    "rope_max_seq_len": 16,
}

SANA_WM = {
    "in_channels": CHANNELS,
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "softmax_every_n": 2,
    "linear_head_dim": 16,
    "chunk_plucker_channels": 6,
    "chunk_plucker_post_attn_blocks": 3,
    "caption_channels": 20,
}

CASES = (
    Case("CosmosTransformer3DModel", COSMOS, _cosmos),
    Case(
        "CosmosTransformer3DModel",
        COSMOS_TRANSFER,
        _cosmos_transfer,
        variant="controlnet",
        notes="control is added inside the blocks; a timestep per frame makes embeddings shaped like tokens",
    ),
    Case(
        "CosmosTransformer3DModel",
        COSMOS_IMAGE_CONTEXT,
        _cosmos_image_context,
        variant="image-context",
        notes="encoder_hidden_states is a tuple (text, image), in the model and in the blocks",
    ),
    Case(
        "Cosmos3OmniTransformer",
        COSMOS3,
        _cosmos3,
        notes="streams without a batch dimension; output is a list; text attends only to text",
    ),
    Case("SanaVideoTransformer3DModel", SANA_VIDEO, _sana_video),
    Case(
        "SanaWMTransformer3DModel",
        SANA_WM,
        _sana_wm,
        notes="the first latent frame is given and never denoised; every second block has softmax attention",
    ),
)
