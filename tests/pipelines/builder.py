"""Which components does a pipeline of diffusers want? It is asked, and each is built tiny and random.

The transformer is the zoo's; what stands around it is made to fit its widths. `recipes` has what cannot be read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zoo

from . import _build, text

TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels", "cap_feat_dim",
               "context_in_dim", "text_in_dim", "in_text_dim", "llm_features_dim", "text_hidden_dim", "dit_text_dim",
               "cross_attention_input_dim", "cross_attention_dim")  # fmt: skip
"""Names of a transformer's setting for the width of its text."""


_USUAL = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
"""Built though they are optional."""
_PLAIN = (int, float, bool, str, list, tuple, dict)


class CannotBuild(Exception):
    """Why a pipeline is not built here."""


@dataclass(frozen=True)
class Recipe:
    """What a pipeline's signature does not say."""

    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the zoo's configuration."""
    variant: str = ""
    """Which of the zoo's cases."""
    latents: int | None = None
    """Channels of the latents."""
    text: int | None = None
    """Width of the text encoder."""
    components: Mapping[str, Any] = field(default_factory=dict)
    """Components, each with a function of the width or the channels that makes it; None for one to leave out."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the constructor."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the call."""
    skip: str = ""
    """Why it is not tried."""
    inputs: tuple[str, ...] = ()
    """Inputs that it gets beside those that it needs by its code."""


def pipeline_classes() -> dict[str, Any]:
    """Every pipeline of diffusers that has a transformer and is not deprecated."""
    import diffusers

    found = {}
    for name in dir(diffusers):
        cls = getattr(diffusers, name, None)
        is_pipeline = inspect.isclass(cls) and issubclass(cls, diffusers.DiffusionPipeline)
        is_current = is_pipeline and re.match(r"diffusers\.pipelines\.(?!deprecated)", cls.__module__)
        if is_current and any("transformer" in part for part in cls._get_signature_types()):
            found[name] = cls
    return found


def build(cls: Any, recipe: Recipe, seed: int = 0) -> Any:
    """A tiny pipeline of this class; CannotBuild if a component is not known here."""
    if recipe.skip:
        raise CannotBuild(recipe.skip)
    return _build(lambda: cls(**_components(cls, recipe), **recipe.settings), seed)


def _components(cls: Any, recipe: Recipe) -> dict[str, Any]:
    wanted = {name: kinds for name, kinds in cls._get_signature_types().items() if name not in recipe.settings}
    models = {name: kind for name, kinds in wanted.items() if (kind := _zoo_class(kinds)) is not None}
    if not models:
        raise CannotBuild("its transformer is none of the zoo's")
    config = _config(next(iter(models.values())), recipe)
    width = recipe.text or next((config[name] for name in TEXT_WIDTHS if isinstance(config.get(name), int)), 12)
    channels = recipe.latents or config.get("out_channels") or config.get("in_channels") or 4
    if recipe.latents is None and hasattr(cls, "_pack_latents") and "in_channels" in config:  # In 2x2 patches.
        channels = config["in_channels"] // 4
    made: dict[str, Any] = {}
    for name, kinds in wanted.items():
        if name in recipe.components:
            make = recipe.components[name]
            made[name] = make(width, channels) if callable(make) else make
        elif name in models:
            made[name] = _zoo_model(models[name], recipe)
        elif type(None) in kinds or (name in cls._optional_components and name not in _USUAL):
            made[name] = None
        elif name == "controlnet":
            made[name] = _controlnet(kinds, config)
        elif not all(getattr(kind, "__origin__", kind) in _PLAIN for kind in kinds):
            made[name] = _component(name, kinds, width, channels, wanted)
    return made


def _controlnet(kinds: Any, config: Mapping[str, Any]) -> Any:
    """One block beside a transformer of this configuration."""
    cls = next(kind for kind in kinds if hasattr(kind, "from_config"))
    takes = inspect.signature(cls.__init__).parameters
    layers = {name: 1 for name in ("num_layers", "num_single_layers") if name in takes and name in config}
    return cls(**{name: value for name, value in config.items() if name in takes} | layers)


def _zoo_class(kinds: Any) -> str | None:
    known = {case.model for case in zoo.load()}
    return next((kind.__name__ for kind in kinds if getattr(kind, "__name__", "") in known), None)


def _config(model: str, recipe: Recipe) -> dict[str, Any]:
    case = next(case for case in zoo.load() if case.model == model and case.variant == recipe.variant)
    return {**case.config, **recipe.transformer}


def _zoo_model(model: str, recipe: Recipe) -> Any:
    import diffusers

    return getattr(diffusers, model)(**_config(model, recipe))


def _component(name: str, kinds: Any, width: int, channels: int, wanted: Mapping[str, Any]) -> Any:
    """A tiny component of the first kind that is known here."""
    names = [getattr(kind, "__name__", str(kind)) for kind in kinds]
    if name.endswith("scheduler"):
        return scheduler(names)
    if "tokenizer" in name:
        partner = [getattr(kind, "__name__", "") for kind in wanted.get(name.replace("tokenizer", "text_encoder"), ())]
        return tokenizer_for(partner)
    for kind in names:
        if kind in PARTS:
            return PARTS[kind](width, channels)
    raise CannotBuild(f"no tiny {'/'.join(names)} is known here, for its {name}")


def scheduler(names: list[str]) -> Any:
    import diffusers

    for name in names:
        cls = getattr(diffusers, name, None)
        if inspect.isclass(cls):
            return cls()
    return diffusers.FlowMatchEulerDiscreteScheduler()


def tokenizer_for(encoder: list[str]) -> Any:
    if any("T5" in name and "Gemma" not in name for name in encoder):
        return text.t5_tokenizer()
    return text.clip_tokenizer() if any("CLIP" in name for name in encoder) else text.qwen_tokenizer()


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


def _t5(kind: str) -> Callable[[int, int], Any]:
    def make(width: int, channels: int) -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**text.t5_config() | {"d_model": width})
        return getattr(transformers, f"{kind}EncoderModel")(config)

    return make


def _clip(kind: str) -> Callable[[int, int], Any]:
    def make(width: int, channels: int) -> Any:
        import transformers

        return getattr(transformers, kind)(text.clip_config(num_hidden_layers=2))

    return make


def _vision(width: int, channels: int) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(
        hidden_size=18, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
    ))  # fmt: skip


def _projecting(width: int, channels: int) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    return CLIPVisionModelWithProjection(CLIPVisionConfig(
        hidden_size=18, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        projection_dim=18,
    ))  # fmt: skip


def _siglip(width: int, channels: int) -> Any:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(
        hidden_size=10, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8,
    ))  # fmt: skip


def _siglip_processor(width: int, channels: int) -> Any:
    from transformers import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": 16, "width": 16})


def _guider(width: int, channels: int) -> Any:
    from diffusers.guiders import ClassifierFreeGuidance

    return ClassifierFreeGuidance()


def _clip_processor(width: int, channels: int) -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


def _bert(width: int, channels: int) -> Any:
    from transformers import BertConfig, BertModel

    size = len(text.qwen_tokenizer())
    return BertModel(BertConfig(
        vocab_size=size, hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    ))  # fmt: skip


def _gemma3(width: int, channels: int) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = text.qwen_config(text.qwen_tokenizer(), layers=3) | {"hidden_size": width, "pad_token_id": 0}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=config, vision_config=vision, mm_tokens_per_image=4))


# ------------------------------------------------------------------------------------------------ VAEs


def _ltx2(kind: str, **config: Any) -> Callable[[int, int], Any]:
    def make(width: int, channels: int) -> Any:
        from diffusers.pipelines import ltx2

        return getattr(ltx2, kind)(**config)

    return make


def _kl(width: int, channels: int) -> Any:
    from .images import _kl_vae

    return _kl_vae(channels)


def _vae(kind: str, **config: Any) -> Callable[[int, int], Any]:
    def make(width: int, channels: int) -> Any:
        import diffusers

        made = {name: value(channels) if callable(value) else value for name, value in config.items()}
        return getattr(diffusers, kind)(**made)

    return make


def _same(channels: int) -> int:
    return channels


def _means(channels: int) -> list[float]:
    return [0.1 * number for number in range(channels)]


def _deviations(channels: int) -> list[float]:
    return [1.0 + 0.1 * number for number in range(channels)]


_STATISTICS = {"latents_mean": _means, "latents_std": _deviations}
_WAN = {"base_dim": 4, "z_dim": _same, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, **_STATISTICS}
_KL = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (4, 8), "norm_num_groups": 2, "latent_channels": _same,
}  # fmt: skip
_LTX = {
    "latent_channels": _same, "block_out_channels": (4,) * 4, "decoder_block_out_channels": (4,) * 4,
    "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5,
}  # fmt: skip

PARTS: dict[str, Callable[[int, int], Any]] = {
    "T5EncoderModel": _t5("T5"),
    "UMT5EncoderModel": _t5("UMT5"),
    "CLIPTextModel": _clip("CLIPTextModel"),
    "CLIPTextModelWithProjection": _clip("CLIPTextModelWithProjection"),
    "CLIPVisionModel": _vision,
    "CLIPVisionModelWithProjection": _projecting,
    "SiglipVisionModel": _siglip,
    "SiglipImageProcessor": _siglip_processor,
    "SiglipImageProcessorPil": _siglip_processor,
    "ClassifierFreeGuidance": _guider,
    "CLIPImageProcessorPil": _clip_processor,
    "CLIPImageProcessor": _clip_processor,
    "BertModel": _bert,
    "GlmModel": _llm("Glm"),
    "LlamaModel": _llm("Llama"),
    "LlamaForCausalLM": _llm("Llama", "ForCausalLM"),
    "GemmaPreTrainedModel": _llm("Gemma"),
    "Gemma2PreTrainedModel": _llm("Gemma2"),
    "Qwen3Model": _llm("Qwen3"),
    "Qwen3ForCausalLM": _llm("Qwen3", "ForCausalLM"),
    "SmolLM3ForCausalLM": _llm("SmolLM3", "ForCausalLM"),
    "PreTrainedModel": _llm("Qwen3"),
    "Qwen2_5_VLForConditionalGeneration": lambda width, channels: text.qwen25_encoder(text.qwen_tokenizer(), 4),
    "Qwen2_5_VLTextModel": lambda width, channels: text.qwen25_encoder(text.qwen_tokenizer(), 4).model.language_model,
    "AutoencoderKL": _kl,
    "AutoencoderKLFlux2": _vae("AutoencoderKLFlux2", use_quant_conv=False, use_post_quant_conv=False, **_KL),
    "AutoencoderKLWan": _vae("AutoencoderKLWan", **_WAN),
    "AutoencoderKLQwenImage": _vae(
        "AutoencoderKLQwenImage", **_WAN | {"dim_mult": [1, 2], "temperal_downsample": [False]}
    ),
    "AutoencoderKLLTXVideo": _vae("AutoencoderKLLTXVideo", **_LTX),
    "AutoencoderKLCogVideoX": _vae(
        "AutoencoderKLCogVideoX", block_out_channels=(4,) * 4, latent_channels=_same, layers_per_block=1,
        norm_num_groups=2, sample_height=32, sample_width=48,
    ),
    "AutoencoderKLHunyuanVideo": _vae(
        "AutoencoderKLHunyuanVideo", block_out_channels=(4,) * 4, latent_channels=_same, layers_per_block=1,
        norm_num_groups=2,
    ),
    "AutoencoderKLAllegro": _vae(
        "AutoencoderKLAllegro", block_out_channels=(4,) * 4, latent_channels=_same, layers_per_block=1,
        norm_num_groups=2, sample_size=32,
    ),
    "AutoencoderKLMochi": _vae(
        "AutoencoderKLMochi", encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4,
        latent_channels=_same, layers_per_block=(1,) * 5, **_STATISTICS,
    ),
    "AutoencoderKLMagvit": _vae(
        "AutoencoderKLMagvit", block_out_channels=(4,) * 4, latent_channels=_same, layers_per_block=1,
        norm_num_groups=2,
    ),
    "AutoencoderKLCosmos": _vae(
        "AutoencoderKLCosmos", latent_channels=_same, encoder_block_out_channels=(4,) * 4,
        decode_block_out_channels=(4,) * 4, num_layers=1, attention_resolutions=(4,), resolution=32,
        latents_mean=None, latents_std=None,
    ),
    "AutoencoderKLHunyuanImage": _vae(
        "AutoencoderKLHunyuanImage", in_channels=3, out_channels=3, latent_channels=_same,
        block_out_channels=(32, 64), layers_per_block=1, spatial_compression_ratio=2, sample_size=32,
        scaling_factor=1.0,
    ),
    "AutoencoderKLHunyuanVideo15": _vae(
        "AutoencoderKLHunyuanVideo15", latent_channels=_same, block_out_channels=(32,) * 5, layers_per_block=1,
    ),
    "AutoencoderKLLTX2Video": _vae(
        "AutoencoderKLLTX2Video", latent_channels=_same, block_out_channels=(8, 16, 32, 64),
        decoder_block_out_channels=(8, 16, 32), layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 4,
    ),
    "AutoencoderKLLTX2Audio": _vae(
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
    "Gemma3ForConditionalGeneration": _gemma3,
    "AutoencoderDC": _vae(
        "AutoencoderDC", latent_channels=_same, attention_head_dim=2, encoder_block_types="ResBlock",
        decoder_block_types="ResBlock", encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
    ),
    "AutoencoderOobleck": _vae(
        "AutoencoderOobleck", encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3,
        decoder_input_channels=_same, channel_multiples=[2, 4], sampling_rate=8,
    ),
}  # fmt: skip
"""By class, each with the function of text width and latent channels that makes a tiny one."""
