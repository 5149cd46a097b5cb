"""UNets, which have no one stack of blocks: what recipes.md says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from samovar import attach

from . import text


@pytest.fixture
def pipe() -> Any:
    torch.manual_seed(0)
    tokenizer = text.clip_tokenizer()
    parts = {
        "unet": UNet2DConditionModel(
            block_out_channels=(8, 16), layers_per_block=1, sample_size=8, cross_attention_dim=16, norm_num_groups=4,
            attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        "vae": AutoencoderKL(block_out_channels=(8,), norm_num_groups=4),
        "text_encoder": CLIPTextModel(CLIPTextConfig(
            hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2,
            vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )),
    }  # fmt: skip
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    made = StableDiffusionPipeline(
        **parts, tokenizer=tokenizer, scheduler=scheduler, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def draw(pipe: Any) -> torch.Tensor:
    size = {"height": 16, "width": 16, "num_inference_steps": 24, "output_type": "latent"}
    image: torch.Tensor = pipe("a cat", generator=torch.Generator().manual_seed(0), **size).images
    return image


def test_a_unet_is_cached_and_streamed_as_a_transformer_is(pipe: Any) -> None:
    exact = draw(pipe)
    with attach(pipe, tolerance="high") as attached:
        assert torch.linalg.norm(draw(pipe) - exact) < 0.02 * torch.linalg.norm(exact)
        assert attached.stats().cache.skipped >= 8
    with attach(pipe, cache={"rel_l1_thresh": 0.5}) as attached:
        draw(pipe)
        assert attached.stats().cache.skipped >= 8
    with attach(pipe, offload={"mode": "layerwise", "device": "cpu"}) as attached:
        assert torch.equal(draw(pipe), exact)
        assert "4 of 4 blocks stream" in str(attached.explain())
    assert torch.equal(draw(pipe), exact)
