"""Qwen-Image and the models after it: Nucleus, JoyImage."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, seeded, time

# A grid of 4x5 latent patches and 6 text tokens of 12 channels; the blocks are 16 channels wide.
GRID, IMAGE, TEXT, WIDTH = (1, 4, 5), 20, 6, 16


class _WithExperts(Case):
    """A model that leaves the weights of its experts uninitialised."""

    def build(self, seed: int = 0) -> torch.nn.Module:
        model = super().build(seed)
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=seeded(name, seed))
        return model


def _qwen(step: int, batch: int = 1) -> dict[str, Any]:
    return {
        "hidden_states": noise(step, batch, IMAGE, 8),
        "encoder_hidden_states": cond("text", batch, TEXT, 12),
        "timestep": time(step, batch, scale=1.0),
        "img_shapes": [[GRID]] * batch,
    }


def _qwen_controlnet(step: int) -> dict[str, Any]:
    samples = [noise(step, 1, IMAGE, WIDTH, name=f"control {index}") for index in range(2)]
    return _qwen(step) | {"controlnet_block_samples": samples}


def _qwen_mask(step: int) -> dict[str, Any]:
    return _qwen(step, batch=2) | {"encoder_hidden_states_mask": _padded_first()}


def _padded_first() -> torch.Tensor:
    """The mask of two prompts, of which the first is shorter."""
    mask = torch.ones(2, TEXT, dtype=torch.long)
    mask[0, 4:] = 0
    return mask


def _qwen21(step: int) -> dict[str, Any]:
    """Each image slot of the encoder's sequence stands for 2x2 latents, so the grid is of even sides."""
    return _qwen(step) | {
        "hidden_states": noise(step, 1, 24, 8),
        "img_shapes": [[(1, 4, 6)]],
        "img_mask": torch.cat([torch.zeros(1, TEXT), torch.ones(1, 24 // 4)], dim=1).bool(),
    }


def _nucleus(step: int) -> dict[str, Any]:
    return _qwen(step) | {"img_shapes": [GRID]}


def _joy(step: int) -> dict[str, Any]:
    """A reference image, then the image in the making: 2x(3x4) patches."""
    latents = [cond("reference", 1, 1, 3, 1, 6, 8), noise(step, 1, 1, 3, 1, 6, 8)]
    return {
        "hidden_states": torch.cat(latents, dim=1),
        "encoder_hidden_states": cond("text", 1, TEXT, 12),
        "timestep": time(step),
    }


def _joy_plus(step: int) -> dict[str, Any]:
    """Both halves of a guided batch: patches of the image in the making, then of a smaller reference."""
    patches = torch.cat([noise(step, 1, IMAGE, 3, 1, 2, 2), cond("reference", 1, 8, 3, 1, 2, 2)], dim=1)
    return {
        "hidden_states": torch.cat([patches, patches]),
        "encoder_hidden_states": cond("text", 2, TEXT, 12),
        "encoder_hidden_states_mask": _padded_first(),
        "timestep": time(step, batch=2),
        "shape_list": [[GRID, (1, 2, 4)]] * 2,
    }


BASE = {
    "in_channels": 8,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "axes_dims_rope": (2, 2, 4),
}
QWEN = BASE | {"out_channels": 2, "joint_attention_dim": 12}
NUCLEUS = QWEN | {
    "num_key_value_heads": 1,
    "mlp_ratio": 12.0,
    "dense_moe_strategy": "leave_first_block_dense",
    "num_experts": 4,
    "moe_intermediate_dim": 24,
    "capacity_factors": 2.0,
}
JOY = {
    "in_channels": 3,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "text_dim": 12,
    "num_layers": 3,
    "rope_dim_list": [2, 2, 4],
}

JOY_NOTES = "the reference image is part of hidden_states, beside the noise"

CASES = (
    Case("QwenImageTransformer2DModel", QWEN, _qwen),
    Case("QwenImageTransformer2DModel", QWEN, _qwen_controlnet, variant="controlnet"),
    Case("QwenImageTransformer2DModel", QWEN, _qwen_mask, variant="mask"),
    Case(
        "QwenImage21Transformer2DModel",
        BASE | {"out_channels": 8, "context_in_dim": 12},
        _qwen21,
        notes="text tokens see neither image nor time; the output covers the text tokens too",
    ),
    _WithExperts(
        "NucleusMoEImageTransformer2DModel",
        NUCLEUS,
        _nucleus,
        notes="dense first block, then experts; the text is a constant argument of all blocks",
    ),
    Case("JoyImageEditTransformer3DModel", JOY, _joy, notes=JOY_NOTES),
    Case(
        "JoyImageEditPlusTransformer3DModel",
        JOY,
        _joy_plus,
        notes=JOY_NOTES,
    ),
)
