"""ComfyUI's own models. Options are a new dictionary at every step, which the models write into."""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import Call, Case, Steps, cond, label, noise, time


def _ops() -> dict[str, Any]:
    """What every model is made with. Its layers leave their memory as it is, so all weights are made anew."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.ops

    return {"operations": comfy.ops.disable_weight_init, "dtype": torch.float32, "device": "cpu"}


def _inputs(*shape: int, scale: float = 1.0, **known: Any) -> Steps:
    """One branch of one run, by a caller who keeps the conditioning and has no options."""

    def at(step: float) -> Call:
        return (noise(step, *shape), time(step, scale=scale)), known | {"transformer_options": {}}

    return at


def _sampled(steps: Steps) -> Steps:
    """The same as ComfyUI's samplers call it: the options hold the time, and conditioning is a new tensor each time."""
    sigmas = torch.stack([time(step, scale=1.0)[0] for step in range(13)])

    def at(step: float) -> Call:
        args, known = steps(step)
        made = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in known.items()}
        options = {"cond_or_uncond": [0], "sigmas": time(step, scale=1.0), "sample_sigmas": sigmas, "patches": {}}
        return args, made | {"transformer_options": options}

    return at


FLUX = {"hidden_size": 64, "num_heads": 4, "depth": 2, "depth_single_blocks": 4, "mlp_ratio": 4.0, "qkv_bias": True,
        "axes_dim": [4, 6, 6], "theta": 10_000}  # fmt: skip


def _flux() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.flux.model import Flux

    return Flux(in_channels=4, out_channels=4, vec_in_dim=16, context_in_dim=32, patch_size=2, guidance_embed=True,
                txt_ids_dims=[], **FLUX, **ops)  # fmt: skip


def _flux_inputs() -> Steps:
    return _inputs(1, 4, 8, 8, context=cond("context", 1, 6, 32), y=cond("y", 1, 16), guidance=torch.full((1,), 3.5),
                   control=None)  # fmt: skip


def _chroma() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.chroma.model import Chroma

    size = FLUX | {"depth": 4, "depth_single_blocks": 8}
    return Chroma(in_channels=16, out_channels=16, vec_in_dim=16, context_in_dim=32, patch_size=2, in_dim=64,
                  out_dim=64, hidden_dim=64, n_layers=2, txt_ids_dims=[], **size, **ops)  # fmt: skip


def _chroma_inputs() -> Steps:
    return _inputs(1, 4, 8, 8, context=cond("context", 1, 6, 32), guidance=torch.full((1,), 0.0), control=None)


def _radiance() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.chroma_radiance.model import ChromaRadiance

    size = FLUX | {"depth": 4, "depth_single_blocks": 8}
    return ChromaRadiance(
        in_channels=3, out_channels=3, vec_in_dim=16, context_in_dim=32, patch_size=4, in_dim=64, out_dim=64,
        hidden_dim=64, n_layers=2, txt_ids_dims=[], nerf_hidden_size=8, nerf_mlp_ratio=2, nerf_depth=2,
        nerf_max_freqs=4, nerf_tile_size=0, nerf_final_head_type="conv", nerf_embedder_dtype=torch.float32,
        use_x0=False, **size, **ops)  # fmt: skip


def _radiance_inputs() -> Steps:
    return _inputs(1, 3, 16, 16, context=cond("context", 1, 6, 32), guidance=torch.full((1,), 0.0), control=None)


def _hunyuan() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    size = FLUX | {"depth": 4, "depth_single_blocks": 8}
    return HunyuanVideo(
        in_channels=4,
        out_channels=4,
        vec_in_dim=16,
        context_in_dim=32,
        patch_size=[1, 2, 2],
        guidance_embed=True,
        byt5=False,
        meanflow=False,
        use_cond_type_embedding=False,
        vision_in_dim=None,
        meanflow_sum=False,
        **size,
        **ops,
    )


def _hunyuan_inputs() -> Steps:
    return _inputs(1, 4, 2, 8, 8, scale=1000.0, context=cond("context", 1, 6, 32), y=cond("y", 1, 16),
                   guidance=torch.full((1,), 6.0), control=None)  # fmt: skip


def _wan(kind: str = "t2v", **more: Any) -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.wan import model

    made = model.VaceWanModel if kind == "vace" else model.WanModel
    return made(model_type=kind, in_dim=4, out_dim=4, dim=96, ffn_dim=192, freq_dim=32, text_dim=32, num_heads=4,
                num_layers=6, **more, **ops)  # fmt: skip


def _wan_inputs() -> Steps:
    return _inputs(1, 4, 2, 8, 8, scale=1000.0, context=cond("context", 1, 6, 32))


def _vace_inputs() -> Steps:
    hints = cond("video", 1, 1, 4, 2, 8, 8)
    return _inputs(1, 4, 2, 8, 8, scale=1000.0, context=cond("context", 1, 6, 32), vace_context=hints,
                   vace_strength=[1.0])  # fmt: skip


def _qwen() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=6,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        **ops,
    )


def _qwen_inputs() -> Steps:
    return _inputs(1, 4, 1, 8, 8, context=cond("context", 1, 6, 32), control=None)


def _lumina(**more: Any) -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.lumina.model import NextDiT

    size = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "n_layers": 13, "n_refiner_layers": 1, "multiple_of": 32} | more
    return NextDiT(in_channels=4, qk_norm=True, cap_feat_dim=32, axes_dims=[4, 6, 6], axes_lens=[32, 16, 16], **size,
                   **ops)  # fmt: skip


def _lumina_inputs() -> Steps:
    return _inputs(1, 4, 8, 8, context=cond("context", 1, 6, 32), num_tokens=6, attention_mask=None)


def _ltx() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.lightricks.model import LTXVModel

    return LTXVModel(in_channels=8, cross_attention_dim=64, attention_head_dim=16, num_attention_heads=4,
                     caption_channels=32, num_layers=8, **ops)  # fmt: skip


def _ltx_inputs() -> Steps:
    return _inputs(1, 8, 2, 4, 4, context=cond("context", 1, 6, 32), attention_mask=None, frame_rate=25)


def _cosmos() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.cosmos.model import GeneralDIT

    return GeneralDIT(
        max_img_h=16, max_img_w=16, max_frames=8, in_channels=4, out_channels=4, patch_spatial=2, patch_temporal=1,
        model_channels=96, num_blocks=6, num_heads=4, crossattn_emb_channels=32, pos_emb_cls="rope3d",
        pos_emb_learnable=True, pos_emb_interpolation="crop", block_x_format="THWBD", affline_emb_norm=True,
        use_adaln_lora=True, adaln_lora_dim=16, extra_per_block_abs_pos_emb=True,
        extra_per_block_abs_pos_emb_type="learnable", **ops)  # fmt: skip


def _cosmos_inputs() -> Steps:
    return _inputs(1, 4, 2, 8, 8, context=cond("context", 1, 6, 32), fps=torch.tensor([24.0]),
                   image_size=torch.tensor([[8.0, 8.0, 8.0, 8.0]]), padding_mask=torch.zeros(1, 1, 8, 8))  # fmt: skip


def _predict2() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.cosmos.predict2 import MiniTrainDIT

    return MiniTrainDIT(
        max_img_h=16, max_img_w=16, max_frames=8, in_channels=4, out_channels=4, patch_spatial=2, patch_temporal=1,
        model_channels=96, num_blocks=6, num_heads=4, crossattn_emb_channels=32, pos_emb_cls="rope3d",
        pos_emb_learnable=True, use_adaln_lora=True, adaln_lora_dim=16, **ops)  # fmt: skip


def _predict2_inputs() -> Steps:
    return _inputs(1, 4, 2, 8, 8, context=cond("context", 1, 6, 32), fps=torch.tensor([24.0]))


def _hidream() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel

    return HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_single_layers=4, attention_head_dim=16,
        num_attention_heads=4, caption_channels=[32, 32], text_emb_dim=16, num_routed_experts=4,
        num_activated_experts=2, axes_dims_rope=(8, 4, 4), max_resolution=(16, 16), llama_layers=[0, 1, 2, 3, 3, 3],
        **ops)  # fmt: skip


def _hidream_inputs() -> Steps:
    return _inputs(1, 4, 8, 8, scale=1000.0, y=cond("y", 1, 16), context=cond("t5", 1, 6, 32),
                   encoder_hidden_states_llama3=cond("llama", 1, 4, 6, 32))  # fmt: skip


def _pixart() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.pixart.pixartms import PixArtMS

    return PixArtMS(input_size=8, hidden_size=64, depth=8, num_heads=4, caption_channels=32, model_max_length=6,
                    pe_interpolation=1.0, micro_condition=False, **ops)  # fmt: skip


def _pixart_inputs() -> Steps:
    return _inputs(1, 4, 34, 34, scale=1000.0, context=cond("context", 1, 6, 32))


def _aura() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.aura.mmdit import MMDiT

    return MMDiT(
        dim=64, n_layers=8, n_double_layers=2, n_heads=4, global_conddim=64, cond_seq_dim=32, max_seq=64, **ops
    )


def _aura_inputs() -> Steps:
    return _inputs(1, 4, 8, 8, context=cond("context", 1, 6, 32))


def _hydit() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.hydit.models import HunYuanDiT

    return HunYuanDiT(input_size=8, hidden_size=64, depth=8, num_heads=4, text_states_dim=32, text_states_dim_t5=32,
                      text_len=6, text_len_t5=6, **ops)  # fmt: skip


def _hydit_inputs() -> Steps:
    return _inputs(
        1, 4, 8, 8, scale=1000.0, context=cond("clip", 1, 6, 32), text_embedding_mask=torch.ones(1, 6),
        encoder_hidden_states_t5=cond("t5", 1, 6, 32), text_embedding_mask_t5=torch.ones(1, 6),
        image_meta_size=torch.tensor([[8.0, 8.0, 8.0, 8.0, 0.0, 0.0]]))  # fmt: skip


def _omnigen2() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel

    return OmniGen2Transformer2DModel(
        in_channels=4, hidden_size=64, num_layers=13, num_refiner_layers=1, num_attention_heads=4, num_kv_heads=2,
        multiple_of=32, axes_dim_rope=(4, 6, 6), axes_lens=(32, 16, 16), text_feat_dim=32, **ops)  # fmt: skip


def _kandinsky() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.kandinsky5.model import Kandinsky5

    return Kandinsky5(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=32,
        in_text_dim2=16,
        time_dim=32,
        model_dim=64,
        ff_dim=128,
        visual_embed_dim=16,
        num_text_blocks=1,
        num_visual_blocks=8,
        axes_dims=(4, 6, 6),
        **ops,
    )


def _kandinsky_inputs() -> Steps:
    return _inputs(1, 4, 2, 8, 8, context=cond("context", 1, 6, 32), y=cond("y", 1, 16))


def _ace() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.ace import lyric_encoder, model

    small = {"output_size": 32, "attention_heads": 4, "linear_units": 64, "num_blocks": 1}
    model.LyricEncoder = functools.partial(lyric_encoder.ConformerEncoder, **small)
    return model.ACEStepTransformer2DModel(
        num_layers=14,
        inner_dim=128,
        attention_head_dim=16,
        num_attention_heads=8,
        mlp_ratio=2.5,
        speaker_embedding_dim=16,
        text_embedding_dim=32,
        lyric_encoder_vocab_size=32,
        lyric_hidden_size=32,
        **ops,
    )


def _ace_inputs() -> Steps:
    return _inputs(
        1,
        8,
        16,
        24,
        scale=1000.0,
        context=cond("tags", 1, 6, 32),
        speaker_embeds=cond("voice", 1, 16),
        lyric_token_idx=label(3, 5, 7, 9)[None],
        lyric_mask=torch.ones(1, 4, dtype=torch.long),
        lyrics_strength=1.0,
    )


def _mochi() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.genmo.joint_model.asymm_models_joint import AsymmDiTJoint

    return AsymmDiTJoint(
        depth=4, patch_size=2, num_heads=4, hidden_size_x=64, hidden_size_y=32, mlp_ratio_x=192.0, mlp_ratio_y=4.0,
        in_channels=4, qk_norm=True, qkv_bias=False, out_bias=True, timestep_scale=1000.0, use_t5=True, t5_feat_dim=32,
        t5_token_length=6, learn_sigma=False, **ops)  # fmt: skip


def _mochi_inputs() -> Steps:
    return _inputs(1, 4, 2, 8, 8, context=cond("t5", 1, 6, 32), attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]),
                   num_tokens=4)  # fmt: skip


def _sd3() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT

    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 256}}
    model = MMDiT(
        input_size=None,
        in_channels=4,
        depth=4,
        adm_in_channels=16,
        context_embedder_config=embedder,
        pos_embed_max_size=8,
        num_patches=64,
        qk_norm="rms",
        x_block_self_attn_layers=[0, 1],
        **ops,
    )
    torch.nn.init.normal_(model.pos_embed, std=0.1)
    return model


def _sd3_inputs() -> Steps:
    return _inputs(1, 4, 8, 8, scale=1000.0, y=cond("y", 1, 16), context=cond("context", 1, 6, 32), control=None)


def _audio() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.audio.dit import AudioDiffusionTransformer

    model = AudioDiffusionTransformer(io_channels=8, embed_dim=64, cond_token_dim=32, global_cond_dim=32, depth=8,
                                      num_heads=2, **ops)  # fmt: skip
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(torch.linspace(1, 0.01, len(buffer)))
    return model


def _audio_inputs() -> Steps:
    return _inputs(1, 8, 24, context=cond("context", 1, 6, 32), global_embed=cond("seconds", 1, 32), control=None)


def _hunyuan3d() -> torch.nn.Module:
    ops = _ops()
    from comfy.ldm.hunyuan3d.model import Hunyuan3Dv2

    return Hunyuan3Dv2(
        in_channels=8, context_in_dim=32, hidden_size=64, num_heads=4, depth=4, depth_single_blocks=8, **ops
    )


def _hunyuan3d_inputs() -> Steps:
    return _inputs(1, 8, 16, context=cond("context", 1, 6, 32))


def _case(model: str, make: Any, inputs: Any, **more: Any) -> Case:
    return Case(model, "comfyanonymous/ComfyUI", make, inputs, init="all", **more)


SAMPLED = "the time is also in the options, and conditioning is copied at every step"
CASES = (
    _case("Flux", _flux, _flux_inputs),
    _case("Flux", _flux, lambda: _sampled(_flux_inputs()), variant="by its sampler", notes=SAMPLED),
    _case("Chroma", _chroma, _chroma_inputs, notes="modulation is a dataclass, made for all blocks at once"),
    _case("ChromaRadiance", _radiance, _radiance_inputs, notes="pixels; a small network draws each patch"),
    _case("HunyuanVideo", _hunyuan, _hunyuan_inputs),
    _case("WanModel", _wan, _wan_inputs),
    _case("WanModel", _wan, lambda: _sampled(_wan_inputs()), variant="by its sampler", notes=SAMPLED),
    _case("VaceWanModel", lambda: _wan("vace", vace_layers=2, vace_in_dim=4), _vace_inputs),
    _case("QwenImageTransformer2DModel", _qwen, _qwen_inputs),
    _case(
        "QwenImageTransformer2DModel",
        _qwen,
        lambda: _sampled(_qwen_inputs()),
        variant="by its sampler",
        notes=SAMPLED,
    ),
    _case("NextDiT", _lumina, _lumina_inputs, variant="Lumina 2"),
    _case("NextDiT", lambda: _lumina(dim=256, n_heads=16, n_kv_heads=16, z_image_modulation=True, time_scale=1000.0,
          pad_tokens_multiple=8), _lumina_inputs, variant="Z-Image"),
    _case("LTXVModel", _ltx, _ltx_inputs),
    _case("GeneralDIT", _cosmos, _cosmos_inputs, variant="Cosmos", notes="blocks are in a dictionary"),
    _case("MiniTrainDIT", _predict2, _predict2_inputs, variant="Cosmos Predict2"),
    _case("HiDreamImageTransformer2DModel", _hidream, _hidream_inputs),
    _case("PixArtMS", _pixart, _pixart_inputs),
    _case("MMDiT", _aura, _aura_inputs, variant="AuraFlow"),
    _case("HunYuanDiT", _hydit, _hydit_inputs, notes="each block of the second half takes one of the first"),
    _case("OmniGen2Transformer2DModel", _omnigen2, _lumina_inputs),
    _case("Kandinsky5", _kandinsky, _kandinsky_inputs),
    _case("ACEStepTransformer2DModel", _ace, _ace_inputs, notes="with a small encoder of lyrics"),
    _case("AsymmDiTJoint", _mochi, _mochi_inputs, variant="Mochi"),
    _case("MMDiT", _sd3, _sd3_inputs, variant="SD3.5"),
    _case("AudioDiffusionTransformer", _audio, _audio_inputs),
    _case("Hunyuan3Dv2", _hunyuan3d, _hunyuan3d_inputs),
)  # fmt: skip
