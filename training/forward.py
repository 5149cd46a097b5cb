"""The forwards of the three networks: the same numbers as diffusers and transformers, in few ops.

Pure functions over a dictionary of weights named as in `models.py`. Against the classes they
save time in training only: projections that share an input are one product, rotary pairs are
two halves instead of neighbours (the weights' rows are reordered, which attention cannot tell),
and the blocks take their weights as arguments, so that one compiled block serves all of its kind.
Tests hold them equal to FluxTransformer2DModel, CLIPTextModel and T5EncoderModel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.settings import ModelConfig

Weights = dict[str, Tensor]
Block = Callable[..., Any]

DUAL_NAMES = (
    "norm1.linear", "norm1_context.linear",
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip
DUAL_NORMS = ("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k")
SINGLE_NAMES = ("norm.linear", "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out")
SINGLE_NORMS = ("attn.norm_q", "attn.norm_k")


def block_weights(w: Weights, prefix: str, names: Sequence[str], norms: Sequence[str]) -> list[Tensor]:
    """A block's weights as a flat list: weight and bias of each linear, then the norms."""
    linears = [w[f"{prefix}.{name}.{kind}"] for name in names for kind in ("weight", "bias")]
    return linears + [w[f"{prefix}.{name}.weight"] for name in norms]


def halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows reordered in every head so that rotary pairs (2i, 2i+1) become (i, i + half)."""
    pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)


def rotary(config: ModelConfig, text_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, tokens, 1, head_dim / 2) for the text, then the picture's grid."""
    rows = torch.arange(config.grid, dtype=torch.float64).repeat_interleave(config.grid)
    columns = torch.arange(config.grid, dtype=torch.float64).repeat(config.grid)
    ids = torch.zeros(text_tokens + config.grid**2, 3, dtype=torch.float64)
    ids[text_tokens:, 1], ids[text_tokens:, 2] = rows, columns
    angles = []
    for axis, dim in enumerate(config.rope_axes):
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles.append(torch.outer(ids[:, axis], frequencies))
    angle = torch.cat(angles, dim=1)[None, :, None]
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + half) of every head by the position's angles."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (batch, tokens, heads, head_dim) tensors, heads joined again."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2)


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return layer_norm(x) * (1 + scale[:, None]) + shift[:, None]


def _qkv(x: Tensor, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], dim: int) -> Any:
    """Query, key and value heads in one product, rotary pairs as halves."""
    weight = torch.cat([halves(q[0], dim), halves(k[0], dim), v[0]])
    bias = torch.cat([halves(q[1], dim), halves(k[1], dim), v[1]])
    return F.linear(x, weight, bias).unflatten(-1, (3, -1, dim)).unbind(2)


def dual_block(
    img: Tensor, txt: Tensor, temb: Tensor, cos: Tensor, sin: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """FluxTransformerBlock: two streams, one attention."""
    linears = [weights[i : i + 2] for i in range(0, 2 * len(DUAL_NAMES), 2)]
    mod, mod_c, q, k, v, out, cq, ck, cv, cout, up, down, cup, cdown = linears
    nq, nk, ncq, nck = (halves(n, n.shape[0]) for n in weights[2 * len(DUAL_NAMES) :])
    dim, text = nq.shape[0], txt.shape[1]
    shift, scale, gate, shift2, scale2, gate2 = F.linear(temb, *mod).chunk(6, dim=1)
    cshift, cscale, cgate, cshift2, cscale2, cgate2 = F.linear(temb, *mod_c).chunk(6, dim=1)
    iq, ik, iv = _qkv(modulate(img, shift, scale), q, k, v, dim)
    tq, tk, tv = _qkv(modulate(txt, cshift, cscale), cq, ck, cv, dim)
    query = torch.cat([rms_norm(tq, ncq), rms_norm(iq, nq)], dim=1)
    key = torch.cat([rms_norm(tk, nck), rms_norm(ik, nk)], dim=1)
    value = torch.cat([tv, iv], dim=1)
    joint = attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
    img = img + gate[:, None] * F.linear(joint[:, text:], *out)
    txt = txt + cgate[:, None] * F.linear(joint[:, :text], *cout)
    hidden = F.gelu(F.linear(modulate(img, shift2, scale2), *up), approximate="tanh")
    img = img + gate2[:, None] * F.linear(hidden, *down)
    hidden = F.gelu(F.linear(modulate(txt, cshift2, cscale2), *cup), approximate="tanh")
    return img, txt + cgate2[:, None] * F.linear(hidden, *cdown)


def single_block(x: Tensor, temb: Tensor, cos: Tensor, sin: Tensor, weights: list[Tensor]) -> Tensor:
    """FluxSingleTransformerBlock over text and picture tokens together."""
    linears = [weights[i : i + 2] for i in range(0, 2 * len(SINGLE_NAMES), 2)]
    mod, q, k, v, mlp, out = linears
    nq, nk = (halves(n, n.shape[0]) for n in weights[2 * len(SINGLE_NAMES) :])
    dim, width = nq.shape[0], x.shape[-1]
    shift, scale, gate = F.linear(temb, *mod).chunk(3, dim=1)
    weight = torch.cat([halves(q[0], dim), halves(k[0], dim), v[0], mlp[0]])
    bias = torch.cat([halves(q[1], dim), halves(k[1], dim), v[1], mlp[1]])
    qkv, hidden = F.linear(modulate(x, shift, scale), weight, bias).tensor_split([3 * width], -1)
    query, key, value = qkv.unflatten(-1, (3, -1, dim)).unbind(2)
    query, key = rotate(rms_norm(query, nq), cos, sin), rotate(rms_norm(key, nk), cos, sin)
    joined = torch.cat([attend(query, key, value), F.gelu(hidden, approximate="tanh")], dim=-1)
    return x + gate[:, None] * F.linear(joined, *out)


def time_embedding(t: Tensor) -> Tensor:
    """diffusers' 256 sinusoids of t * 1000, cosines first, in float32."""
    frequencies = torch.exp(-math.log(10000) * torch.arange(128, device=t.device) / 128)
    angle = t.float()[:, None] * 1000 * frequencies
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return _linear(w, f"{name}.linear_2", F.silu(_linear(w, f"{name}.linear_1", x)))


def flux(
    w: Weights, config: ModelConfig, x: Tensor, t: Tensor, pooled: Tensor, context: Tensor,
    rope: tuple[Tensor, Tensor], dual: Block = dual_block, single: Block = single_block,
) -> Tensor:  # fmt: skip
    """FluxTransformer2DModel: the velocity of packed latents x at times t in 0..1."""
    temb = _mlp(w, "time_text_embed.timestep_embedder", time_embedding(t).to(pooled.dtype))
    temb = F.silu(temb + _mlp(w, "time_text_embed.text_embedder", pooled))
    img, txt = _linear(w, "x_embedder", x), _linear(w, "context_embedder", context)
    for i in range(config.dual_blocks):
        weights = block_weights(w, f"transformer_blocks.{i}", DUAL_NAMES, DUAL_NORMS)
        img, txt = dual(img, txt, temb, *rope, weights)
    joint = torch.cat([txt, img], dim=1)
    for i in range(config.single_blocks):
        weights = block_weights(w, f"single_transformer_blocks.{i}", SINGLE_NAMES, SINGLE_NORMS)
        joint = single(joint, temb, *rope, weights)
    scale, shift = _linear(w, "norm_out.linear", temb).chunk(2, dim=1)
    return _linear(w, "proj_out", modulate(joint[:, txt.shape[1] :], shift, scale))


def _layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def clip_text(w: Weights, config: ModelConfig, ids: Tensor, ends: Tensor) -> Tensor:
    """CLIPTextModel's pooled output: the state at the first end-of-text token, at `ends`."""
    positions = w["embeddings.position_embedding.weight"][: ids.shape[1]]
    x = F.embedding(ids, w["embeddings.token_embedding.weight"]) + positions
    for i in range(config.text_layers):
        layer = f"encoder.layers.{i}"
        y = _layer_norm(w, f"{layer}.layer_norm1", x)
        q, k, v = (
            _linear(w, f"{layer}.self_attn.{n}_proj", y).unflatten(-1, (-1, config.text_head_dim)).transpose(1, 2)
            for n in "qkv"
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + _linear(w, f"{layer}.self_attn.out_proj", mixed.transpose(1, 2).flatten(2))
        y = _linear(w, f"{layer}.mlp.fc1", _layer_norm(w, f"{layer}.layer_norm2", x))
        x = x + _linear(w, f"{layer}.mlp.fc2", y * torch.sigmoid(1.702 * y))
    last = torch.gather(x, 1, ends[:, None, None].expand(-1, 1, x.shape[-1])).squeeze(1)
    return _layer_norm(w, "final_layer_norm", last)


def t5_buckets(tokens: int, device: torch.device) -> Tensor:
    """T5's 32 two-sided relative-position buckets, reaching 128 tokens far."""
    position = torch.arange(tokens)
    relative = position[None] - position[:, None]
    distance = relative.abs()
    far = 8 + (torch.log(distance.clamp_min(1).float() / 8) / math.log(128 / 8) * 8).long()
    bucket = torch.where(distance < 8, distance, far.clamp_max(15))
    return (bucket + 16 * (relative > 0)).to(device)


def t5_text(w: Weights, config: ModelConfig, ids: Tensor, buckets: Tensor) -> Tensor:
    """T5EncoderModel's last hidden states; padding is attended to, as in FluxPipeline."""
    x = F.embedding(ids, w["shared.weight"])
    first = "encoder.block.0.layer.0.SelfAttention"
    bias = F.embedding(buckets, w[f"{first}.relative_attention_bias.weight"]).permute(2, 0, 1)
    for i in range(config.text_layers):
        attention, feed = f"encoder.block.{i}.layer.0", f"encoder.block.{i}.layer.1"
        y = rms_norm(x, w[f"{attention}.layer_norm.weight"])
        q, k, v = (
            F.linear(y, w[f"{attention}.SelfAttention.{n}.weight"])
            .unflatten(-1, (-1, config.text_head_dim))
            .transpose(1, 2)
            for n in "qkv"
        )
        scores = (q @ k.mT).float() + bias.float()
        mixed = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, w[f"{attention}.SelfAttention.o.weight"])
        y = rms_norm(x, w[f"{feed}.layer_norm.weight"])
        gate = F.gelu(F.linear(y, w[f"{feed}.DenseReluDense.wi_0.weight"]), approximate="tanh")
        up = F.linear(y, w[f"{feed}.DenseReluDense.wi_1.weight"])
        x = x + F.linear(gate * up, w[f"{feed}.DenseReluDense.wo.weight"])
    return rms_norm(x, w["encoder.final_layer_norm.weight"])
