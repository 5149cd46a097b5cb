"""The model of black-forest-labs and those built like it: FLUX.1, Open-Sora 2."""

from __future__ import annotations

import torch

from . import Case, Steps, cond, noise, time

SIZE = {"hidden_size": 64, "num_heads": 4, "depth": 2, "depth_single_blocks": 4, "mlp_ratio": 4.0, "qkv_bias": True,
        "axes_dim": [4, 6, 6], "theta": 10_000, "vec_in_dim": 16, "context_in_dim": 32}  # fmt: skip


def _ids(tokens: int) -> torch.Tensor:
    ids = torch.zeros(1, tokens, 3)
    ids[0, :, 1] = torch.arange(tokens) // 4
    ids[0, :, 2] = torch.arange(tokens) % 4
    return ids


def _flux() -> torch.nn.Module:
    from flux.model import Flux, FluxParams

    return Flux(FluxParams(in_channels=16, out_channels=16, guidance_embed=True, **SIZE))


def _flux_inputs() -> Steps:
    known = {"img_ids": _ids(16), "txt": cond("txt", 1, 6, 32), "txt_ids": torch.zeros(1, 6, 3), "y": cond("y", 1, 16),
             "guidance": torch.full((1,), 3.5)}  # fmt: skip
    return lambda step: ((), known | {"img": noise(step, 1, 16, 16), "timesteps": time(step, scale=1.0)})


def _open_sora() -> torch.nn.Module:
    from opensora.models.mmdit.model import MMDiTConfig, MMDiTModel

    config = {"from_pretrained": "", "cache_dir": "", "in_channels": 16, "guidance_embed": False, "cond_embed": True}
    return MMDiTModel(MMDiTConfig(**config, **SIZE, fused_qkv=False, use_liger_rope=True))


def _open_sora_inputs() -> Steps:
    known = {"img_ids": _ids(16), "txt": cond("txt", 1, 6, 32), "txt_ids": torch.zeros(1, 6, 3),
             "y_vec": cond("y", 1, 16), "cond": cond("frame", 1, 16, 20)}  # fmt: skip
    return lambda step: ((), known | {"img": noise(step, 1, 16, 16), "timesteps": time(step, scale=1.0)})


CASES = (
    Case("Flux", "black-forest-labs/flux", _flux, _flux_inputs, paths=("src",)),
    Case("MMDiTModel", "hpcaitech/Open-Sora", _open_sora, _open_sora_inputs, notes="flash_attn and liger by torch"),
)
