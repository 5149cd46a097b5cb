"""Models that make videos: Wan 2.1, HunyuanVideo, Mochi, LTX-Video, Latte."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from . import Case, Steps, cond, label, noise, of, time
from .checkouts import pass_by

# ------------------------------------------------------------------------------------------------ Wan


def _wan(kind: str = "t2v") -> torch.nn.Module:
    with mock.patch("torch.cuda.current_device", return_value=0):  # A default of the text encoder.
        import wan.modules.attention as attention
        import wan.modules.model as model

    attention.FLASH_ATTN_2_AVAILABLE = False
    model.flash_attention = functools.partial(attention.attention, dtype=torch.float32)
    size = {"dim": 96, "ffn_dim": 192, "freq_dim": 32, "text_dim": 32, "text_len": 8, "num_heads": 4, "num_layers": 6}
    made = model.WanModel(model_type=kind, in_dim=4 if kind == "t2v" else 8, out_dim=4, **size)
    if kind != "t2v":
        made.img_emb = model.MLPProj(32, 96)
    return made


def _wan_inputs(kind: str = "t2v") -> Steps:
    known: dict[str, Any] = {"context": [cond("context", 6, 32)], "seq_len": 32}
    if kind != "t2v":
        known |= {"clip_fea": cond("clip", 1, 257, 32), "y": [cond("y", 4, 2, 8, 8)]}
    return lambda step: (([noise(step, 4, 2, 8, 8)],), known | {"t": time(step)})


# ------------------------------------------------------------------------------------------------ HunyuanVideo


def _hunyuan() -> torch.nn.Module:
    import hyvideo.modules.models as models

    models.get_cu_seqlens = _ends
    args = SimpleNamespace(text_states_dim=32, text_states_dim_2=16)
    return models.HYVideoDiffusionTransformer(
        args, in_channels=4, hidden_size=64, heads_num=4, mm_double_blocks_depth=3, mm_single_blocks_depth=6,
        rope_dim_list=[4, 6, 6], guidance_embed=True)  # fmt: skip


def _ends(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Where each sequence ends, then its padding; the original asks for a GPU."""
    ends = [0]
    for item, length in enumerate(mask.sum(dim=1).tolist()):
        ends += [item * (tokens + mask.shape[1]) + tokens + length, (item + 1) * (tokens + mask.shape[1])]
    return torch.tensor(ends, dtype=torch.int32)


def _hunyuan_inputs() -> Steps:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    angles = torch.arange(32)[:, None] * torch.linspace(1, 0.01, 8).repeat_interleave(2)
    known = {"text_states": cond("text", 1, 6, 32), "text_mask": mask, "text_states_2": cond("pooled", 1, 16),
             "freqs_cos": angles.cos(), "freqs_sin": angles.sin(), "guidance": torch.full((1,), 6000.0)}  # fmt: skip
    return lambda step: ((noise(step, 1, 4, 2, 8, 8), time(step)), known | {"return_dict": True})


# ------------------------------------------------------------------------------------------------ Mochi


class _Torch(ModuleType):
    """torch, whose bfloat16 is float32: the original asserts bfloat16, which not every CPU computes."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _mochi() -> torch.nn.Module:
    with mock.patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(major=8)):
        import genmo.lib.attn_imports as attention
        import genmo.mochi_preview.dit.joint_model.asymm_models_joint as joint
        import genmo.mochi_preview.dit.joint_model.temporal_rope as rope

    joint.sdpa_kernel = attention.sdpa_kernel = lambda _: contextlib.nullcontext()
    joint.torch = rope.torch = _Torch("torch")
    return joint.AsymmDiTJoint(
        depth=4,
        patch_size=2,
        num_heads=4,
        hidden_size_x=64,
        hidden_size_y=32,
        mlp_ratio_x=192.0,
        mlp_ratio_y=4.0,
        in_channels=4,
        qk_norm=True,
        qkv_bias=False,
        out_bias=True,
        patch_embed_bias=True,
        timestep_mlp_bias=True,
        timestep_scale=1000.0,
        t5_feat_dim=32,
        t5_token_length=6,
        rope_theta=10000.0,
        attention_mode="sdpa",
    )


def _mochi_inputs() -> Steps:
    mask = torch.tensor([[True, True, True, True, False, False]])
    packed = {"cu_seqlens_kv": torch.tensor([0, 36], dtype=torch.int32), "max_seqlen_in_batch_kv": 36,
              "valid_token_indices_kv": torch.arange(36)}  # fmt: skip
    known = {"y_feat": [cond("t5", 1, 6, 32)], "y_mask": [mask], "packed_indices": packed}
    return lambda step: ((noise(step, 1, 4, 2, 8, 8), time(step, scale=1.0)), known)


# ------------------------------------------------------------------------------------------------ LTX-Video


def _ltx_inputs() -> Steps:
    grid = torch.stack(torch.meshgrid(*map(torch.arange, (2, 4, 4)), indexing="ij")).flatten(1)[None].float()
    known = {"indices_grid": grid, "encoder_hidden_states": cond("text", 1, 6, 32), "return_dict": False,
             "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}  # fmt: skip
    return lambda step: ((noise(step, 1, 32, 8),), known | {"timestep": time(step, scale=1.0)[:, None]})


# ------------------------------------------------------------------------------------------------ Latte


def _latte() -> torch.nn.Module:
    pass_by("models")  # It imports LatteT2V, which is for an older diffusers.
    from models.latte import Latte

    return Latte(input_size=8, hidden_size=64, depth=8, num_heads=4, num_frames=2, num_classes=10, extras=2)


def _latte_inputs() -> Steps:
    kind = label(3)
    return lambda step: ((noise(step, 1, 2, 4, 8, 8), time(step)), {"y": kind})


CASES = (
    Case("WanModel", "Wan-Video/Wan2.1", _wan, _wan_inputs, notes="its attention for machines without flash_attn"),
    Case("WanModel", "Wan-Video/Wan2.1", lambda: _wan("i2v"), lambda: _wan_inputs("i2v"), variant="i2v",
         notes="its attention for machines without flash_attn; features of the image are of 32 channels, not 1280"),
    Case("HYVideoDiffusionTransformer", "Tencent/HunyuanVideo", _hunyuan, _hunyuan_inputs,
         notes="flash_attn by torch; ends of sequences are counted on the CPU"),
    Case("AsymmDiTJoint", "genmoai/mochi", _mochi, _mochi_inputs, paths=("src",), init="all",
         notes="float32 where it asserts bfloat16; attention by torch"),
    Case("Transformer3DModel", "Lightricks/LTX-Video",
         of("ltx_video.models.transformers.transformer3d.Transformer3DModel", num_attention_heads=4,
            attention_head_dim=16, in_channels=8, out_channels=8, num_layers=6, cross_attention_dim=64,
            attention_bias=True, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
            norm_elementwise_affine=False, norm_eps=1e-6, standardization_norm="rms_norm", qk_norm="rms_norm",
            caption_channels=32, positional_embedding_type="rope", positional_embedding_theta=10000.0,
            positional_embedding_max_pos=[20, 2048, 2048], timestep_scale_multiplier=1000), _ltx_inputs),
    Case("Latte", "Vchitect/Latte", _latte, _latte_inputs,
         notes="blocks over space and over time take turns, each with a batch of its own"),
)  # fmt: skip
