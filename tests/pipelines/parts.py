"""Tiny components by class, each made to fit the width of the text and the channels of the latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import text, vision

# ------------------------------------------------------------------------------------------------ text encoders


def _llm(prefix: str, suffix: str = "Model", **more: Any) -> Callable[[int, int], Any]:
    """An encoder of the usual make."""

    def make(width: int, channels: int) -> Any:
        import transformers

        tokenizer = text.qwen_tokenizer()
        config = {**text.qwen_config(tokenizer, layers=3), "hidden_size": width, "pad_token_id": 0, **more}
        config["head_dim"] = more.get("head_dim", width // 2)
        return getattr(transformers, f"{prefix}{suffix}")(getattr(transformers, f"{prefix}Config")(**config))

    return make


def t5(kind: str) -> Callable[..., Any]:
    def make(width: int, channels: int, **more: Any) -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**text.t5_config() | {"d_model": width, **more})
        return getattr(transformers, f"{kind}EncoderModel")(config)

    return make


def _t5gemma(width: int, channels: int) -> Any:
    from transformers import T5GemmaConfig, T5GemmaEncoderModel

    config = text.qwen_config(text.qwen_tokenizer(), layers=2) | {"hidden_size": width, "pad_token_id": 0}
    return T5GemmaEncoderModel(
        T5GemmaConfig(encoder=config, decoder=config, vocab_size=config["vocab_size"], is_encoder_decoder=False)
    )


def _clip(kind: str) -> Callable[[int, int], Any]:
    def make(width: int, channels: int) -> Any:
        import transformers

        return getattr(transformers, kind)(text.clip_config(num_hidden_layers=2))

    return make


def _ace_step_conditions(width: int, channels: int) -> Any:
    from diffusers.pipelines.ace_step import AceStepConditionEncoder

    return AceStepConditionEncoder(
        hidden_size=20, intermediate_size=24, text_hidden_dim=width, timbre_hidden_dim=channels,
        num_lyric_encoder_hidden_layers=1, num_timbre_encoder_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, sliding_window=3,
    )  # fmt: skip


def _guider(width: int, channels: int) -> Any:
    from diffusers.guiders import ClassifierFreeGuidance

    return ClassifierFreeGuidance()


def _bert(width: int, channels: int) -> Any:
    from transformers import BertConfig, BertModel

    size = len(text.qwen_tokenizer())
    return BertModel(BertConfig(
        vocab_size=size, hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    ))  # fmt: skip


# ------------------------------------------------------------------------------------------------ VAEs


def _ltx2(kind: str, **config: Any) -> Callable[[int, int], Any]:
    def make(width: int, channels: int) -> Any:
        from diffusers.pipelines import ltx2

        return getattr(ltx2, kind)(**config)

    return make


def _kl(width: int, channels: int) -> Any:
    from .images import _kl_vae

    return _kl_vae(channels)


def vae(kind: str, **config: Any) -> Callable[[int, int], Any]:
    def make(width: int, channels: int) -> Any:
        import diffusers

        made = {name: value(channels) if callable(value) else value for name, value in config.items()}
        return getattr(diffusers, kind)(**made)

    return make


def _same(channels: int) -> int:
    return channels


def _twice(channels: int) -> int:
    return 2 * channels


def _means(channels: int) -> list[float]:
    return [0.1 * number for number in range(channels)]


def _deviations(channels: int) -> list[float]:
    return [1.0 + 0.1 * number for number in range(channels)]


STATISTICS = {"latents_mean": _means, "latents_std": _deviations}
WAN = {"base_dim": 4, "z_dim": _same, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, **STATISTICS}
KL = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (4, 8), "norm_num_groups": 2, "latent_channels": _same,
}  # fmt: skip
_LTX = {
    "latent_channels": _same, "block_out_channels": (4,) * 4, "decoder_block_out_channels": (4,) * 4,
    "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5,
}  # fmt: skip

PARTS: dict[str, Callable[[int, int], Any]] = {
    "T5EncoderModel": t5("T5"),
    "UMT5EncoderModel": t5("UMT5"),
    "CLIPTextModel": _clip("CLIPTextModel"),
    "CLIPTextModelWithProjection": _clip("CLIPTextModelWithProjection"),
    "CLIPVisionModel": vision.clip_vision,
    "CLIPVisionModelWithProjection": vision.clip_projecting,
    "SiglipVisionModel": vision.siglip,
    "SiglipImageProcessor": vision.siglip_processor,
    "SiglipImageProcessorPil": vision.siglip_processor,
    "Siglip2VisionModel": vision.siglip2,
    "Siglip2ImageProcessor": vision.siglip2_processor,
    "Siglip2ImageProcessorPil": vision.siglip2_processor,
    "T5Gemma2Encoder": vision.t5gemma2,
    "GlmImageForConditionalGeneration": vision.glm_image,
    "GlmImageProcessor": vision.glm_processor,
    "BaseGuidance": _guider,
    "ClassifierFreeGuidance": _guider,
    "CLIPImageProcessorPil": vision.clip_processor,
    "CLIPImageProcessor": vision.clip_processor,
    "BertModel": _bert,
    "GlmModel": _llm("Glm"),
    "LlamaModel": _llm("Llama"),
    "LlamaForCausalLM": _llm("Llama", "ForCausalLM"),
    "GemmaPreTrainedModel": _llm("Gemma"),
    "Gemma2PreTrainedModel": _llm("Gemma2"),
    "Qwen3Model": _llm("Qwen3"),
    "Qwen3ForCausalLM": _llm("Qwen3", "ForCausalLM"),
    "T5GemmaEncoder": _t5gemma,
    "T5GemmaEncoderModel": _t5gemma,
    "SmolLM3ForCausalLM": _llm("SmolLM3", "ForCausalLM"),
    "PreTrainedModel": _llm("Qwen3"),
    "Qwen2_5_VLForConditionalGeneration": vision.qwen25,
    "Qwen2_5_VLTextModel": lambda width, channels: vision.qwen25(width, channels).model.language_model,
    "Qwen2VLProcessor": vision.qwen_processor("Qwen2VLProcessor"),
    "Qwen2_5_VLProcessor": vision.qwen_processor("Qwen2_5_VLProcessor"),
    "Qwen3VLForConditionalGeneration": vision.qwen3,
    "Qwen3VLModel": lambda width, channels: vision.qwen3(width, channels).model,
    "Qwen3VLProcessor": vision.qwen_processor("Qwen3VLProcessor"),
    "Mistral3ForConditionalGeneration": vision.mistral3,
    "Mistral3Model": lambda width, channels: vision.mistral3(width, channels).model,
    "AutoencoderKL": _kl,
    "AutoencoderKLFlux2": vae("AutoencoderKLFlux2", use_quant_conv=False, use_post_quant_conv=False, **KL),
    "AutoencoderKLWan": vae("AutoencoderKLWan", **WAN),
    "AutoencoderKLQwenImage": vae(
        "AutoencoderKLQwenImage", **WAN | {"dim_mult": [1, 2], "temperal_downsample": [False]}
    ),
    "AutoencoderKLLTXVideo": vae("AutoencoderKLLTXVideo", **_LTX),
    "AutoencoderKLCogVideoX": vae(
        "AutoencoderKLCogVideoX", block_out_channels=(4,) * 4, latent_channels=_same, layers_per_block=1,
        norm_num_groups=2, sample_height=32, sample_width=48,
    ),
    "AutoencoderKLHunyuanVideo": vae(
        "AutoencoderKLHunyuanVideo", block_out_channels=(4,) * 4, latent_channels=_same, layers_per_block=1,
        norm_num_groups=2,
    ),
    "AutoencoderKLAllegro": vae(
        "AutoencoderKLAllegro", block_out_channels=(4,) * 4, latent_channels=_same, layers_per_block=1,
        norm_num_groups=2, sample_size=160,
    ),
    "AutoencoderKLMochi": vae(
        "AutoencoderKLMochi", encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4,
        latent_channels=_same, layers_per_block=(1,) * 5, **STATISTICS,
    ),
    "AutoencoderKLMagvit": vae(
        "AutoencoderKLMagvit", block_out_channels=(4,) * 4, latent_channels=_same, layers_per_block=1,
        norm_num_groups=2,
    ),
    "AutoencoderKLCosmos": vae(
        "AutoencoderKLCosmos", latent_channels=_same, encoder_block_out_channels=(4,) * 4,
        decode_block_out_channels=(4,) * 4, num_layers=1, attention_resolutions=(4,), resolution=32,
        latents_mean=None, latents_std=None,
    ),
    "AutoencoderKLHunyuanImage": vae(
        "AutoencoderKLHunyuanImage", in_channels=3, out_channels=3, latent_channels=_same,
        block_out_channels=(32, 64), layers_per_block=1, spatial_compression_ratio=2, sample_size=32,
        scaling_factor=1.0,
    ),
    "AutoencoderKLHunyuanImageRefiner": vae(
        "AutoencoderKLHunyuanImageRefiner", latent_channels=_same, block_out_channels=(32, 32), layers_per_block=1,
        spatial_compression_ratio=2, temporal_compression_ratio=1,
    ),
    "AutoencoderKLHunyuanVideo15": vae(
        "AutoencoderKLHunyuanVideo15", latent_channels=_same, block_out_channels=(32,) * 5, layers_per_block=1,
    ),
    "AutoencoderKLLTX2Video": vae(
        "AutoencoderKLLTX2Video", latent_channels=_same, block_out_channels=(8, 16, 32, 64),
        decoder_block_out_channels=(8, 16, 32), layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 4,
        spatial_compression_ratio=32, temporal_compression_ratio=8,
    ),
    "AutoencoderKLLTX2Audio": vae(
        "AutoencoderKLLTX2Audio", base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=16,
        resolution=16,
    ),
    "LTX2Vocoder": _ltx2(
        "LTX2Vocoder", in_channels=32, hidden_channels=32, upsample_kernel_sizes=[16, 20], upsample_factors=[8, 10],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=8000,
    ),
    "LTX2TextConnectors": _ltx2(
        "LTX2TextConnectors", caption_channels=12, text_proj_in_factor=4, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=6, video_connector_num_layers=1, video_connector_num_learnable_registers=8,
        audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=6, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=8,
    ),
    "Gemma3ForConditionalGeneration": vision.gemma3,
    "AutoencoderDC": vae(
        "AutoencoderDC", latent_channels=_same, attention_head_dim=2, encoder_block_types="ResBlock",
        decoder_block_types="ResBlock", encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
    ),
    "AutoencoderKLQwenImage21": vae(
        "AutoencoderKLQwenImage21", **WAN | {"decoder_base_dim": 4, "dim_mult": [1, 1], "temperal_downsample": [False]},
        in_channels=3, out_channels=3, scale_factor_temporal=1, scale_factor_spatial=2,
    ),
    "LongCatAudioDiTVae": vae(
        "LongCatAudioDiTVae", channels=_same, c_mults=[1, 2], strides=[2], latent_dim=_same, encoder_latent_dim=_twice,
        downsampling_ratio=2, sample_rate=8,
    ),
    "AutoencoderSAME": vae(
        "AutoencoderSAME", patch_size=2, encoder_channels=8, encoder_c_mults=(2,), encoder_strides=(2,),
        encoder_transformer_depths=(1,), latent_dim=_same, dim_heads=4, sampling_rate=8,
    ),
    "AceStepConditionEncoder": _ace_step_conditions,
    "AutoencoderOobleck": vae(
        "AutoencoderOobleck", encoder_hidden_size=_twice, downsampling_ratios=[1, 2], decoder_channels=3,
        decoder_input_channels=_same, channel_multiples=[2, 4], sampling_rate=8,
    ),
}  # fmt: skip
"""By class, each with the function of text width and latent channels that makes a tiny one."""
