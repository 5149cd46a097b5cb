"""The forwards of the transformer and the text encoder: the same numbers as their classes, in few ops.

As `training/forward.py`, for WanTransformer3DModel and UMT5EncoderModel. Padding of the text is zeros
and all of it alike, so any number of further padding tokens is a bias on the last one's score.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from training.forward import (
    Block,
    Weights,
    _linear,
    attend,
    block_weights,
    halves,
    layer_norm,
    rms_norm,
    rotate,
    time_embedding,
)
from training.motion.settings import MotionConfig

LINEARS = (
    "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0",
    "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0",
    "ffn.net.0.proj", "ffn.net.2", "norm2",
)  # fmt: skip
NORMS = ("attn1.norm_q", "attn1.norm_k", "attn2.norm_q", "attn2.norm_k")


def rotary(config: MotionConfig, shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, tokens, 1, head_dim / 2) of a grid of frames, rows and columns."""
    side = 2 * (config.head_dim // 6)
    places = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in shape))
    angles = []
    for axis, dim in enumerate((config.head_dim - 2 * side, side, side)):
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles.append(torch.outer(places[:, axis], frequencies))
    angle = torch.cat(angles, 1)[None, :, None]
    return angle.cos().float().to(device), angle.sin().float().to(device)


def block(
    x: Tensor, text: Tensor, bias: Tensor, modulation: Tensor, cos: Tensor, sin: Tensor, weights: list[Tensor]
) -> Tensor:
    """WanTransformerBlock; `bias` (N, 1, 1, tokens) is added to the scores of the text."""
    q, k, v, out, cq, ck, cv, cout, up, down, norm = (weights[i : i + 2] for i in range(0, 2 * len(LINEARS), 2))
    nq, nk, ncq, nck, table = weights[2 * len(LINEARS) :]
    dim = 2 * cos.shape[-1]
    shift, scale, gate, shift2, scale2, gate2 = (table + modulation).chunk(6, 1)
    y = layer_norm(x) * (1 + scale) + shift
    weight, offset = (
        torch.cat([halves(q[0], dim), halves(k[0], dim), v[0]]),
        torch.cat([halves(q[1], dim), halves(k[1], dim), v[1]]),
    )
    query, key, value = F.linear(y, weight, offset).chunk(3, -1)
    query, key = rms_norm(query, halves(nq, dim)), rms_norm(key, halves(nk, dim))
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in (query, key, value))
    x = x + gate * F.linear(attend(rotate(query, cos, sin), rotate(key, cos, sin), value), *out)
    y = F.layer_norm(x, x.shape[-1:], *norm, eps=1e-6)
    query, key, value = rms_norm(F.linear(y, *cq), ncq), rms_norm(F.linear(text, *ck), nck), F.linear(text, *cv)
    query, key, value = (part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in (query, key, value))
    scores = (query @ key.mT).float() / math.sqrt(dim) + bias
    x = x + F.linear((scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(2), *cout)
    y = layer_norm(x) * (1 + scale2) + shift2
    return x + gate2 * F.linear(F.gelu(F.linear(y, *up), approximate="tanh"), *down)


def wan(
    w: Weights, config: MotionConfig, x: Tensor, t: Tensor, text: Tensor, bias: Tensor, rope: tuple[Tensor, Tensor],
    run: Block = block,
) -> Tensor:  # fmt: skip
    """WanTransformer3DModel: the velocity of latents as tokens (N, tokens, channels) at times t in 0..1."""
    time = time_embedding(t).to(x.dtype)
    temb = _linear(w, "condition_embedder.time_embedder.linear_2",
                   F.silu(_linear(w, "condition_embedder.time_embedder.linear_1", time)))  # fmt: skip
    modulation = _linear(w, "condition_embedder.time_proj", F.silu(temb)).unflatten(1, (6, -1))
    name = "condition_embedder.text_embedder"
    text = _linear(w, f"{name}.linear_2", F.gelu(_linear(w, f"{name}.linear_1", text), approximate="tanh"))
    x = F.linear(x, w["patch_embedding.weight"].flatten(1), w["patch_embedding.bias"])
    for i in range(config.blocks):
        weights = [*block_weights(w, f"blocks.{i}", LINEARS, NORMS), w[f"blocks.{i}.scale_shift_table"]]
        x = run(x, text, bias, modulation, *rope, weights)
    shift, scale = (w["scale_shift_table"] + temb[:, None]).chunk(2, 1)
    return _linear(w, "proj_out", layer_norm(x) * (1 + scale) + shift)


def umt5(w: Weights, config: MotionConfig, ids: Tensor, mask: Tensor, buckets: Tensor) -> Tensor:
    """UMT5EncoderModel's last hidden states, zero where `mask` (N, tokens) is False, as in WanPipeline."""
    x = F.embedding(ids, w["shared.weight"])
    hidden = (~mask).float()[:, None, None] * -1e9
    for i in range(config.text_layers):
        attention, feed = f"encoder.block.{i}.layer.0", f"encoder.block.{i}.layer.1"
        y = rms_norm(x, w[f"{attention}.layer_norm.weight"])
        q, k, v = (
            F.linear(y, w[f"{attention}.SelfAttention.{n}.weight"])
            .unflatten(-1, (-1, config.text_head_dim))
            .transpose(1, 2)
            for n in "qkv"
        )
        bias = F.embedding(buckets, w[f"{attention}.SelfAttention.relative_attention_bias.weight"]).permute(2, 0, 1)
        scores = (q @ k.mT).float() + bias.float() + hidden
        mixed = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, w[f"{attention}.SelfAttention.o.weight"])
        y = rms_norm(x, w[f"{feed}.layer_norm.weight"])
        gate = F.gelu(F.linear(y, w[f"{feed}.DenseReluDense.wi_0.weight"]), approximate="tanh")
        x = x + F.linear(
            gate * F.linear(y, w[f"{feed}.DenseReluDense.wi_1.weight"]), w[f"{feed}.DenseReluDense.wo.weight"]
        )
    return rms_norm(x, w["encoder.final_layer_norm.weight"]) * mask[..., None]
