"""ComfyUI's own models. Options are a new dictionary at every step, which the models write into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import Call, Case, Steps, cond, label, noise, of, time

Make = Callable[[], torch.nn.Module]


def _ops() -> dict[str, Any]:
    """What every model is made with. Its layers leave their memory as it is, so all weights are made anew."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.ops

    return {"operations": comfy.ops.disable_weight_init, "dtype": torch.float32, "device": "cpu"}


def _of(path: str, **settings: Any) -> Make:
    """How a class of `comfy.ldm` is made."""

    def make() -> torch.nn.Module:
        return of(f"comfy.ldm.{path}", **settings, **_ops())()

    return make


def _inputs(*shape: int, scale: float = 1.0, **known: Any) -> Callable[[], Steps]:
    """One branch of one run, by a caller who keeps the conditioning and has no options. A tuple is the shape of some
    conditioning."""

    def begin() -> Steps:
        given = {"context": (1, 6, 32)} | known
        given = {name: cond(name, *value) if isinstance(value, tuple) else value for name, value in given.items()}
        return lambda step: ((noise(step, *shape), time(step, scale=scale)), given | {"transformer_options": {}})

    return begin


def _sampled(begin: Callable[[], Steps]) -> Callable[[], Steps]:
    """The same as ComfyUI's samplers call it: the options hold the time, and conditioning is a new tensor each time."""

    def again() -> Steps:
        steps = begin()
        sigmas = torch.stack([time(step, scale=1.0)[0] for step in range(13)])

        def at(step: float) -> Call:
            args, known = steps(step)
            made = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in known.items()}
            options = {"cond_or_uncond": [0], "sigmas": time(step, scale=1.0), "sample_sigmas": sigmas, "patches": {}}
            return args, made | {"transformer_options": options}

        return at

    return again


FLUX = {"hidden_size": 64, "num_heads": 4, "depth": 2, "depth_single_blocks": 4, "mlp_ratio": 4.0, "qkv_bias": True,
        "axes_dim": [4, 6, 6], "theta": 10_000, "vec_in_dim": 16, "context_in_dim": 32}  # fmt: skip
CHROMA = FLUX | {"depth": 4, "depth_single_blocks": 8, "in_dim": 64, "out_dim": 64, "hidden_dim": 64, "n_layers": 2,
                 "txt_ids_dims": []}  # fmt: skip
WAN = {"in_dim": 4, "out_dim": 4, "dim": 96, "ffn_dim": 192, "freq_dim": 32, "text_dim": 32, "num_heads": 4,
       "num_layers": 6}  # fmt: skip
LUMINA = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "n_layers": 13, "n_refiner_layers": 1, "multiple_of": 32,
          "in_channels": 4, "qk_norm": True, "cap_feat_dim": 32, "axes_dims": [4, 6, 6], "axes_lens": [32, 16, 16],
          }  # fmt: skip
COSMOS = {"max_img_h": 16, "max_img_w": 16, "max_frames": 8, "in_channels": 4, "out_channels": 4, "patch_spatial": 2,
          "patch_temporal": 1, "model_channels": 96, "num_blocks": 6, "num_heads": 4, "crossattn_emb_channels": 32,
          "pos_emb_cls": "rope3d", "pos_emb_learnable": True, "use_adaln_lora": True, "adaln_lora_dim": 16,
          }  # fmt: skip
EMBEDDER = {"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 256}}


def _ace() -> torch.nn.Module:
    _ops()
    from comfy.ldm.ace import lyric_encoder, model

    small = {"output_size": 32, "attention_heads": 4, "linear_units": 64, "num_blocks": 1}
    model.LyricEncoder = functools.partial(lyric_encoder.ConformerEncoder, **small)
    return _of(
        "ace.model.ACEStepTransformer2DModel", num_layers=14, inner_dim=128, attention_head_dim=16,
        num_attention_heads=8, mlp_ratio=2.5, speaker_embedding_dim=16, text_embedding_dim=32,
        lyric_encoder_vocab_size=32, lyric_hidden_size=32)()  # fmt: skip


def _sd3() -> torch.nn.Module:
    model = _of(
        "modules.diffusionmodules.mmdit.MMDiT", input_size=None, in_channels=4, depth=4, adm_in_channels=16,
        context_embedder_config=EMBEDDER, pos_embed_max_size=8, num_patches=64, qk_norm="rms",
        x_block_self_attn_layers=[0, 1])()  # fmt: skip
    torch.nn.init.normal_(model.pos_embed, std=0.1)
    return model


def _audio() -> torch.nn.Module:
    model = _of("audio.dit.AudioDiffusionTransformer", io_channels=8, embed_dim=64, cond_token_dim=32,
                global_cond_dim=32, depth=8, num_heads=2)()  # fmt: skip
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(torch.linspace(1, 0.01, len(buffer)))
    return model


def _case(make: Make | str, inputs: Callable[[], Steps], model: str = "", variant: str = "", notes: str = "",
          **settings: Any) -> Case:  # fmt: skip
    """A class by its path with these settings, or a function that makes the model."""
    if isinstance(make, str):
        model, make = make.rpartition(".")[2], _of(make, **settings)
    return Case(model, "comfyanonymous/ComfyUI", make, inputs, variant, init="all", notes=notes)


SAMPLED = {"variant": "by its sampler",
           "notes": "the time is also in the options, and conditioning is copied at every step"}  # fmt: skip
FLUX_INPUTS = _inputs(1, 4, 8, 8, y=(1, 16), guidance=torch.full((1,), 3.5), control=None)
WAN_INPUTS = _inputs(1, 4, 2, 8, 8, scale=1000.0)
QWEN_INPUTS = _inputs(1, 4, 1, 8, 8, control=None)
LUMINA_INPUTS = _inputs(1, 4, 8, 8, num_tokens=6, attention_mask=None)
_flux = functools.partial(_case, "flux.model.Flux", in_channels=4, out_channels=4, patch_size=2, guidance_embed=True,
                          txt_ids_dims=[], **FLUX)  # fmt: skip
_wan = functools.partial(_case, "wan.model.WanModel", model_type="t2v", **WAN)
_qwen = functools.partial(
    _case, "qwen_image.model.QwenImageTransformer2DModel", in_channels=16, out_channels=4, num_layers=6,
    attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, axes_dims_rope=(4, 6, 6))  # fmt: skip
_lumina = functools.partial(_case, "lumina.model.NextDiT", LUMINA_INPUTS)

CASES = (
    _flux(FLUX_INPUTS),
    _flux(_sampled(FLUX_INPUTS), **SAMPLED),
    _case("chroma.model.Chroma", _inputs(1, 4, 8, 8, guidance=torch.zeros(1), control=None), in_channels=16,
          out_channels=16, patch_size=2, notes="modulation is a dataclass, made for all blocks at once", **CHROMA),
    _case("chroma_radiance.model.ChromaRadiance", _inputs(1, 3, 16, 16, guidance=torch.zeros(1), control=None),
          in_channels=3, out_channels=3, patch_size=4, nerf_hidden_size=8, nerf_mlp_ratio=2, nerf_depth=2,
          nerf_max_freqs=4, nerf_tile_size=0, nerf_final_head_type="conv", nerf_embedder_dtype=torch.float32,
          use_x0=False, notes="pixels; a small network draws each patch", **CHROMA),
    _case("hunyuan_video.model.HunyuanVideo",
          _inputs(1, 4, 2, 8, 8, scale=1000.0, y=(1, 16), guidance=torch.full((1,), 6.0), control=None),
          in_channels=4, out_channels=4, patch_size=[1, 2, 2], guidance_embed=True, byt5=False, meanflow=False,
          use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False,
          **FLUX | {"depth": 4, "depth_single_blocks": 8}),
    _wan(WAN_INPUTS),
    _wan(_sampled(WAN_INPUTS), **SAMPLED),
    _case("wan.model.VaceWanModel",
          _inputs(1, 4, 2, 8, 8, scale=1000.0, vace_context=(1, 1, 4, 2, 8, 8), vace_strength=[1.0]),
          model_type="vace", vace_layers=2, vace_in_dim=4, **WAN),
    _qwen(QWEN_INPUTS),
    _qwen(_sampled(QWEN_INPUTS), **SAMPLED),
    _lumina(variant="Lumina 2", **LUMINA),
    _lumina(variant="Z-Image", z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=8,
            **LUMINA | {"dim": 256, "n_heads": 16, "n_kv_heads": 16}),
    _case("lightricks.model.LTXVModel", _inputs(1, 8, 2, 4, 4, attention_mask=None, frame_rate=25), in_channels=8,
          cross_attention_dim=64, attention_head_dim=16, num_attention_heads=4, caption_channels=32, num_layers=8),
    _case("cosmos.model.GeneralDIT",
          _inputs(1, 4, 2, 8, 8, fps=torch.tensor([24.0]), image_size=torch.tensor([[8.0, 8.0, 8.0, 8.0]]),
                  padding_mask=torch.zeros(1, 1, 8, 8)),
          pos_emb_interpolation="crop", block_x_format="THWBD", affline_emb_norm=True,
          extra_per_block_abs_pos_emb=True, extra_per_block_abs_pos_emb_type="learnable", variant="Cosmos",
          notes="blocks are in a dictionary", **COSMOS),
    _case("cosmos.predict2.MiniTrainDIT", _inputs(1, 4, 2, 8, 8, fps=torch.tensor([24.0])), variant="Cosmos Predict2",
          **COSMOS),
    _case("hidream.model.HiDreamImageTransformer2DModel",
          _inputs(1, 4, 8, 8, scale=1000.0, y=(1, 16), encoder_hidden_states_llama3=(1, 4, 6, 32)),
          patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_single_layers=4, attention_head_dim=16,
          num_attention_heads=4, caption_channels=[32, 32], text_emb_dim=16, num_routed_experts=4,
          num_activated_experts=2, axes_dims_rope=(8, 4, 4), max_resolution=(16, 16),
          llama_layers=[0, 1, 2, 3, 3, 3]),
    _case("pixart.pixartms.PixArtMS", _inputs(1, 4, 34, 34, scale=1000.0), input_size=8, hidden_size=64, depth=8,
          num_heads=4, caption_channels=32, model_max_length=6, pe_interpolation=1.0, micro_condition=False),
    _case("aura.mmdit.MMDiT", _inputs(1, 4, 8, 8), dim=64, n_layers=8, n_double_layers=2, n_heads=4,
          global_conddim=64, cond_seq_dim=32, max_seq=64, variant="AuraFlow"),
    _case("hydit.models.HunYuanDiT",
          _inputs(1, 4, 8, 8, scale=1000.0, text_embedding_mask=torch.ones(1, 6),
                  encoder_hidden_states_t5=(1, 6, 32), text_embedding_mask_t5=torch.ones(1, 6),
                  image_meta_size=torch.tensor([[8.0, 8.0, 8.0, 8.0, 0.0, 0.0]])),
          input_size=8, hidden_size=64, depth=8, num_heads=4, text_states_dim=32, text_states_dim_t5=32, text_len=6,
          text_len_t5=6, notes="each block of the second half takes one of the first"),
    _case("omnigen.omnigen2.OmniGen2Transformer2DModel", LUMINA_INPUTS, in_channels=4, hidden_size=64, num_layers=13,
          num_refiner_layers=1, num_attention_heads=4, num_kv_heads=2, multiple_of=32, axes_dim_rope=(4, 6, 6),
          axes_lens=(32, 16, 16), text_feat_dim=32),
    _case("kandinsky5.model.Kandinsky5", _inputs(1, 4, 2, 8, 8, y=(1, 16)), in_visual_dim=4, out_visual_dim=4,
          in_text_dim=32, in_text_dim2=16, time_dim=32, model_dim=64, ff_dim=128, visual_embed_dim=16,
          num_text_blocks=1, num_visual_blocks=8, axes_dims=(4, 6, 6)),
    _case(_ace, _inputs(1, 8, 16, 24, scale=1000.0, speaker_embeds=(1, 16),
                        lyric_token_idx=label(3, 5, 7, 9)[None], lyric_mask=torch.ones(1, 4, dtype=torch.long),
                        lyrics_strength=1.0),
          model="ACEStepTransformer2DModel", notes="with a small encoder of lyrics"),
    _case("genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
          _inputs(1, 4, 2, 8, 8, attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]), num_tokens=4),
          depth=4, patch_size=2, num_heads=4, hidden_size_x=64, hidden_size_y=32, mlp_ratio_x=192.0, mlp_ratio_y=4.0,
          in_channels=4, qk_norm=True, qkv_bias=False, out_bias=True, timestep_scale=1000.0, use_t5=True,
          t5_feat_dim=32, t5_token_length=6, learn_sigma=False, variant="Mochi"),
    _case(_sd3, _inputs(1, 4, 8, 8, scale=1000.0, y=(1, 16), control=None), model="MMDiT", variant="SD3.5"),
    _case(_audio, _inputs(1, 8, 24, global_embed=(1, 32), control=None), model="AudioDiffusionTransformer"),
    _case("hunyuan3d.model.Hunyuan3Dv2", _inputs(1, 8, 16), in_channels=8, context_in_dim=32, hidden_size=64,
          num_heads=4, depth=4, depth_single_blocks=8),
)  # fmt: skip
