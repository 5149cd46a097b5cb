"""Builds the networks of the video model, as diffusers and transformers classes."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models import t5_settings
from training.motion.settings import MotionConfig

PARTS = ("transformer", "text_encoder")


def build_vae(config: MotionConfig) -> Any:
    """A small autoencoder of Wan 2.2's kind: patches of two by two, four frames in one."""
    from diffusers import AutoencoderKLWan

    channels, levels = config.latent_channels, len(config.channel_steps) - 1
    vae = AutoencoderKLWan(
        base_dim=config.encoder_channels, decoder_base_dim=config.decoder_channels, z_dim=channels,
        dim_mult=list(config.channel_steps), num_res_blocks=1, temperal_downsample=[True] * levels,
        is_residual=True, patch_size=2, in_channels=12, out_channels=12, latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels, scale_factor_temporal=2**levels, scale_factor_spatial=config.spatial,
    )  # fmt: skip
    nn.init.ones_(vae.decoder.conv_out.bias)  # white, as most of a clip is
    return vae


def build_transformer(config: MotionConfig) -> Any:
    """The Wan transformer, started so that every block passes its input through."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 1, 1), num_attention_heads=config.heads, attention_head_dim=config.head_dim,
        in_channels=config.latent_channels, out_channels=config.latent_channels, text_dim=config.text_dim,
        freq_dim=256, ffn_dim=config.ffn, num_layers=config.blocks, rope_max_seq_len=64,
    )  # fmt: skip
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.bias.zero_()
                if name.endswith(("time_proj", "attn2.to_out.0", "proj_out")):
                    module.weight.zero_()
                else:
                    nn.init.xavier_uniform_(module.weight)
        for name, parameter in model.named_parameters():
            if name.endswith("scale_shift_table"):
                parameter.zero_()
    return model


def build_text_encoder(config: MotionConfig, tokenizer: Any) -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**t5_settings(config, tokenizer)))


# -- the autoencoder over whole clips: what encode and decode compute chunk by chunk, in one go


def conv3d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], before: int, after: int, border: int
) -> Tensor:
    """A convolution over time and space as one over frames, each beside its neighbours.

    Its kernels are fast in 16 bit on every version; those for three dimensions are not. `before` and `after` are empty
    frames, `border` pixels, `stride` is of time and space.
    """
    count, taps = len(x), weight.shape[2]
    x = F.pad(x, (0, 0, 0, 0, before, after))
    frames = (x.shape[2] - taps) // stride[0] + 1
    reach = stride[0] * (frames - 1) + 1
    x = torch.cat([x[:, :, k : k + reach : stride[0]] for k in range(taps)], 1)
    weight = weight.transpose(1, 2).flatten(1, 2)
    y = F.conv2d(x.transpose(1, 2).flatten(0, 1), weight, bias, stride[1], border)
    return y.unflatten(0, (count, frames)).transpose(1, 2)


def _causal(self: Any, x: Tensor, cache_x: None = None) -> Tensor:
    """WanCausalConv3d over a whole clip."""
    return conv3d(x, self.weight, self.bias, self.stride[:2], self._padding[4], 0, self._padding[2])


def _resample(self: Any, x: Tensor, feat_cache: None = None, feat_idx: Any = None) -> Tensor:
    """WanResample over a whole clip: its first frame is alone, the others go in pairs."""
    if self.mode == "upsample3d" and x.shape[2] > 1:
        pairs = self.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))  # (N, 2, C, T, H, W)
        x = torch.cat([x[:, :, :1], pairs.movedim(1, 3).flatten(2, 3)], 2)
    count, frames = x.shape[0], x.shape[2]
    x = self.resample(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (count, frames)).transpose(1, 2)
    if self.mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], 2)
    return x


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    """WanRMS_norm in one kernel, in the type of its input."""
    with torch.autocast(x.device.type, enabled=False):
        y = F.rms_norm(x.movedim(1, -1), (x.shape[1],), self.gamma.flatten().to(x.dtype), 1e-12)
    return y.movedim(-1, 1)


def over_whole_clips(vae: Any) -> None:
    """Let the autoencoder's own layers read whole clips; `vae.encode` and `vae.decode` no longer work on it."""
    forwards = {"WanResample": _resample, "WanCausalConv3d": _causal, "WanRMS_norm": _rms_norm}
    for module in vae.modules():
        if type(module).__name__ in forwards:
            module.forward = types.MethodType(forwards[type(module).__name__], module)


def encode(vae: Any, clips: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance of clips (N, 3, T, H, W)."""
    n, c, t, h, w = clips.shape
    patches = clips.view(n, c, t, h // 2, 2, w // 2, 2).permute(0, 1, 6, 4, 2, 3, 5)
    patches = patches.reshape(n, 4 * c, t, h // 2, w // 2).contiguous(memory_format=torch.channels_last_3d)
    mean, logvar = vae.quant_conv(vae.encoder(patches)).float().chunk(2, 1)
    return mean, logvar


def decode(vae: Any, latents: Tensor) -> Tensor:
    """The clips of latents."""
    latents = latents.contiguous(memory_format=torch.channels_last_3d)
    out = vae.decoder(vae.post_quant_conv(latents), first_chunk=True).float()
    n, c, t, h, w = out.shape
    return out.reshape(n, c // 4, 2, 2, t, h, w).permute(0, 1, 4, 5, 3, 6, 2).reshape(n, c // 4, t, 2 * h, 2 * w)
