"""Tiny pipelines for pictures."""

from __future__ import annotations

from typing import Any

from . import text

# Two heads of 8 channels everywhere. Lengths of text and image differ, so that no stream is taken for another.
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
_FLUX = _HEADS | {
    "in_channels": 4, "joint_attention_dim": 12, "pooled_projection_dim": 8, "axes_dims_rope": (2, 2, 4),
}  # fmt: skip
_VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (4, 8),
    "norm_num_groups": 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def _kl_vae(latent_channels: int) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(latent_channels=latent_channels, shift_factor=0.0, scaling_factor=1.0, **_VAE)


def _flux_components() -> dict[str, Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import CLIPTextModel, T5Config, T5EncoderModel

    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "vae": _kl_vae(1),
        "text_encoder": CLIPTextModel(text.clip_config()),
        "tokenizer": text.clip_tokenizer(),
        "text_encoder_2": T5EncoderModel(T5Config(**text.t5_config())),
        "tokenizer_2": text.t5_tokenizer(),
        "transformer": FluxTransformer2DModel(num_layers=2, num_single_layers=3, **_FLUX),
    }


def flux() -> Any:
    from diffusers import FluxPipeline

    return FluxPipeline(**_flux_components())


def flux_controlnet() -> Any:
    from diffusers import FluxControlNetModel, FluxControlNetPipeline

    controlnet = FluxControlNetModel(num_layers=1, num_single_layers=1, **_FLUX)
    return FluxControlNetPipeline(controlnet=controlnet, **_flux_components())


def qwen_image() -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    tokenizer = text.qwen_tokenizer()
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKLQwenImage(
            base_dim=4, z_dim=2, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.0, 0.1], latents_std=[1.0, 1.1],
        ),
        text_encoder=text.qwen25_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(
            in_channels=8, out_channels=2, num_layers=3, joint_attention_dim=12, axes_dims_rope=(2, 2, 4), **_HEADS
        ),
    )  # fmt: skip


def flux2_klein() -> Any:
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )

    tokenizer = text.qwen_tokenizer()
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKLFlux2(latent_channels=2, **_VAE),
        text_encoder=text.qwen3_encoder(tokenizer, layers=3),
        tokenizer=tokenizer,
        transformer=Flux2Transformer2DModel(
            in_channels=8, num_layers=2, num_single_layers=3, joint_attention_dim=3 * 12, axes_dims_rope=(2, 2, 2, 2),
            timestep_guidance_channels=32, guidance_embeds=False, **_HEADS,
        ),
    )  # fmt: skip


def sd3() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel

    clip = text.clip_config(hidden_size=4, projection_dim=4, num_hidden_layers=2)
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_kl_vae(4),
        text_encoder=CLIPTextModelWithProjection(clip),
        tokenizer=text.clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip),
        tokenizer_2=text.clip_tokenizer(),
        text_encoder_3=T5EncoderModel(T5Config(**text.t5_config())),
        tokenizer_3=text.t5_tokenizer(),
        transformer=SD3Transformer2DModel(
            sample_size=12, in_channels=4, out_channels=4, num_layers=3, joint_attention_dim=12,
            caption_projection_dim=16, pooled_projection_dim=8, pos_embed_max_size=8, **_HEADS,
        ),
    )  # fmt: skip


def z_image() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    tokenizer = text.qwen_tokenizer()
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_kl_vae(4),
        text_encoder=text.qwen3_encoder(tokenizer, layers=2),
        tokenizer=tokenizer,
        transformer=ZImageTransformer2DModel(
            in_channels=4, dim=16, n_layers=3, n_refiner_layers=2, n_heads=2, n_kv_heads=2, cap_feat_dim=12,
            axes_dims=[4, 2, 2], axes_lens=[128, 16, 16],
        ),
    )  # fmt: skip
