"""The sizes of the video model and the settings of its stages."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class MotionConfig:
    """Sizes and rates. The shipped model is the default."""

    latent_channels: int = 48
    encoder_channels: int = 24
    decoder_channels: int = 40
    channel_steps: tuple[int, ...] = (1, 2, 2)
    heads: int = 4
    head_dim: int = 64
    ffn: int = 768
    blocks: int = 8
    text_dim: int = 128
    text_layers: int = 2
    text_head_dim: int = 32
    text_tokens: int = 32
    vae_batch: int = 32
    vae_lr: float = 1.5e-3
    vae_kl: float = 3e-5
    vae_noise: float = 0.2
    """Largest extra noise on the latents, in their own deviations: a decoder that forgives."""
    flow_batch: int = 512
    lr: float = 1e-3
    muon_lr: float = 2e-3
    warmup: int = 200
    ema: float = 0.9985
    drop: float = 0.1
    """Share of clips shown without a caption, for classifier-free guidance."""
    long_text: float = 0.25
    """Share of clips shown with 512 text tokens, the pipeline's own default."""
    draws: int = 8
    """Clips of each picture in each motion that are kept as latents."""
    judge_batch: int = 192
    seed: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def spatial(self) -> int:
        """How many pixels a side of a latent is: two by patches, then by levels."""
        return 2 ** len(self.channel_steps)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> MotionConfig:
        raw = json.loads(text)
        return MotionConfig(**{**raw, "channel_steps": tuple(raw["channel_steps"])})


TINY = MotionConfig(
    latent_channels=8, encoder_channels=8, decoder_channels=8, heads=2, head_dim=16, ffn=64, blocks=2,
    text_dim=32, text_head_dim=16, vae_batch=4, flow_batch=16, draws=1, judge_batch=8,
)  # fmt: skip
"""For a look at the whole chain on a CPU."""
