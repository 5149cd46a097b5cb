"""Models that make sound: F5-TTS, stable-audio-tools."""

from __future__ import annotations

import torch

from . import Case, Steps, cond, label, noise, of, rising, time

F5 = {"dim": 64, "heads": 4, "dim_head": 16, "ff_mult": 2, "mel_dim": 16, "text_num_embeds": 32, "depth": 8}
STABLE = {"io_channels": 8, "embed_dim": 64, "depth": 8, "num_heads": 2, "cond_token_dim": 32, "global_cond_dim": 32,
          "project_cond_tokens": False}  # fmt: skip


def _f5_inputs(guided: bool) -> Steps:
    known = {"cond": cond("voice", 1, 24, 16), "text": label(3, 5, 7, 9, 11, 13)[None], "cache": True, "mask": None}
    known |= {"cfg_infer": True} if guided else {"drop_audio_cond": False, "drop_text": False}
    return lambda step: ((), known | {"x": noise(step, 1, 24, 16), "time": rising(step)[0]})


def _stable_audio_inputs() -> Steps:
    known = {"cross_attn_cond": cond("prompt", 1, 6, 32), "global_embed": cond("seconds", 1, 32), "cfg_scale": 6.0,
             "cross_attn_cond_mask": torch.ones(1, 6, dtype=torch.bool)}  # fmt: skip
    return lambda step: ((noise(step, 1, 8, 24), time(step, scale=1.0)), known)


def _wrapped() -> torch.nn.Module:
    from stable_audio_tools.models.diffusion import ConditionedDiffusionModelWrapper, DiTWrapper

    model = DiTWrapper("v", **STABLE)
    return ConditionedDiffusionModelWrapper(
        model, torch.nn.Identity(), io_channels=8, sample_rate=44100, min_input_length=1,
        cross_attn_cond_ids=["prompt"], global_cond_ids=["seconds"])  # fmt: skip


def _wrapped_inputs() -> Steps:
    known = {"prompt": [cond("prompt", 1, 6, 32), torch.ones(1, 6)], "seconds": [cond("seconds", 1, 1, 32), None]}
    return lambda step: ((noise(step, 1, 8, 24), time(step, scale=1.0)), {"cond": known, "cfg_scale": 6.0})


TOOLS, TRANSFORMER = "Stability-AI/stable-audio-tools", "stable_audio_tools.models.dit.DiffusionTransformer"
CASES = (
    Case("DiT", "SWivid/F5-TTS", of("f5_tts.model.backbones.dit.DiT", **F5, text_dim=32, conv_layers=1),
         lambda: _f5_inputs(True), paths=("src",), notes="time rises"),
    Case("UNetT", "SWivid/F5-TTS", of("f5_tts.model.backbones.unett.UNetT", **F5, text_dim=32),
         lambda: _f5_inputs(True), paths=("src",),
         notes="a block is a list of modules that the model calls one by one; time rises"),
    Case("MMDiT", "SWivid/F5-TTS", of("f5_tts.model.backbones.mmdit.MMDiT", **F5),
         lambda: _f5_inputs(True), paths=("src",), notes="time rises"),
    Case("DiffusionTransformer", TOOLS, of(TRANSFORMER, **STABLE), _stable_audio_inputs,
         notes="guidance inside the forward"),
    Case("DiffusionTransformer", TOOLS, of(TRANSFORMER, global_cond_type="adaLN", **STABLE), _stable_audio_inputs,
         variant="adaLN", notes="guidance inside the forward"),
    Case("ConditionedDiffusionModelWrapper", TOOLS, _wrapped, _wrapped_inputs,
         notes="conditioning is a dictionary of lists"),
)  # fmt: skip
