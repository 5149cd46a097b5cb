"""Tiny pipelines for films."""

from __future__ import annotations

from typing import Any

from . import text


def wan() -> Any:
    """The first transformer runs in the noisier half of the steps, the second in the other."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    def transformer() -> Any:
        return WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=12, freq_dim=32,
            ffn_dim=44, num_layers=3, rope_max_seq_len=16,
        )  # fmt: skip

    return WanPipeline(
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        vae=AutoencoderKLWan(
            base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0, 0.1, 0.2, 0.3],
            latents_std=[1.0, 1.1, 1.2, 1.3],
        ),
        text_encoder=UMT5EncoderModel(UMT5Config(**text.t5_config())),
        tokenizer=text.t5_tokenizer(),
        transformer=transformer(),
        transformer_2=transformer(),
        boundary_ratio=0.6,
    )  # fmt: skip


def ltx() -> Any:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )
    from transformers import T5Config, T5EncoderModel

    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKLLTXVideo(
            latent_channels=4, block_out_channels=(4,) * 4, decoder_block_out_channels=(4,) * 4,
            layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
        ),
        text_encoder=T5EncoderModel(T5Config(**text.t5_config())),
        tokenizer=text.t5_tokenizer(),
        transformer=LTXVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
            num_layers=3, caption_channels=12,
        ),
    )  # fmt: skip
