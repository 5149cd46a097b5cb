"""What tiny pipelines read images with: vision models, and models that read text and images together."""

from __future__ import annotations

from typing import Any

from . import text

_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
_VIT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def clip_vision(width: int, channels: int) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(
        hidden_size=18, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
    ))  # fmt: skip


def clip_projecting(width: int, channels: int) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    return CLIPVisionModelWithProjection(CLIPVisionConfig(
        hidden_size=18, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        projection_dim=18,
    ))  # fmt: skip


def clip_processor(width: int, channels: int) -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


def siglip(width: int, channels: int) -> Any:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(
        hidden_size=10, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8,
    ))  # fmt: skip


def siglip_processor(width: int, channels: int) -> Any:
    from transformers import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": 16, "width": 16})


def siglip2(width: int, channels: int) -> Any:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    return Siglip2VisionModel(Siglip2VisionConfig(**_VIT, patch_size=4, num_patches=16))


def siglip2_processor(width: int, channels: int) -> Any:
    from transformers import Siglip2ImageProcessorPil

    return Siglip2ImageProcessorPil(patch_size=4, max_num_patches=16)


def t5gemma2(width: int, channels: int) -> Any:
    from transformers import T5Gemma2Encoder, T5Gemma2EncoderConfig

    config = text.qwen_config(text.qwen_tokenizer(), layers=2)
    config |= {"hidden_size": width, "pad_token_id": 0, "dropout_rate": 0.0}
    vision = _VIT | {"hidden_size": 10, "image_size": 16, "patch_size": 8}
    return T5Gemma2Encoder(T5Gemma2EncoderConfig(text_config=config, vision_config=vision, mm_tokens_per_image=4))


def glm_image(width: int, channels: int) -> Any:
    """Its tokens are given to the pipeline, so it makes none."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    config = text.qwen_config(text.qwen_tokenizer(), layers=1)
    config |= {"vision_vocab_size": 20, "rope_parameters": rope, "pad_token_id": 0, "eos_token_id": 17}
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "image_size": 16, "patch_size": 8}
    tokens = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8}
    return GlmImageForConditionalGeneration(GlmImageConfig(
        text_config=config, vision_config=vision, vq_config=tokens, image_token_id=1, image_start_token_id=16,
        image_end_token_id=17,
    ))  # fmt: skip


def glm_processor(width: int, channels: int) -> Any:
    from transformers import GlmImageImageProcessorPil, GlmImageProcessor

    return GlmImageProcessor(GlmImageImageProcessorPil(), text.qwen_tokenizer())


def gemma3(width: int, channels: int) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = text.qwen_config(text.qwen_tokenizer(), layers=3) | {"hidden_size": width, "pad_token_id": 0}
    vision = _VIT | {"image_size": 16, "patch_size": 8}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=config, vision_config=vision, mm_tokens_per_image=4))


def mistral3(width: int, channels: int) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    config = text.qwen_config(text.qwen_tokenizer(), layers=3) | {"hidden_size": width, "model_type": "mistral"}
    vision = _VIT | {"image_size": 16, "patch_size": 8, "model_type": "pixtral"}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=config, vision_config=vision))


def qwen25(width: int, channels: int) -> Any:
    return text.qwen25_encoder(text.qwen_tokenizer(), 4)


def qwen3(width: int, channels: int, layers: int = 3) -> Any:
    """Qwen3-VL."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = text.qwen_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1], "mrope_interleaved": True}
    config = text.qwen_config(tokenizer, layers) | {"hidden_size": width, "rope_parameters": rope}
    vision = _PATCHES | {
        "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": width,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=config, vision_config=vision, **text.vision_marks(tokenizer))
    )


def _qwen_images() -> Any:
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=_PATCHES["patch_size"], merge_size=_PATCHES["spatial_merge_size"],
        size={"shortest_edge": 64, "longest_edge": 1024},
    )  # fmt: skip


def qwen_processor(kind: str) -> Any:
    """For Qwen2-VL, its successors and Qwen3-VL."""

    def make(width: int, channels: int) -> Any:
        import transformers

        tokenizer = text.qwen_tokenizer()
        cls = getattr(transformers, kind)
        return cls(image_processor=_qwen_images(), tokenizer=tokenizer, chat_template=tokenizer.chat_template)

    return make
