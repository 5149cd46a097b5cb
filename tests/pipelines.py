"""Tiny pipelines of real diffusers classes with random weights, for tests that need a whole pipeline."""

from __future__ import annotations

import json
import string
import tempfile
from pathlib import Path
from typing import Any

import torch

_WORDS = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]


def tiny_flux_pipeline(seed: int = 0) -> Any:
    """A FluxPipeline of 16x16 pictures: two dual and three single blocks, two text encoders and a VAE."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    clip = CLIPTextConfig(
        vocab_size=len(_WORDS) + 2, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        projection_dim=8, bos_token_id=len(_WORDS), eos_token_id=len(_WORDS) + 1, pad_token_id=len(_WORDS) + 1,
    )  # fmt: skip
    t5 = T5Config(vocab_size=len(_WORDS) + 2, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(4, 8), norm_num_groups=2, latent_channels=1,
            use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0, scaling_factor=1.0,
        ),
        text_encoder=CLIPTextModel(clip).eval(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=_t5_tokenizer(),
        transformer=FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=12, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
        ).eval(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    vocabulary = {word: index for index, word in enumerate([*_WORDS, "<|startoftext|>", "<|endoftext|>"])}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.json").write_text(json.dumps(vocabulary))
        (Path(folder) / "merges.txt").write_text("#version: 0.2\n")
        return CLIPTokenizer.from_pretrained(folder, model_max_length=16)


def _t5_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{c}", -1.0) for c in string.ascii_lowercase)]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((c, -2.0) for c in string.ascii_lowercase)][:54], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0, model_max_length=16)
