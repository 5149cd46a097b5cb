"""Trains the autoencoder, and computes the pictures' latents.

Absolute error of the picture, its edges and its halvings, on latents with a little noise; then a
settling phase of squared error alone. No perceptual network, no adversary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.flat import make_layout
from training.loop import Batch
from training.models import build_vae, named_weights
from training.optim import Optimiser
from training.settings import Settings


def to_unit(pictures: Tensor) -> Tensor:
    """uint8 (N, H, W, 3) to floats in -1..1, (N, 3, H, W)."""
    return pictures.permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


def edges(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels' differences."""
    d = a - b
    return (d[..., 1:] - d[..., :-1]).abs().mean() + (d[..., 1:, :] - d[..., :-1, :]).abs().mean()


class VaeStage:
    """The autoencoder, trained on pictures that are already on the device."""

    name = "vae"
    capturable = False  # the loss changes in the settling phase

    def __init__(self, settings: Settings, pictures: Tensor, rate: float = 1.0) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.config, self.rate = settings, settings.vae, rate
        self.pictures, self.device = pictures, pictures.device
        self.batch_size = self.config.batch
        self.vae: Any = build_vae(settings.model).to(self.device).train()
        self.parameters = named_weights(self.vae)
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.layout = make_layout(shapes, lambda name, shape: False)
        start = self.layout.flatten({n: p.detach() for n, p in self.parameters.items()})
        self.optimiser = Optimiser(self.layout, start, self.config.weight_decay)
        self.attached: Tensor | None = None
        self.use_compiled(False)

    def use_compiled(self, on: bool) -> None:
        if on:
            self.encode = torch.compile(self.vae.encoder, dynamic=False)
            self.decode = torch.compile(self.vae.decoder, dynamic=False)
        else:
            self.encode, self.decode = self.vae.encoder, self.vae.decoder

    def batch(self, step: int) -> Batch:
        """Pictures drawn at random, and the noise for their latents; a function of the step."""
        generator = torch.Generator(self.device).manual_seed((self.settings.seed << 32) + step)
        model, count = self.settings.model, self.batch_size
        index = torch.randint(len(self.pictures), (count,), generator=generator, device=self.device)
        side = model.latent_side
        noise = torch.randn(2, count, model.latent_channels, side, side, generator=generator, device=self.device)
        amount = torch.rand(count, 1, 1, 1, generator=generator, device=self.device)
        return to_unit(self.pictures[index]), noise, amount

    def attach(self, flat: Tensor) -> None:
        """Make the module's parameters views of a flat buffer."""
        if self.attached is not flat:
            views = self.layout.views(flat)
            for name, parameter in self.parameters.items():
                parameter.data = views[name]
            self.attached = flat

    def gradient(self, batch: Batch, fraction: float, master: Tensor) -> tuple[Tensor, Tensor]:
        self.attach(master)
        loss = self._loss(batch, fraction)
        grads = torch.autograd.grad(loss, list(self.parameters.values()))
        return loss, self.layout.flatten(dict(zip(self.parameters, grads, strict=True)))

    def _loss(self, batch: Batch, fraction: float) -> Tensor:
        x, (sampling, extra), amount = batch
        settled = fraction >= self.config.settle
        with torch.autocast(self.device.type, torch.bfloat16, enabled=x.is_cuda):
            mean, logvar = self.encode(x).float().chunk(2, dim=1)
            logvar = logvar.clamp(-12, 4)
            latents = mean + (0.5 * logvar).exp() * sampling
            strength = self.config.noise * (0.3 if settled else 1.0)
            latents = latents + strength * amount * mean.detach().std() * extra
            rebuilt = self.decode(latents).float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        error = (rebuilt - x).abs().mean()
        if settled:
            return 8 * (rebuilt - x).square().mean() + 0.2 * error + self.config.kl * kl
        loss = error + 0.5 * edges(rebuilt, x) + self.config.kl * kl
        loss = loss + 4 * (rebuilt - x).square().mean()
        small, small_x = rebuilt, x
        for _ in range(2):
            small, small_x = F.avg_pool2d(small, 2), F.avg_pool2d(small_x, 2)
            loss = loss + 0.5 * (small - small_x).abs().mean()
        if self.config.halving:
            loss = loss + self.config.halving * self._halving_loss(x, latents)
        return loss

    def _halving_loss(self, x: Tensor, latents: Tensor) -> Tensor:
        """Latents pooled to half their side should decode to the picture at half its side."""
        some = max(1, len(x) // 4)
        half = F.avg_pool2d(x[:some], 2)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=x.is_cuda):
            rebuilt = self.vae.decoder(F.avg_pool2d(latents[:some], 2)).float()
        return (rebuilt - half).abs().mean() + 0.5 * edges(rebuilt, half)

    def set_rates(self, step: int, fraction: float) -> None:
        warm = min(1.0, (step + 1) / 100)
        lr = self.config.lr * self.rate * warm * (0.5 + 0.5 * math.cos(math.pi * min(1, fraction)))
        self.optimiser.set_numbers(step, lr + 1e-7, 0.0, self.config.ema)

    @torch.no_grad()
    def averaged(self) -> Any:
        """The module with its averaged weights, ready to encode and decode."""
        self.attach(self.optimiser.ema.clone())
        return self.vae.eval()


@torch.no_grad()
def encode_all(vae: Any, pictures: Tensor, chunk: int = 64) -> Tensor:
    """The mean latents of all pictures, in float32 on the host."""
    parts = [
        vae.encoder(to_unit(pictures[i : i + chunk])).float().chunk(2, dim=1)[0].cpu()
        for i in range(0, len(pictures), chunk)
    ]
    return torch.cat(parts).contiguous()


@torch.no_grad()
def reconstruct(vae: Any, pictures: Tensor, chunk: int = 64) -> Tensor:
    """What encoding and decoding makes of uint8 pictures (N, H, W, 3): (N, 3, H, W) in 0..1."""
    parts = [
        vae.decoder(vae.encoder(to_unit(pictures[i : i + chunk])).chunk(2, dim=1)[0]).clamp(-1, 1).add(1).div(2)
        for i in range(0, len(pictures), chunk)
    ]
    return torch.cat(parts)


def reconstruction_psnr(vae: Any, pictures: Tensor) -> Tensor:
    """Each picture's peak signal-to-noise ratio after encoding and decoding, in dB."""
    error = reconstruct(vae, pictures).cpu() - pictures.cpu().permute(0, 3, 1, 2).float().div(255)
    return -10 * error.square().mean(dim=(1, 2, 3)).clamp_min(1e-10).log10()
