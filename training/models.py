"""Builds the networks of the settings, as diffusers and transformers classes.

They hold the initial weights and take the trained ones for export. Between the two the flow
stage computes with the functions of `forward.py` over the same parameter names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.settings import ModelConfig

PARTS = ("transformer", "text_encoder", "text_encoder_2")


def build_vae(config: ModelConfig) -> Any:
    """The autoencoder, an AutoencoderKL without attention."""
    from diffusers import AutoencoderKL

    levels = len(config.vae_channels)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=config.vae_channels, latent_channels=config.latent_channels,
        layers_per_block=1, norm_num_groups=config.vae_groups, sample_size=config.picture,
        scaling_factor=1.0, shift_factor=0.0, force_upcast=False,
        use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False,
    )  # fmt: skip


def build_transformer(config: ModelConfig) -> Any:
    """The FLUX transformer, started so that every block passes its input through."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4 * config.latent_channels, guidance_embeds=False,
        num_layers=config.dual_blocks, num_single_layers=config.single_blocks,
        attention_head_dim=config.head_dim, num_attention_heads=config.heads,
        joint_attention_dim=config.text_dim, pooled_projection_dim=config.text_dim,
        axes_dims_rope=config.rope_axes,
    )  # fmt: skip
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            if module.bias is not None:
                module.bias.zero_()
            if "norm" in name or name == "proj_out":
                module.weight.zero_()
            else:
                nn.init.xavier_uniform_(module.weight)
    return model


def build_clip(config: ModelConfig, tokenizer: Any) -> Any:
    """The pooled text encoder."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=config.text_dim,
            intermediate_size=3 * config.text_dim, num_hidden_layers=config.text_layers,
            num_attention_heads=config.text_dim // config.text_head_dim,
            max_position_embeddings=77, hidden_act="quick_gelu", projection_dim=config.text_dim,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def build_t5(config: ModelConfig, tokenizer: Any) -> Any:
    """The token-wise text encoder."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**t5_settings(config, tokenizer)))


def t5_settings(config: Any, tokenizer: Any) -> dict[str, Any]:
    """The settings of a small T5 encoder, or of one of its kin."""
    return {
        "vocab_size": len(tokenizer), "d_model": config.text_dim, "d_kv": config.text_head_dim,
        "d_ff": 3 * config.text_dim, "num_layers": config.text_layers,
        "num_heads": config.text_dim // config.text_head_dim, "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu", "is_encoder_decoder": False, "use_cache": False,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip


def load_tokenizers(folder: Path) -> tuple[Any, Any]:
    """The CLIP and T5 tokenizers of a folder."""
    from transformers import CLIPTokenizer, T5TokenizerFast

    if not (folder / "clip").is_dir() or not (folder / "t5").is_dir():
        raise FileNotFoundError(
            f"{folder} holds no clip/ and t5/: build them with `python -m training.vocabulary --out {folder}`"
        )
    clip = CLIPTokenizer.from_pretrained(folder / "clip")
    return clip, T5TokenizerFast.from_pretrained(folder / "t5")


def named_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by a name that does not depend on the transformers version.

    Some versions wrap the CLIP text model once more, and T5 lists its embedding twice.
    """
    return {
        name.removeprefix("text_model.").replace("encoder.embed_tokens.", "shared."): parameter
        for name, parameter in module.named_parameters()
    }


def set_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy trained weights in; every parameter must be given, and nothing else."""
    own = named_weights(module)
    if own.keys() != weights.keys():
        missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        raise ValueError(
            f"weights do not fit {type(module).__name__}: missing {missing[:4]}, "
            f"unknown {extra[:4]}; use the settings the weights were trained with"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def build_flow(config: ModelConfig, clip_tokenizer: Any, t5_tokenizer: Any) -> dict[str, Any]:
    """The three networks that the flow stage trains together, by their pipeline names."""
    return {
        "transformer": build_transformer(config),
        "text_encoder": build_clip(config, clip_tokenizer),
        "text_encoder_2": build_t5(config, t5_tokenizer),
    }


def flow_weights(modules: dict[str, Any]) -> dict[str, Tensor]:
    """All weights of the flow stage in one dictionary: 'transformer.x_embedder.weight', ..."""
    return {
        f"{part}.{name}": parameter.detach().clone()
        for part in PARTS
        for name, parameter in named_weights(modules[part]).items()
    }


def part_weights(weights: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """The weights of one network out of such a dictionary."""
    start = part + "."
    return {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}
