"""The models that the issue names, tiny, with any number of heads and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import zoo
from zoo import cond, flux, hunyuan_video, ltx, lumina, noise, qwen, sd3, time, wan

Inputs = dict[str, Any]


def build(name: str, config: Mapping[str, Any]) -> torch.nn.Module:
    return zoo.Case(name, config, lambda step: {}).build()


def flux1(heads: int, rows: int, columns: int, text: int) -> tuple[torch.nn.Module, Inputs]:
    inputs = {
        "hidden_states": noise(0, 1, rows * columns, 4),
        "encoder_hidden_states": cond("text", 1, text, 12),
        "timestep": time(0, scale=1.0),
        "img_ids": flux.positions(1, rows, columns),
        "txt_ids": torch.zeros(text, 3),
        "pooled_projections": cond("pooled", 1, 8),
        "guidance": torch.full((1,), 3.5),
    }
    return build("FluxTransformer2DModel", flux.FLUX | {"num_attention_heads": heads}), inputs


def qwen_image(
    heads: int, rows: int, columns: int, text: int, *, lengths: tuple[int, ...] = ()
) -> tuple[torch.nn.Module, Inputs]:
    """With lengths: a mask of prompts that are shorter, or longer, than others of their batch."""
    batch = len(lengths) or 1
    inputs: Inputs = {
        "hidden_states": noise(0, batch, rows * columns, 8),
        "encoder_hidden_states": cond("text", batch, text, 12),
        "timestep": time(0, batch, scale=1.0),
        "img_shapes": [[(1, rows, columns)]] * batch,
    }
    if lengths:
        inputs["encoder_hidden_states_mask"] = (torch.arange(text) < torch.tensor(lengths)[:, None]).long()
    return build("QwenImageTransformer2DModel", qwen.QWEN | {"num_attention_heads": heads}), inputs


def qwen_two_prompts(heads: int, rows: int, columns: int, text: int) -> tuple[torch.nn.Module, Inputs]:
    return qwen_image(heads, rows, columns, text, lengths=(text - 2, text))


def wan_video(heads: int, rows: int, columns: int, text: int) -> tuple[torch.nn.Module, Inputs]:
    inputs = {
        "hidden_states": noise(0, 1, wan.LATENT, 3, 2 * rows, 2 * columns),
        "timestep": time(0),
        "encoder_hidden_states": cond("text", 1, text, wan.TEXT_WIDTH),
    }
    return build("WanTransformer3DModel", wan.WAN | {"num_attention_heads": heads}), inputs


def ltx_video(heads: int, rows: int, columns: int, text: int) -> tuple[torch.nn.Module, Inputs]:
    inputs = {
        "hidden_states": noise(0, 1, 3 * rows * columns, 4),
        "encoder_hidden_states": cond("text", 1, text, 12),
        "timestep": time(0),
        "num_frames": 3,
        "height": rows,
        "width": columns,
        "encoder_attention_mask": (torch.arange(text) < text - 2).long().unsqueeze(0),
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }
    case = next(case for case in ltx.CASES if case.model == "LTXVideoTransformer3DModel")
    width = case.config["attention_head_dim"] * heads
    return build(case.model, {**case.config, "num_attention_heads": heads, "cross_attention_dim": width}), inputs


def sd3_image(heads: int, rows: int, columns: int, text: int) -> tuple[torch.nn.Module, Inputs]:
    config = sd3.SD3 | {
        "num_attention_heads": heads,
        "caption_projection_dim": sd3.HEAD * heads,
        "pos_embed_max_size": 8,
    }
    inputs = {
        "hidden_states": noise(0, 1, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": cond("text", 1, text, 12),
        "timestep": time(0),
        "pooled_projections": cond("pooled", 1, 10),
    }
    return build("SD3Transformer2DModel", config), inputs


def z_image(heads: int, rows: int, columns: int, text: int) -> tuple[torch.nn.Module, Inputs]:
    config = lumina.Z_IMAGE | {"dim": 8 * heads, "n_heads": heads, "n_kv_heads": heads}
    inputs = {
        "x": [noise(0, 4, 1, 2 * rows, 2 * columns)],
        "t": 1 - time(0, scale=1.0),
        "cap_feats": [cond("text", text, 12)],
    }
    return build("ZImageTransformer2DModel", config), inputs


def hunyuan(heads: int, rows: int, columns: int, text: int) -> tuple[torch.nn.Module, Inputs]:
    inputs = {
        "hidden_states": noise(0, 1, 4, 3, 2 * rows, 2 * columns),
        "timestep": time(0),
        "encoder_hidden_states": cond("text", 1, text, 12),
        "encoder_attention_mask": (torch.arange(text) < text - 2).float().unsqueeze(0),
        "pooled_projections": cond("pooled", 1, 10),
        "guidance": torch.full((1,), 6000.0),
    }
    return build("HunyuanVideoTransformer3DModel", hunyuan_video.HUNYUAN | {"num_attention_heads": heads}), inputs


MODELS = {
    "Flux": flux1,
    "Qwen-Image": qwen_image,
    "Qwen-Image, two prompts": qwen_two_prompts,
    "Wan": wan_video,
    "LTX": ltx_video,
    "SD3": sd3_image,
    "Z-Image": z_image,
    "HunyuanVideo": hunyuan,
}
SHAPES = {
    "even": (4, 4, 4, 6),
    "odd": (4, 3, 5, 7),
    "3 heads": (3, 4, 4, 6),
    "3 heads, odd": (3, 3, 5, 7),
    "5 heads, odd": (5, 3, 3, 5),
}
"""Heads, rows and columns of tokens, text tokens. Three and five heads, odd lengths of image and text."""


@torch.no_grad()
def run(model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    copied = {name: list(value) if isinstance(value, list) else value for name, value in inputs.items()}
    output = model(**copied, return_dict=False)[0]
    return torch.stack(list(output)) if isinstance(output, list) else output
