"""Models that draw what a class or a prompt says, of one plain stack: DiT, SiT, LightningDiT, minRF, U-ViT."""

from __future__ import annotations

from . import Call, Case, Steps, cond, label, noise, of, rising, time

SIZE = {"hidden_size": 64, "depth": 8, "num_heads": 4, "num_classes": 10}
UVIT = {"img_size": 8, "patch_size": 2, "in_chans": 4, "embed_dim": 64, "depth": 8, "num_heads": 4}


def _of_class(scale: float | None = None) -> Steps:
    kind = label(3, 7)

    def at(step: float) -> Call:
        return (noise(step, 2, 4, 8, 8), time(step, 2, scale) if scale else rising(step, 2), kind), {}

    return at


def _prompt() -> Steps:
    known = {"c_seq": cond("prompt", 1, 6, 32)}
    return lambda step: ((noise(step, 1, 4, 8, 8), time(step, scale=1.0)), {"conds": known})


def _uvit_class() -> Steps:
    kind = label(3, 7)
    return lambda step: ((noise(step, 2, 4, 8, 8), time(step, 2)), {"y": kind})


def _uvit_prompt() -> Steps:
    context = cond("prompt", 1, 6, 32)
    return lambda step: ((noise(step, 1, 4, 8, 8), time(step)), {"context": context})


CASES = (
    Case("DiT", "facebookresearch/DiT", of("models.DiT", input_size=8, **SIZE), lambda: _of_class(1000.0)),
    Case("SiT", "willisma/SiT", of("models.SiT", input_size=8, **SIZE), _of_class, notes="time rises"),
    Case("LightningDiT", "hustvl/LightningDiT",
         of("models.lightningdit.LightningDiT", input_size=8, patch_size=1, in_channels=4, use_rope=True,
            use_rmsnorm=True, use_swiglu=True, use_qknorm=True, **SIZE), _of_class, notes="time rises"),
    Case("DiT_Llama", "cloneofsimo/minRF",
         of("dit.DiT_Llama", in_channels=4, input_size=8, dim=64, n_layers=8, n_heads=4, multiple_of=32),
         lambda: _of_class(1.0)),
    Case("MMDiT", "cloneofsimo/minRF",
         of("mmdit.MMDiT", in_channels=4, out_channels=4, dim=64, global_conddim=64, cond_seq_dim=32, n_layers=8,
            n_double_layers=4, n_heads=4, max_seq=64), _prompt, paths=("advanced",)),
    Case("UViT", "baofff/U-ViT", of("libs.uvit.UViT", num_classes=10, **UVIT), _uvit_class,
         notes="each block of the second half takes one of the first"),
    Case("UViT", "baofff/U-ViT", of("libs.uvit_t2i.UViT", clip_dim=32, num_clip_token=6, **UVIT), _uvit_prompt,
         variant="t2i", notes="time and prompt are tokens"),
)  # fmt: skip
