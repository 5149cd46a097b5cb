"""The sizes of the model and the settings of the two stages."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of the four networks. The shipped model is the default."""

    picture: int = 128
    latent_channels: int = 16
    vae_channels: tuple[int, ...] = (32, 64, 96)
    vae_groups: int = 8
    heads: int = 4
    head_dim: int = 64
    dual_blocks: int = 2
    single_blocks: int = 8
    text_dim: int = 128
    text_layers: int = 2
    text_head_dim: int = 32
    text_tokens: int = 64

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """How a head's channels are shared by text position, row and column."""
        first = self.head_dim // 4 // 2 * 2
        return first, (self.head_dim - first) // 2, (self.head_dim - first) // 2

    @property
    def latent_side(self) -> int:
        return self.picture // 2 ** (len(self.vae_channels) - 1)

    @property
    def grid(self) -> int:
        """Tokens along one side of a picture: the pipeline packs latents two by two."""
        return self.latent_side // 2


@dataclass(frozen=True)
class VaeConfig:
    """How the autoencoder is trained."""

    batch: int = 128
    lr: float = 1e-3
    weight_decay: float = 1e-3
    ema: float = 0.999
    kl: float = 5e-5
    noise: float = 0.15
    """Largest extra noise on the latents, in their own deviations: a decoder that forgives."""
    halving: float = 0.25
    """Weight of 'half the latents are half the picture': latents that are easier to model."""
    settle: float = 0.6
    """From this share of the budget on, plain squared error and no halving: sharper pictures."""


@dataclass(frozen=True)
class FlowConfig:
    """How the transformer and the text encoders are trained."""

    batch: int = 512
    lr: float = 1e-3
    muon_lr: float = 2e-3
    weight_decay: float = 0.01
    ema: float = 0.9995
    time_mean: float = 0.4
    time_std: float = 1.2
    drop: float = 0.1
    """Share of pictures shown without a caption, for classifier-free guidance."""
    long_every: int = 40
    """One step in so many has 512 text tokens, the pipeline's own default; 0 for none."""
    long_share: float = 0.125
    """The batch of such a step, as a share of the usual one."""
    warmup: int = 200
    decay_from: float = 0.3
    """From this share of the budget on, the rate falls in a line to zero."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run, apart from the data and the time given to it."""

    model: ModelConfig = ModelConfig()
    vae: VaeConfig = VaeConfig()
    flow: FlowConfig = FlowConfig()
    held_out: float = 0.05
    seed: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Settings:
        raw: dict[str, Any] = json.loads(text)
        model = {**raw["model"], "vae_channels": tuple(raw["model"]["vae_channels"])}
        return Settings(
            ModelConfig(**model), VaeConfig(**raw["vae"]), FlowConfig(**raw["flow"]),
            raw["held_out"], raw["seed"],
        )  # fmt: skip


def override(settings: Settings, changes: list[str]) -> Settings:
    """Settings with 'flow.batch=256'-like changes applied; unknown names are refused."""
    raw = json.loads(settings.to_json())
    for change in changes:
        path, _, value = change.partition("=")
        section, _, field = path.partition(".")
        if not field:
            section, field, target = "", section, raw
        else:
            target = raw.get(section)
        if not isinstance(target, dict) or field not in target or isinstance(target[field], dict):
            known = [f"{s}.{f}" for s in ("model", "vae", "flow") for f in raw[s]]
            raise ValueError(f"unknown setting {path!r}: expected held_out, seed or one of {known}")
        target[field] = json.loads(value)
    return Settings.from_json(json.dumps(raw))
