"""What does the signature of a pipeline not say about its tiny copy?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import text
from .builder import PARTS, Recipe, _t5


def _make(name: str, **config: Any) -> Callable[[int, int], Any]:
    """A component of diffusers, whatever the widths are."""

    def make(width: int, channels: int) -> Any:
        import diffusers

        return getattr(diffusers, name)(**config)

    return make


_DDIM = {"scheduler": _make("DDIMScheduler")}
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
        "text_encoder_2": lambda width, channels: _t5("T5")(24, channels),
        "tokenizer_2": lambda width, channels: text.t5_tokenizer(),
    },
    "call": _SMALL | _UNBINNED,
}
_BYT5 = {"text_encoder_2": lambda width, channels: _t5("T5")(14, channels)}
_LTX2 = {"audio_in_channels": 8, "audio_out_channels": 8}
_SCM = {"scheduler": _make("SCMScheduler")}
_SPRINT: dict[str, Any] = {
    "transformer": {"guidance_embeds": True},
    "components": _SCM,
    "call": _UNBINNED | _WIDE | {"intermediate_timesteps": None},
}
_Z_IMAGE = {"axes_lens": [128, 32, 32]}
_SANA: dict[str, Any] = {"call": _UNBINNED | _WIDE, "components": _DPM}
_PIXART: dict[str, Any] = {"latents": 4, "call": _UNBINNED, "components": _DPM}

RECIPES: dict[str, Recipe] = {
    "AnyFlowFARPipeline": Recipe({"chunk_partition": (1, 2)}),
    "AllegroPipeline": Recipe(components={"scheduler": _make("EulerAncestralDiscreteScheduler")}),
    "AuraFlowPipeline": Recipe(call=_SMALL),
    "BriaFiboPipeline": Recipe({"joint_attention_dim": 24, "text_encoder_dim": 12}, text=12, latents=4, call=_WIDE),
    "BriaFiboEditPipeline": Recipe(
        {"joint_attention_dim": 24, "text_encoder_dim": 12}, text=12, latents=4, call=_WIDE, inputs=("image",)
    ),
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
    "DiTPipeline": Recipe({"num_embeds_ada_norm": 1000}, latents=4, components=_DDIM, call={"class_labels": [1]}),
    "EasyAnimateInpaintPipeline": Recipe({"in_channels": 9}, inputs=("video", "mask_video")),
    "Flux2KleinPipeline": Recipe(**_KLEIN),
    "Flux2KleinKVPipeline": Recipe(**_KLEIN),
    "Flux2KleinInpaintPipeline": Recipe(**_KLEIN),
    "FluxControlPipeline": Recipe(_CONTROL, latents=1),
    "FluxControlImg2ImgPipeline": Recipe(_CONTROL, latents=1),
    "FluxControlInpaintPipeline": Recipe(_CONTROL, latents=1),
    "FluxFillPipeline": Recipe({"in_channels": 24, "out_channels": 4}, latents=1),
    "FluxKontextPipeline": Recipe(inputs=("image",)),
    "HunyuanDiTPipeline": Recipe(**_HUNYUAN_DIT),
    "HunyuanDiTPAGPipeline": Recipe(**_HUNYUAN_DIT),
    "HunyuanDiTControlNetPipeline": Recipe(**_HUNYUAN_DIT),
    "HunyuanVideoPipeline": Recipe({"pooled_projection_dim": 8}),
    "HunyuanSkyreelsImageToVideoPipeline": Recipe({"pooled_projection_dim": 8, "in_channels": 8}),
    "HunyuanVideo15Pipeline": Recipe(latents=4, components=_BYT5),
    "HunyuanVideo15ImageToVideoPipeline": Recipe(
        {"target_size": 64}, latents=4, components=_BYT5, variant="image-to-video"
    ),
    "Ideogram4Pipeline": Recipe(call={"guidance_schedule": [4.0] * 6, "max_sequence_length": 64}),
    "Kandinsky5T2IPipeline": Recipe(_KANDINSKY, text=12),
    "Kandinsky5T2VPipeline": Recipe(_KANDINSKY, text=12),
    "Kandinsky5I2VPipeline": Recipe(_KANDINSKY, text=12),
    "Kandinsky6TI2VAPipeline": Recipe(_KANDINSKY, text=12, call={"sample_audio": False}),
    "LTXPipeline": Recipe(latents=4, call=_LARGE),
    "LTXImageToVideoPipeline": Recipe(latents=4, call=_LARGE),
    "LTXConditionPipeline": Recipe(latents=4, call=_LARGE, inputs=("image",)),
    "LTXI2VLongMultiPromptPipeline": Recipe(latents=4, call=_LARGE),
    "LTX2Pipeline": Recipe(_LTX2, latents=4, call=_LARGER),
    "LTX2ImageToVideoPipeline": Recipe(_LTX2, latents=4, call=_LARGER, inputs=("image",)),
    "LTX2DFRPipeline": Recipe(_LTX2, latents=4, call=_LARGER),
    "LTX2HDRPipeline": Recipe(_LTX2, latents=4, call=_LARGER),
    "LTX2InContextPipeline": Recipe(_LTX2, latents=4, call=_LARGER),
    "LTX2ConditionPipeline": Recipe(_LTX2, latents=4, call=_LARGER),
    "LattePipeline": Recipe(latents=4, components=_DDIM, call={"video_length": 5, "num_frames": None}),
    "LucyEditPipeline": Recipe({"in_channels": 12}),
    "Lumina2Pipeline": Recipe({"axes_lens": (400, 32, 32)}),
    "MochiPipeline": Recipe({"in_channels": 12}, latents=12),
    "PRXPixelPipeline": Recipe(call=_UNBINNED),
    "PixArtAlphaPipeline": Recipe(**_PIXART),
    "PixArtSigmaPipeline": Recipe(**_PIXART),
    "PixArtSigmaPAGPipeline": Recipe(**_PIXART),
    "QwenImageControlNetInpaintPipeline": Recipe(components={"controlnet": _make(
        "QwenImageControlNetModel", in_channels=8, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        axes_dims_rope=(2, 2, 4), out_channels=2, joint_attention_dim=12, extra_condition_channels=4,
    )}),
    "SanaPipeline": Recipe(**_SANA),
    "SanaPAGPipeline": Recipe(**_SANA),
    "SanaControlNetPipeline": Recipe(**_SANA),
    "SanaSprintPipeline": Recipe(**_SPRINT),
    "SanaSprintImg2ImgPipeline": Recipe(**_SPRINT),
    "SanaVideoPipeline": Recipe(components={"vae": PARTS["AutoencoderKLWan"]}, call=_UNBINNED | _WIDE),
    "SanaImageToVideoPipeline": Recipe(components={"vae": PARTS["AutoencoderKLWan"]}, call=_UNBINNED | _WIDE),
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
    "WanImageToVideoPipeline": Recipe(variant="image-to-video", components=_IMAGE_ENCODER | {"transformer_2": None}),
    "WanPipeline": Recipe(components={"transformer_2": None}),
    "WanVACEPipeline": Recipe({"vace_in_channels": 76}, inputs=("video",), components={"transformer_2": None}),
    "WanVideoToVideoPipeline": Recipe(inputs=("video",)),
    "WanAnimatePipeline": Recipe(
        {"rope_max_seq_len": 64}, call={"segment_frame_length": 9, "prev_segment_conditioning_frames": 1}
    ),
    "ZImagePipeline": Recipe(_Z_IMAGE),
    "ZImageImg2ImgPipeline": Recipe(_Z_IMAGE),
    "ZImageInpaintPipeline": Recipe(_Z_IMAGE, inputs=("image", "mask_image")),
}  # fmt: skip
