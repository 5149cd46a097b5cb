"""Models of Stability AI: Stable Diffusion 3.5, and stable-audio-tools."""

from __future__ import annotations

import torch

from . import Case, Steps, cond, noise, time


def _sd35(*dual: int) -> torch.nn.Module:
    from mmditx import MMDiTX

    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 256}}
    model = MMDiTX(
        input_size=None,
        in_channels=4,
        depth=4,
        adm_in_channels=16,
        context_embedder_config=embedder,
        pos_embed_max_size=8,
        num_patches=64,
        qk_norm="rms",
        x_block_self_attn_layers=list(dual),
    )
    torch.nn.init.normal_(model.pos_embed, std=0.1)
    return model


def _sd35_inputs() -> Steps:
    known = {"y": cond("y", 1, 16), "context": cond("context", 1, 6, 32), "skip_layers": []}
    return lambda step: ((noise(step, 1, 4, 8, 8), time(step)), known)


CASES = (
    Case("MMDiTX", "Stability-AI/sd3.5", _sd35, _sd35_inputs, init="all"),
    Case("MMDiTX", "Stability-AI/sd3.5", lambda: _sd35(0, 1), _sd35_inputs, variant="medium", init="all"),
)
