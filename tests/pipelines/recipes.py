"""What the signature of a pipeline does not say about its tiny copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

from . import text, vision
from .builder import Recipe
from .parts import KL, PARTS, STATISTICS, WAN, t5, vae


def _make(name: str, **config: Any) -> Callable[[int, int], Any]:
    """A component of diffusers, whatever the widths are."""

    def make(width: int, channels: int) -> Any:
        import diffusers

        return getattr(diffusers, name)(**config)

    return make


def _deep_qwen3(part: str) -> Callable[[int, int], Any]:
    """With the 36 layers of the real one, as a pipeline takes them by their numbers."""

    def make(width: int, channels: int) -> Any:
        model = vision.qwen3(width, channels, layers=36)
        return getattr(model, part) if part else model

    return make


def _deep_kl(levels: int) -> dict[str, Any]:
    """A VAE that halves the sides at each level but the last."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels}
    return {"vae": vae("AutoencoderKL", **KL | blocks | {"block_out_channels": (4,) * levels, "shift_factor": 0.0})}


def _duration_embedder(width: int, channels: int) -> Any:
    from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder

    return StableAudio3DurationEmbedder(output_dim=12, fourier_dim=8, max_val=32.0)


_DDIM = {"scheduler": _make("DDIMScheduler")}
_FLOW = {"scheduler": _make("FlowMatchEulerDiscreteScheduler")}
_KARRAS = {"scheduler": _make("FlowMatchEulerDiscreteScheduler", use_karras_sigmas=True)}
_DPM = {"scheduler": _make("DPMSolverMultistepScheduler")}
_SMALL = {"height": 16, "width": 16}
_WIDE = {"height": 32, "width": 64}
_LARGE = {"height": 64, "width": 96}
_LARGER = {"height": 128, "width": 192}
_CONTROL = {"in_channels": 8, "out_channels": 4}
_COG = {"max_sequence_length": 7}
_UNBINNED = {"use_resolution_binning": False}
_SD3 = {"joint_attention_dim": 16, "pooled_projection_dim": 16, "pos_embed_max_size": 16}
_KLEIN: dict[str, Any] = {
    "transformer": {"in_channels": 8, "joint_attention_dim": 36, "guidance_embeds": False},
    "latents": 2,
    "text": 12,
    "call": {"text_encoder_out_layers": (1, 2, 3)},
}
_KANDINSKY = {"in_text_dim": 12, "in_text_dim2": 8}
_IMAGE_ENCODER = {"image_encoder": PARTS["CLIPVisionModel"], "image_processor": PARTS["CLIPImageProcessor"]}
_HUNYUAN_DIT: dict[str, Any] = {
    "transformer": {"text_len": 77, "text_len_t5": 256},
    "text": 12,
    "components": {
        "scheduler": _make("DDPMScheduler"),
        "text_encoder_2": lambda width, channels: t5("T5")(24, channels),
        "tokenizer_2": lambda width, channels: text.t5_tokenizer(),
    },
    "call": _SMALL | _UNBINNED,
}
_BYT5 = {"text_encoder_2": lambda width, channels: t5("T5")(14, channels)}
_LTX2 = {"audio_in_channels": 8, "audio_out_channels": 8}
_SCM = {"scheduler": _make("SCMScheduler")}
_SPRINT: dict[str, Any] = {
    "transformer": {"guidance_embeds": True},
    "components": _SCM,
    "call": _UNBINNED | _WIDE | {"intermediate_timesteps": None},
}
_LONGCAT: dict[str, Any] = {
    "transformer": {"in_channels": 64}, "latents": 16, "call": {"enable_prompt_rewrite": False}
}  # fmt: skip
_Z_IMAGE = {"axes_lens": [128, 32, 32]}
_SANA: dict[str, Any] = {"call": _UNBINNED | _WIDE, "components": _DPM}
_STABLE_AUDIO_3: dict[str, Any] = {
    "transformer": {"cond_token_dim": 12, "global_cond_dim": 12},
    "latents": 6,
    "components": {"duration_embedder": _duration_embedder},
    "call": {"seconds": 2.0},
}
# Images to edit are enlarged to a megapixel: a VAE that makes them small again.
_DEEP_QWEN_VAE = {
    "vae": lambda width, channels: vae(
        "AutoencoderKLQwenImage", **WAN | {"dim_mult": [1] * 5, "temperal_downsample": [False] * 4}
    )(width, channels)
}
_PICTURE = Image.new("RGB", (32, 32), (200, 60, 20))
_VISUAL_CLOZE: dict[str, Any] = {
    "transformer": {"in_channels": 24, "out_channels": 4},
    "latents": 1,
    "settings": {"resolution": 32},
    "call": {
        "image": [[_PICTURE, _PICTURE], [_PICTURE, None]], "task_prompt": "a cat", "content_prompt": "a dog",
    },
}  # fmt: skip
_PIXART: dict[str, Any] = {"latents": 4, "call": _UNBINNED, "components": _DPM}

_Z_CONTROL: dict[str, Any] = {
    "control_layers_places": [0, 1], "control_refiner_layers_places": [0], "dim": 16, "n_refiner_layers": 2,
    "n_heads": 2, "n_kv_heads": 2, "add_control_noise_refiner": "control_noise_refiner",
}  # fmt: skip

RECIPES: dict[str, Recipe] = {
    "AceStepPipeline": Recipe(latents=6, text=12, call={"seconds": 2.0, "max_text_length": 32, "max_lyric_length": 16}),
    "AnyFlowFARPipeline": Recipe({"chunk_partition": (1, 2)}),
    "AllegroPipeline": Recipe(
        components={"scheduler": _make("EulerAncestralDiscreteScheduler")},
        call={"height": 160, "width": 160, "num_frames": 24},
    ),
    "AuraFlowPipeline": Recipe(call=_SMALL),
    "BriaFibo2Pipeline": Recipe(
        {
            "cap_feat_dim": 36, "n_layers": 6, "injection_layer_ids": (1, 2, 3, 4, 5), "in_channels": 4,
            "axes_lens": (512, 32, 32),
        },
        text=12,
        components={"text_encoder": _deep_qwen3("")},
    ),
    "BriaFiboPipeline": Recipe({"joint_attention_dim": 24, "text_encoder_dim": 12}, text=12, latents=4, call=_WIDE),
    "BriaFiboEditPipeline": Recipe(
        {"joint_attention_dim": 24, "text_encoder_dim": 12}, text=12, latents=4, call=_WIDE, inputs=("image",),
        prompt='{"edit_instruction": "a cat"}',
    ),
    "ChromaInpaintPipeline": Recipe(cause="diffusers reads a setting that no Chroma transformer has"),
    "CogVideoXPipeline": Recipe(call=_COG),
    "CogVideoXImageToVideoPipeline": Recipe({"in_channels": 8}, call=_COG),
    "CogVideoXVideoToVideoPipeline": Recipe(call=_COG, inputs=("video",)),
    "CogVideoXFunControlPipeline": Recipe(
        {"in_channels": 8}, call=_COG, inputs=("control_video",),
        components={"scheduler": _make("CogVideoXDDIMScheduler")},
    ),
    "CogView3PlusPipeline": Recipe(components=_DDIM, call=_SMALL),
    "CogView4Pipeline": Recipe(call=_SMALL),
    "CogView4ControlPipeline": Recipe({"in_channels": 8}, call=_SMALL),
    "Cosmos2TextToImagePipeline": Recipe({"max_size": (4, 32, 32)}, components=_KARRAS),
    "Cosmos2VideoToWorldPipeline": Recipe(
        {"max_size": (8, 32, 32), "in_channels": 5}, latents=4, components=_KARRAS, inputs=("image",)
    ),
    "Cosmos2_5_PredictBasePipeline": Recipe(
        {"max_size": (8, 32, 32), "in_channels": 5, "text_embed_dim": 48}, text=12, latents=4,
        call={"max_sequence_length": 128},
    ),
    "Cosmos2_5_TransferPipeline": Recipe(
        {
            "max_size": (8, 32, 32), "text_embed_dim": 48, "crossattn_proj_in_channels": 48,
            "encoder_hidden_states_channels": 48,
        },
        variant="controlnet", text=12, latents=4,
        components={"controlnet": _make(
            "CosmosControlNetModel", n_controlnet_blocks=2, in_channels=6, latent_channels=6, model_channels=24,
            num_attention_heads=2, attention_head_dim=12, mlp_ratio=2.0, text_embed_dim=20, adaln_lora_dim=6,
            max_size=(8, 32, 32), use_crossattn_projection=True, crossattn_proj_in_channels=48,
            encoder_hidden_states_channels=20,
        )},
        call={"num_frames_per_chunk": 9, "max_sequence_length": 128},
        cause="its ControlNet resizes with torchvision",
    ),
    "CosmosTextToWorldPipeline": Recipe(),
    "CosmosVideoToWorldPipeline": Recipe({"in_channels": 5}, latents=4, inputs=("image",)),
    "Cosmos3OmniPipeline": Recipe({"vocab_size": 400}, latents=4),
    "DiTPipeline": Recipe({"num_embeds_ada_norm": 1000}, latents=4, components=_DDIM, call={"class_labels": [1]}),
    "EasyAnimateControlPipeline": Recipe(
        cause="diffusers calls a method of its own with an argument that it does not take"
    ),
    "EasyAnimateInpaintPipeline": Recipe({"in_channels": 12, "resize_inpaint_mask_directly": False}, call={
        "video": torch.linspace(0, 1, 3 * 9 * 32 * 48).reshape(1, 3, 9, 32, 48),
        "mask": 255.0 * (torch.arange(9 * 32 * 48).reshape(1, 1, 9, 32, 48) % 48 > 24),
    }),
    "ErnieImagePipeline": Recipe(latents=1),
    "Flux2Pipeline": Recipe(**_KLEIN | {"transformer": {"in_channels": 8, "joint_attention_dim": 36}}),
    "Flux2KleinPipeline": Recipe(**_KLEIN),
    "Flux2KleinKVPipeline": Recipe(**_KLEIN),
    "Flux2KleinInpaintPipeline": Recipe(**_KLEIN),
    "FluxControlPipeline": Recipe(_CONTROL, latents=1),
    "FluxControlImg2ImgPipeline": Recipe(_CONTROL, latents=1),
    "FluxControlInpaintPipeline": Recipe(_CONTROL, latents=1),
    "FluxFillPipeline": Recipe({"in_channels": 24, "out_channels": 4}, latents=1),
    "FluxKontextPipeline": Recipe(inputs=("image",)),
    "GlmImagePipeline": Recipe(
        components={
            "text_encoder": lambda width, channels: t5("T5")(12, channels, vocab_size=384),
            "tokenizer": lambda width, channels: text.byte_tokenizer(),
            "vae": vae("AutoencoderKL", **KL | STATISTICS),
        },
        call=_WIDE | {"prior_token_ids": torch.arange(128)[None] % 16},
    ),
    "HeliosPipeline": Recipe(components={"scheduler": _make("HeliosScheduler", stages=1)}),
    "HeliosPyramidPipeline": Recipe(components={"scheduler": _make("HeliosScheduler", gamma=0.25)}, call=_LARGER),
    "HiDreamImagePipeline": Recipe(
        {"caption_channels": [12, 12], "text_emb_dim": 16, "max_resolution": (128, 128)}, text=12, call=_SMALL
    ),
    "HunyuanDiTPipeline": Recipe(**_HUNYUAN_DIT),
    "HunyuanDiTPAGPipeline": Recipe(**_HUNYUAN_DIT),
    "HunyuanDiTControlNetPipeline": Recipe(**_HUNYUAN_DIT | {"variant": "controlnet", "components": {
        **_HUNYUAN_DIT["components"],
        "controlnet": _make(
            "HunyuanDiT2DControlNetModel", in_channels=4, patch_size=2, sample_size=6, hidden_size=16,
            num_attention_heads=2, attention_head_dim=8, transformer_num_layers=4, mlp_ratio=2.0,
            cross_attention_dim=12, cross_attention_dim_t5=24, pooled_projection_dim=10,
        ),
    }}),
    "HunyuanImageRefinerPipeline": Recipe(
        {"patch_size": (1, 1, 1), "rope_axes_dim": (2, 2, 4), "in_channels": 16, "out_channels": 8}, latents=4
    ),
    "HunyuanVideoPipeline": Recipe({"pooled_projection_dim": 8}),
    "HunyuanSkyreelsImageToVideoPipeline": Recipe({"pooled_projection_dim": 8, "in_channels": 8}),
    "HunyuanVideoFramepackPipeline": Recipe({"pooled_projection_dim": 8, "image_proj_dim": 10}),
    "HunyuanVideo15Pipeline": Recipe(latents=4, components=_BYT5),
    "HunyuanVideo15ImageToVideoPipeline": Recipe(
        {"target_size": 64}, latents=4, components=_BYT5, variant="image-to-video"
    ),
    "Ideogram4Pipeline": Recipe(
        {"llm_features_dim": 156}, text=12, latents=1,
        components={"text_encoder": _deep_qwen3("model")},
        call={"guidance_schedule": [4.0] * 6, "max_sequence_length": 64},
    ),
    "Kandinsky5T2IPipeline": Recipe(_KANDINSKY | {"visual_cond": False}, text=12, components=_deep_kl(5)),
    "Kandinsky5I2IPipeline": Recipe(
        _KANDINSKY, text=12, components=_deep_kl(4), call={"height": 1024, "width": 1024, "max_sequence_length": 128}
    ),
    "Kandinsky5T2VPipeline": Recipe(_KANDINSKY, text=12),
    "Kandinsky5I2VPipeline": Recipe(_KANDINSKY, text=12, call={"num_frames": 21}),
    "Kandinsky6TI2VAPipeline": Recipe(_KANDINSKY, text=12, call={"sample_audio": False}),
    "Krea2Pipeline": Recipe(latents=1, settings={"text_encoder_select_layers": [1, 2, 3]}),
    "LTXPipeline": Recipe(latents=4, call=_LARGE),
    "LTXImageToVideoPipeline": Recipe(latents=4, call=_LARGE),
    "LTXConditionPipeline": Recipe(latents=4, call=_LARGE, inputs=("image",)),
    "LTXI2VLongMultiPromptPipeline": Recipe(
        latents=4, call=_LARGER, components={"scheduler": _make("LTXEulerAncestralRFScheduler")}
    ),
    "LTX2Pipeline": Recipe(_LTX2, latents=4, call=_LARGER),
    "LTX2ImageToVideoPipeline": Recipe(_LTX2, latents=4, call=_LARGER, inputs=("image",)),
    "LTX2DFRPipeline": Recipe(_LTX2 | {"use_keyframes_abs_pos_embedding": True}, latents=4, call=_LARGER),
    "LTX2HDRPipeline": Recipe(_LTX2, latents=4, call=_LARGER),
    "LTX2InContextPipeline": Recipe(_LTX2, latents=4, call=_LARGER),
    "LTX2ConditionPipeline": Recipe(_LTX2, latents=4, call=_LARGER),
    "LattePipeline": Recipe(latents=4, components=_DDIM, call={"video_length": 5, "num_frames": None}),
    "LongCatAudioDiTPipeline": Recipe(latents=6, call={"seconds": 2.0}),
    "LongCatImagePipeline": Recipe(**_LONGCAT),
    "LongCatImageEditPipeline": Recipe(**_LONGCAT | {"call": {}, "components": _deep_kl(5)}),
    "LucyEditPipeline": Recipe({"in_channels": 12}),
    "Lumina2Pipeline": Recipe({"axes_lens": (400, 32, 32)}),
    "MochiPipeline": Recipe({"in_channels": 12}, latents=12),
    "MotifVideoPipeline": Recipe(components=_FLOW),
    "MotifVideoImage2VideoPipeline": Recipe(variant="image-to-video", components=_FLOW),
    "OmniGenPipeline": Recipe({"vocab_size": 400, "pos_embed_max_size": 32}, components=_deep_kl(4)),
    "NucleusMoEImagePipeline": Recipe(call={"return_index": -1, "max_sequence_length": 200}),
    "PRXPipeline": Recipe(
        components={"vae": PARTS["AutoencoderKL"], "tokenizer": lambda width, channels: text.qwen_tokenizer(32)},
        call=_UNBINNED,
    ),
    "PRXPixelPipeline": Recipe(call=_UNBINNED),
    "PixArtAlphaPipeline": Recipe(**_PIXART),
    "PixArtSigmaPipeline": Recipe(**_PIXART),
    "PixArtSigmaPAGPipeline": Recipe(**_PIXART),
    "QwenImage21Pipeline": Recipe(latents=8, call=_WIDE | {"true_cfg_scale": 4.0}),
    "QwenImageEditPipeline": Recipe(components=_DEEP_QWEN_VAE, call=_WIDE),
    "QwenImageEditInpaintPipeline": Recipe(components=_DEEP_QWEN_VAE, call=_WIDE),
    "QwenImageEditPlusPipeline": Recipe(components=_DEEP_QWEN_VAE, call=_WIDE),
    "QwenImageLayeredPipeline": Recipe(components=_DEEP_QWEN_VAE, inputs=("image",), call={"layers": 2}),
    "QwenImageControlNetInpaintPipeline": Recipe(components={"controlnet": _make(
        "QwenImageControlNetModel", in_channels=8, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        axes_dims_rope=(2, 2, 4), out_channels=2, joint_attention_dim=12, extra_condition_channels=4,
    )}),
    "RFD4ProteinaPipeline": Recipe(cause="it makes proteins, and is refused as a model"),
    "SanaPipeline": Recipe(**_SANA),
    "SanaPAGPipeline": Recipe(**_SANA),
    "SanaControlNetPipeline": Recipe(**_SANA),
    "SanaSprintPipeline": Recipe(**_SPRINT),
    "SanaSprintImg2ImgPipeline": Recipe(**_SPRINT),
    "SanaWMLTX2Refiner": Recipe(cause="it refines latents of another pipeline, and returns latents"),
    "SanaWMPipeline": Recipe(
        {"chunk_plucker_channels": 48}, call={"action": "w-8", "intrinsics": [80.0, 80.0, 96.0, 64.0]} | _LARGER
    ),
    "SanaVideoPipeline": Recipe(components={"vae": PARTS["AutoencoderKLWan"]}, call=_UNBINNED | _WIDE),
    "SanaImageToVideoPipeline": Recipe(components={"vae": PARTS["AutoencoderKLWan"]}, call=_UNBINNED | _WIDE),
    "SkyReelsV2ImageToVideoPipeline": Recipe(
        {"in_channels": 16, "image_dim": 18},
        components={
            "image_processor": PARTS["CLIPImageProcessor"], "image_encoder": PARTS["CLIPVisionModelWithProjection"],
        },
    ),
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": Recipe(
        call={"num_frames": 17, "base_num_frames": 9, "overlap_history": 5}
    ),
    "StableDiffusion3Pipeline": Recipe(_SD3, text=16),
    "StableDiffusion3Img2ImgPipeline": Recipe(_SD3, text=16),
    "StableDiffusion3InpaintPipeline": Recipe(_SD3 | {"in_channels": 16, "out_channels": 16}, text=16, latents=16),
    "StableDiffusion3PAGPipeline": Recipe(_SD3, text=16),
    "StableDiffusion3PAGImg2ImgPipeline": Recipe(_SD3, text=16),
    "StableDiffusion3ControlNetPipeline": Recipe(_SD3, text=16),
    "StableDiffusion3ControlNetInpaintingPipeline": Recipe(_SD3, text=16, components={"controlnet": _make(
        "SD3ControlNetModel", num_attention_heads=2, attention_head_dim=8, sample_size=6, patch_size=2, in_channels=4,
        num_layers=1, caption_projection_dim=16, extra_conditioning_channels=1, **_SD3,
    )}),
    "StableAudio3Pipeline": Recipe(**_STABLE_AUDIO_3),
    "StableAudio3AudioToAudioPipeline": Recipe(**_STABLE_AUDIO_3),
    "StableAudio3InpaintPipeline": Recipe(
        **_STABLE_AUDIO_3 | {"call": {"seconds": 2.0, "mask_start_seconds": 0.5, "mask_end_seconds": 1.0}}
    ),
    "StableAudioPipeline": Recipe(
        {"cross_attention_input_dim": 8, "global_states_input_dim": 16},
        text=8,
        components={
            "projection_model": _make(
                "StableAudioProjectionModel", text_encoder_dim=8, conditioning_dim=8, min_value=0, max_value=32
            ),
            "scheduler": _make("EDMDPMSolverMultistepScheduler", solver_order=2, prediction_type="v_prediction"),
        },
        call={"seconds": 2.0},
    ),
    "VisualClozePipeline": Recipe(**_VISUAL_CLOZE),
    "VisualClozeGenerationPipeline": Recipe(**_VISUAL_CLOZE),
    "WanImageToVideoPipeline": Recipe(variant="image-to-video", components=_IMAGE_ENCODER | {"transformer_2": None}),
    "WanPipeline": Recipe(components={"transformer_2": None}),
    "WanVACEPipeline": Recipe({"vace_in_channels": 76}, inputs=("video",), components={"transformer_2": None}),
    "WanVideoToVideoPipeline": Recipe(inputs=("video",)),
    "WanAnimatePipeline": Recipe(
        {"rope_max_seq_len": 64}, call={"segment_frame_length": 9, "prev_segment_conditioning_frames": 1}
    ),
    "ZImagePipeline": Recipe(_Z_IMAGE),
    "ZImageControlNetPipeline": Recipe(
        _Z_IMAGE, components={"controlnet": _make("ZImageControlNetModel", control_in_dim=4, **_Z_CONTROL)}
    ),
    "ZImageControlNetInpaintPipeline": Recipe(
        _Z_IMAGE, components={"controlnet": _make("ZImageControlNetModel", control_in_dim=9, **_Z_CONTROL)}
    ),
    "ZImageOmniPipeline": Recipe(
        {"axes_lens": [512, 64, 64], "siglip_feat_dim": 8}, inputs=("image",), call=_LARGE, dtype="bfloat16"
    ),
    "ZImageImg2ImgPipeline": Recipe(_Z_IMAGE),
    "ZImageInpaintPipeline": Recipe(_Z_IMAGE, inputs=("image", "mask_image")),
}  # fmt: skip
