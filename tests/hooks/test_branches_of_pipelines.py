"""Real pipelines that do not name their branches, and make some of their conditioning anew at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_context import Watch

from pipelines import PIPELINES, images
from samovar.hooks import BranchHook, HookRegistry

STEPS = 7


def flux_parts(**changes: Any) -> dict[str, Any]:
    from diffusers import FluxControlNetModel, FluxTransformer2DModel

    parts = images._flux_components()
    settings = images._FLUX | {"guidance_embeds": True}
    parts["transformer"] = FluxTransformer2DModel(num_layers=1, num_single_layers=1, **settings)
    parts["controlnet"] = FluxControlNetModel(num_layers=1, num_single_layers=1, **settings)
    return parts | changes


def flux_controlnet() -> tuple[Any, Any, dict[str, Any], int]:
    from diffusers import FluxControlNetPipeline

    pipe = FluxControlNetPipeline(**flux_parts())
    return pipe, pipe.transformer, PIPELINES["flux-controlnet"].settings, 2


def flux_controlnet_image_to_image() -> tuple[Any, Any, dict[str, Any], int]:
    from diffusers import FluxControlNetImg2ImgPipeline

    pipe = FluxControlNetImg2ImgPipeline(**flux_parts())
    control = PIPELINES["flux-controlnet"].settings["control_image"]
    call = {"prompt": "a cat", "control_image": control, "image": control, "strength": 1.0, "height": 16, "width": 24}
    return pipe, pipe.transformer, call | {"max_sequence_length": 8}, 1


def sdxl_controlnet() -> tuple[Any, Any, dict[str, Any], int]:
    from diffusers import (
        ControlNetModel,
        EulerDiscreteScheduler,
        StableDiffusionXLControlNetPipeline,
        UNet2DConditionModel,
    )

    settings: dict[str, Any] = {
        "block_out_channels": (4, 8), "layers_per_block": 1, "in_channels": 4, "norm_num_groups": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": (2, 4),
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "transformer_layers_per_block": (1, 2),
        "projection_class_embeddings_input_dim": 56, "cross_attention_dim": 12, "use_linear_projection": True,
    }  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=8, out_channels=4, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **settings
    )
    controlnet = ControlNetModel(conditioning_embedding_out_channels=(4, 8), **settings)
    pipe = StableDiffusionXLControlNetPipeline(
        vae=images._kl_vae(4), text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None, unet=unet,
        controlnet=controlnet, scheduler=EulerDiscreteScheduler(), add_watermarker=False,
    )  # fmt: skip
    embeds = {"prompt_embeds": torch.ones(1, 5, 12), "pooled_prompt_embeds": torch.ones(1, 8)}
    call = embeds | {f"negative_{name}": 0 * value for name, value in embeds.items()}
    return pipe, unet, call | {"image": torch.zeros(1, 3, 16, 16), "height": 16, "width": 16}, 1


def lumina2() -> tuple[Any, Any, dict[str, Any], int]:
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

    model = Lumina2Transformer2DModel(
        sample_size=4, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1, num_attention_heads=3,
        num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(32, 32, 32), cap_feat_dim=12,
    )  # fmt: skip
    pipe = Lumina2Pipeline(model, FlowMatchEulerDiscreteScheduler(), images._kl_vae(4), None, None)
    mask = torch.ones(1, 5, dtype=torch.bool)
    call = {"prompt_embeds": torch.ones(1, 5, 12), "prompt_attention_mask": mask, "height": 16, "width": 16}
    negative = {"negative_prompt_embeds": torch.zeros(1, 5, 12), "negative_prompt_attention_mask": mask.clone()}
    return pipe, model, call | negative, 2


def ace_step() -> tuple[Any, Any, dict[str, Any], int]:
    from diffusers import AceStepPipeline, AutoencoderOobleck, FlowMatchEulerDiscreteScheduler

    import zoo

    class Conditions(torch.nn.Module):
        """What encodes prompts, lyrics and a timbre."""

        device, dtype = torch.device("cpu"), torch.float32

        def __init__(self) -> None:
            super().__init__()
            self.null_condition_emb = torch.nn.Parameter(torch.zeros(1, 1, text))
            self.register_buffer("silence_latent", torch.zeros(1, 1000, channels))

        def forward(self, **given: Any) -> Any:
            return torch.ones(1, 5, text), torch.ones(1, 5)

    class Pipeline(AceStepPipeline):
        def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
            return (None,) * 4

    case = next(case for case in zoo.load() if case.id == "AceStepTransformer1DModel")
    model, given = case.build(), case.inputs(0)
    channels, text = given["hidden_states"].shape[-1], given["encoder_hidden_states"].shape[-1]
    vae = AutoencoderOobleck(
        encoder_hidden_size=4, downsampling_ratios=[2, 2], channel_multiples=[1, 1], decoder_channels=4,
        decoder_input_channels=channels, sampling_rate=40,
    )  # fmt: skip
    pipe = Pipeline(vae, None, None, model, Conditions(), FlowMatchEulerDiscreteScheduler(num_train_timesteps=1))
    return pipe, model, {"prompt": "a song", "audio_duration": 1.6, "guidance_scale": 2.0}, 1


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [flux_controlnet, flux_controlnet_image_to_image, sdxl_controlnet, lumina2, ace_step],
    ids=lambda f: f.__name__,
)
def test_the_same_branches_at_every_step(make: Callable[[], tuple[Any, Any, dict[str, Any], int]]) -> None:
    torch.manual_seed(0)
    pipe, denoiser, call, branches = make()
    pipe.set_progress_bar_config(disable=True)
    watch, hook = Watch(), BranchHook()
    HookRegistry.get_or_create(denoiser).register_hook("watch", watch)
    HookRegistry.get_or_create(denoiser).register_hook("branches", hook)
    for _ in range(2):
        watch.seen.clear()
        pipe(num_inference_steps=STEPS, output_type="latent", **call)
        names = [context.branch for context in watch.seen]
        assert len(names) == branches * STEPS
        assert len(set(names)) == branches
        assert None not in names
        assert names == names[:branches] * STEPS
        assert hook.trouble() is None
        hook.drop(None)
