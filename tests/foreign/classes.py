"""Models that draw what a class or a prompt says, of one plain stack: DiT, SiT, LightningDiT, minRF, U-ViT."""

from __future__ import annotations

import torch

from . import Call, Case, Steps, cond, label, noise, rising, time


def _dit() -> torch.nn.Module:
    from models import DiT

    return DiT(input_size=8, hidden_size=64, depth=8, num_heads=4, num_classes=10)


def _sit() -> torch.nn.Module:
    from models import SiT

    return SiT(input_size=8, hidden_size=64, depth=8, num_heads=4, num_classes=10)


def _lightning() -> torch.nn.Module:
    from models.lightningdit import LightningDiT

    rope = {"use_rope": True, "use_rmsnorm": True, "use_swiglu": True, "use_qknorm": True}
    return LightningDiT(8, 1, 4, hidden_size=64, depth=8, num_heads=4, num_classes=10, **rope)


def _of_class(scale: float | None = None) -> Steps:
    kind = label(3, 7)

    def at(step: float) -> Call:
        return (noise(step, 2, 4, 8, 8), time(step, 2, scale) if scale else rising(step, 2), kind), {}

    return at


def _minrf() -> torch.nn.Module:
    from dit import DiT_Llama

    return DiT_Llama(in_channels=4, input_size=8, dim=64, n_layers=8, n_heads=4, multiple_of=32)


def _minrf_mmdit() -> torch.nn.Module:
    from mmdit import MMDiT

    return MMDiT(in_channels=4, out_channels=4, dim=64, global_conddim=64, cond_seq_dim=32,
                 n_layers=8, n_double_layers=4, n_heads=4, max_seq=64)  # fmt: skip


def _prompt() -> Steps:
    known = {"c_seq": cond("prompt", 1, 6, 32)}
    return lambda step: ((noise(step, 1, 4, 8, 8), time(step, scale=1.0)), {"conds": known})


def _uvit() -> torch.nn.Module:
    from libs.uvit import UViT

    return UViT(img_size=8, patch_size=2, in_chans=4, embed_dim=64, depth=8, num_heads=4, num_classes=10)


def _uvit_t2i() -> torch.nn.Module:
    from libs.uvit_t2i import UViT

    return UViT(img_size=8, patch_size=2, in_chans=4, embed_dim=64, depth=8, num_heads=4, clip_dim=32, num_clip_token=6)


def _uvit_class() -> Steps:
    kind = label(3, 7)
    return lambda step: ((noise(step, 2, 4, 8, 8), time(step, 2)), {"y": kind})


def _uvit_prompt() -> Steps:
    context = cond("prompt", 1, 6, 32)
    return lambda step: ((noise(step, 1, 4, 8, 8), time(step)), {"context": context})


CASES = (
    Case("DiT", "facebookresearch/DiT", _dit, lambda: _of_class(1000.0)),
    Case("SiT", "willisma/SiT", _sit, _of_class, notes="time rises"),
    Case("LightningDiT", "hustvl/LightningDiT", _lightning, _of_class, notes="time rises"),
    Case("DiT_Llama", "cloneofsimo/minRF", _minrf, lambda: _of_class(1.0)),
    Case("MMDiT", "cloneofsimo/minRF", _minrf_mmdit, _prompt, paths=("advanced",)),
    Case("UViT", "baofff/U-ViT", _uvit, _uvit_class, notes="each block of the second half takes one of the first"),
    Case("UViT", "baofff/U-ViT", _uvit_t2i, _uvit_prompt, variant="t2i", notes="time and prompt are tokens"),
)
