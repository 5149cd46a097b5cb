"""Trains the autoencoder, then the transformer with its text encoder, on clips.

The autoencoder sees clips drawn for each step. Then some clips of every picture in every motion are
encoded once and stay on the device: the transformer learns the velocity from them to noise.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.flat import make_layout
from training.flow import FlowStage
from training.forward import t5_buckets
from training.loop import Batch
from training.models import named_weights, part_weights, set_weights
from training.motion import forward, models
from training.motion.clips import KINDS, draw
from training.motion.settings import MotionConfig
from training.optim import Optimiser
from training.vae import VaeStage, edges

LONG_TEXT = 512
SETTLE = 0.7  # from this share of the autoencoder's time on, little noise and no edges: sharper clips
WHITE_WEIGHT = 0.15  # of the error where a clip is white and still: most of a clip is


class ClipVae(VaeStage):
    """The autoencoder, trained on clips drawn on the device."""

    def __init__(self, config: MotionConfig, pictures: Tensor, start: dict[str, Tensor] | None = None) -> None:
        torch.manual_seed(config.seed)
        self.motion, self.rate, self.pictures, self.device = config, 1.0, pictures, pictures.device
        self.batch_size = config.vae_batch
        self.vae: Any = models.build_vae(config).to(self.device).train()
        if start:
            set_weights(self.vae, start)
            self.rate = 0.6  # it need not find its way again
        models.over_whole_clips(self.vae)
        self.parameters = named_weights(self.vae)
        self.layout = make_layout({n: tuple(p.shape) for n, p in self.parameters.items()}, lambda name, shape: False)
        start = self.layout.flatten({n: p.detach() for n, p in self.parameters.items()})
        self.optimiser = Optimiser(self.layout, start, 1e-3)
        self.attached = None

    def use_compiled(self, on: bool) -> None:
        """Never compiled: that takes longer than it saves."""

    def batch(self, step: int) -> Batch:
        generator = torch.Generator(self.device).manual_seed((self.motion.seed << 32) + step)
        count = self.batch_size
        index = torch.randint(len(self.pictures), (count,), generator=generator, device=self.device)
        motions = torch.randint(len(KINDS), (count,), generator=generator, device=self.device)
        clips = draw(self.pictures[index], motions, generator)
        amount = torch.rand(count, 1, 1, 1, 1, generator=generator, device=self.device)
        return clips, amount

    def _loss(self, batch: Batch, fraction: float) -> Tensor:
        x, amount = batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=x.is_cuda):
            mean, logvar = models.encode(self.vae, x)
            logvar = logvar.clamp(-12, 4)
            extra = self.motion.vae_noise * (0.3 if fraction >= SETTLE else 1.0) * amount * mean.detach().std()
            latents = mean + ((0.5 * logvar).exp() + extra) * torch.randn_like(mean)
            rebuilt = models.decode(self.vae, latents)
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        drawn = F.max_pool3d((1 - x).amax(1, keepdim=True), (1, 5, 5), 1, (0, 2, 2)) > 0.02
        weight = WHITE_WEIGHT + (1 - WHITE_WEIGHT) * drawn
        error = (rebuilt - x) * weight
        loss = error.abs().mean() + 6 * error.square().mean() + self.motion.vae_kl * kl
        return loss + 0.5 * edges(rebuilt, x) if fraction < SETTLE else loss

    def set_rates(self, step: int, fraction: float) -> None:
        lr = (
            self.rate
            * self.motion.vae_lr
            * min(1.0, (step + 1) / 60)
            * (0.5 + 0.5 * math.cos(math.pi * min(1, fraction)))
        )
        self.optimiser.set_numbers(step, lr + 1e-7, 0.0, 0.995)


@torch.no_grad()
def rebuild(vae: Any, clips: Tensor) -> Tensor:
    """What encoding and decoding makes of clips."""
    with torch.autocast(clips.device.type, torch.bfloat16, enabled=clips.is_cuda):
        return models.decode(vae, models.encode(vae, clips)[0]).clamp(-1, 1)


@torch.no_grad()
def bank(vae: Any, pictures: Tensor, config: MotionConfig, deadline: float, chunk: int = 256) -> Tensor:
    """Latents (draws, pictures x motions, tokens, channels) of clips; fewer draws when time runs out."""
    device = pictures.device
    generator = torch.Generator(device).manual_seed((config.seed << 32) + 7)
    cases = torch.arange(len(pictures) * len(KINDS), device=device)
    draws: list[Tensor] = []
    while len(draws) < config.draws and (not draws or time.monotonic() < deadline):
        some = []
        for part in cases.split(chunk):
            clips = draw(pictures[part // len(KINDS)], part % len(KINDS), generator)
            with torch.autocast(device.type, torch.bfloat16, enabled=clips.is_cuda):
                some.append(
                    models.encode(vae, clips)[0].flatten(2).mT.to(torch.bfloat16 if clips.is_cuda else clips.dtype)
                )
        draws.append(torch.cat(some))
        if device.type == "cuda":
            torch.cuda.synchronize()
    return torch.stack(draws)


def token_ids(texts: list[list[str]], tokenizer: Any, tokens: int) -> tuple[Tensor, Tensor]:
    """Ids of all distinct texts, the empty one last, and which belong to which case."""
    numbers = {text: i for i, text in enumerate(dict.fromkeys(t for some in texts for t in some if t))}
    ids = tokenizer([*numbers, ""], padding="max_length", truncation=True, max_length=tokens).input_ids
    return torch.tensor(ids), torch.tensor([[numbers.get(t, len(numbers)) for t in some] for some in texts])


class ClipFlow(FlowStage):
    """Transformer and text encoder over latents and captions on one device."""

    def __init__(
        self, config: MotionConfig, weights: dict[str, Tensor], latents: Tensor, mean: Tensor, std: Tensor,
        texts: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        self.motion, self.rate, self.latents, self.device = config, 1.0, latents, latents.device
        self.mean, self.std = mean.to(self.device), std.to(self.device)
        self.ids, self.of_case = (part.to(self.device) for part in texts)
        self.batch_size = config.flow_batch
        self.dtype = torch.bfloat16 if latents.is_cuda else torch.float32
        self.layout = make_layout(
            {n: tuple(w.shape) for n, w in weights.items()}, lambda n, s: "transformer.blocks" in n
        )
        self.optimiser = Optimiser(self.layout, self.layout.flatten(weights).to(self.device), 0.01)
        side = math.isqrt(latents.shape[2] // 5)
        self.rope = forward.rotary(config, (5, side, side), self.device)
        self.buckets = t5_buckets(config.text_tokens, self.device)
        self.use_compiled(False)

    def use_compiled(self, on: bool) -> None:
        self.block = torch.compile(forward.block, dynamic=False, fullgraph=True) if on else forward.block

    def batch(self, step: int) -> Batch:
        """Noisy tokens, times, caption ids, the bias for padding, and velocities of a step."""
        generator = torch.Generator(self.device).manual_seed((self.motion.seed << 32) + step)
        draws: dict[str, Any] = {"generator": generator, "device": self.device}
        count = self.batch_size
        case = torch.randint(self.latents.shape[1], (count,), **draws)
        clean = self.latents[torch.randint(len(self.latents), (count,), **draws), case].float()
        clean = (clean - self.mean) / self.std
        text = self.of_case[case, torch.randint(self.of_case.shape[1], (count,), **draws)]
        text = torch.where(torch.rand(count, **draws) < self.motion.drop, len(self.ids) - 1, text)
        bias = torch.zeros(count, 1, 1, self.motion.text_tokens, device=self.device)
        long = torch.rand(count, **draws) < self.motion.long_text
        bias[:, 0, 0, -1] = torch.where(long, math.log(1 + LONG_TEXT - self.motion.text_tokens), 0.0)
        t = self._times(count, draws)
        noise = torch.randn(clean.shape, **draws)
        return torch.lerp(clean, noise, t[:, None, None]), t, self.ids[text], bias, noise - clean

    def _times(self, count: int, draw: dict[str, Any]) -> Tensor:
        """Logit-normal times, one from each of `count` equally likely slices."""
        u = (torch.randperm(count, **draw) + torch.rand(count, **draw)) / count
        normal = math.sqrt(2) * torch.erfinv((2 * u - 1).clamp(-0.99999, 0.99999))
        return torch.sigmoid(0.4 + 1.2 * normal)

    def predict(self, w: dict[str, Tensor], batch: Batch) -> Tensor:
        noisy, t, ids, bias, _ = batch
        text = forward.umt5(part_weights(w, "text_encoder"), self.motion, ids, ids != 0, self.buckets)
        weights = part_weights(w, "transformer")
        return forward.wan(weights, self.motion, noisy.to(self.dtype), t, text, bias, self.rope, self.block)

    def set_rates(self, step: int, fraction: float) -> None:
        scale = min(1.0, (step + 1) / self.motion.warmup) * min(1.0, max(0.0, (1 - fraction) / 0.65))
        self.optimiser.set_numbers(step, self.motion.lr * scale, self.motion.muon_lr * scale, self.motion.ema)
