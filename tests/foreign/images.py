"""Models that draw what a prompt says: HiDream-I1, Lumina-Image 2.0, OmniGen, PixArt-alpha."""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import Case, Steps, cond, label, noise, of, rising, time
from .checkouts import pass_by


def _hidream_inputs() -> Steps:
    known = {"encoder_hidden_states": [cond("t5", 1, 6, 32), cond("llama", 4, 1, 6, 32)], "img_sizes": None,
             "pooled_embeds": cond("pooled", 1, 16), "img_ids": None, "return_dict": False}  # fmt: skip
    return lambda step: ((), known | {"hidden_states": noise(step, 1, 4, 8, 8), "timesteps": time(step)})


def _lumina_inputs() -> Steps:
    known = {"cap_feats": cond("caption", 1, 6, 32), "cap_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}
    return lambda step: ((noise(step, 1, 4, 8, 8), rising(step)), known)


def _omnigen() -> torch.nn.Module:
    pass_by("OmniGen")  # It imports a pipeline for an older transformers.
    from OmniGen.model import OmniGen
    from OmniGen.transformer import Phi3Config

    config = Phi3Config(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=6, rope_scaling=None,
                        num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, eos_token_id=1)  # fmt: skip
    model = OmniGen(config, pos_embed_max_size=16)
    for layer in model.llm.layers:
        layer.__class__ = _older(type(layer))
        layer.rotary_emb = model.llm.rotary_emb
    return model


@functools.cache
def _older(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A layer as transformers had it when the model was written: it turns positions itself, and returns a tuple."""

    def forward(self: Any, hidden_states: Any, attention_mask: Any, position_ids: Any, **_: Any) -> tuple[Any, ...]:
        turned = self.rotary_emb(hidden_states, position_ids)
        states = super(made, self).forward(hidden_states, attention_mask=attention_mask, position_embeddings=turned)
        return (states,)

    made = type(kind.__name__, (kind,), {"forward": forward})
    return made


def _omnigen_inputs() -> Steps:
    tokens = 6 + 1 + 16
    known = {"input_ids": label(3, 5, 7, 9, 11, 13)[None], "input_img_latents": None, "input_image_sizes": {},
             "attention_mask": torch.ones(1, tokens, tokens).tril(), "position_ids": torch.arange(tokens)[None],
             "padding_latent": [None], "past_key_values": None, "return_past_key_values": False}  # fmt: skip
    known["attention_mask"][:, 7:, 7:] = 1
    return lambda step: (([noise(step, 1, 4, 8, 8)], rising(step)), known)


def _pixart(many_sizes: bool) -> torch.nn.Module:
    for package in ("diffusion", "diffusion.model", "diffusion.model.nets"):  # They import solvers and ControlNets.
        pass_by(package)
    from diffusion.model.nets.PixArt import PixArt
    from diffusion.model.nets.PixArtMS import PixArtMS

    made = PixArtMS if many_sizes else PixArt
    return made(input_size=8, hidden_size=96, depth=8, num_heads=4, caption_channels=32, model_max_length=6)


def _pixart_inputs() -> Steps:
    sizes = {"img_hw": torch.tensor([[64.0, 64.0]]), "aspect_ratio": torch.tensor([[1.0]])}
    known = {"y": cond("caption", 1, 1, 6, 32), "mask": torch.tensor([[[[1, 1, 1, 1, 0, 0]]]]), "data_info": sizes}
    return lambda step: ((noise(step, 1, 4, 8, 8), time(step)), known)


CASES = (
    Case("HiDreamImageTransformer2DModel", "HiDream-ai/HiDream-I1",
         of("hi_diffusers.models.transformers.transformer_hidream_image.HiDreamImageTransformer2DModel", patch_size=2,
            in_channels=4, out_channels=4, num_layers=2, num_single_layers=4, attention_head_dim=16,
            num_attention_heads=4, caption_channels=[32, 32], text_emb_dim=16, num_routed_experts=4,
            num_activated_experts=2, axes_dims_rope=(8, 4, 4), max_resolution=(16, 16),
            llama_layers=[0, 1, 2, 3, 3, 3]), _hidream_inputs, init="all",
         notes="text is joined to the tokens before each block and cut off after it; mixtures of experts"),
    Case("NextDiT", "Alpha-VLLM/Lumina-Image-2.0",
         of("models.model.NextDiT", in_channels=4, dim=64, n_layers=13, n_refiner_layers=1, n_heads=4, n_kv_heads=2,
            multiple_of=32, qk_norm=True, cap_feat_dim=32, axes_dims=[4, 6, 6], axes_lens=[32, 16, 16]),
         _lumina_inputs, notes="flash_attn by torch; time rises"),
    Case("PixArt", "PixArt-alpha/PixArt-alpha", lambda: _pixart(False), _pixart_inputs, needs=("xformers",),
         notes="xformers by torch"),
    Case("PixArtMS", "PixArt-alpha/PixArt-alpha", lambda: _pixart(True), _pixart_inputs, needs=("xformers",),
         notes="xformers by torch"),
    Case("OmniGen", "VectorSpaceLab/OmniGen", _omnigen, _omnigen_inputs,
         notes="a language model, whose prompt, time and picture are one sequence; layers as an "
         "older transformers had them; time rises"),
)  # fmt: skip
