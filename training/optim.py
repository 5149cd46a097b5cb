"""The optimisers: Muon for the blocks' matrices, AdamW for all else, and a running average.

Everything lives in flat buffers on one device and every number that changes from step to step is
read from a small tensor, so that a whole step can be captured and replayed.
Muon: momentum made orthogonal by Newton-Schulz iterations (Jordan et al., 2024), scaled to the
size of an AdamW update (Liu et al., 2025).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training.flat import Layout

MOMENTUM = 0.95
BETAS = (0.9, 0.98)
EPS = 1e-8
CLIP = 1.0
STATE = ("master", "ema", "first", "second", "momentum")


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Batched matrices with their singular values brought near one."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Optimiser:
    """The weights, their average and the moments, as flat float32 buffers."""

    def __init__(self, layout: Layout, master: Tensor, weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.groups = layout.groups()
        self.muon_end = layout.bounds["muon"][1]
        self.decay_end = layout.bounds["decay"][1]
        self.master = master.float().clone()
        self.ema = self.master.clone()
        self.first = torch.zeros_like(self.master[self.muon_end :])
        self.second = torch.zeros_like(self.first)
        self.momentum = torch.zeros_like(self.master[: self.muon_end])
        self.numbers = torch.zeros(5, device=master.device)

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in STATE}

    def load(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def set_numbers(self, step: int, lr: float, muon_lr: float, ema: float) -> None:
        """What changes with the step (counted from 0): rates, averaging and bias corrections."""
        average = 1 - min(ema, (1 + step) / (10 + step))
        corrections = [1 - beta ** (step + 1) for beta in BETAS]
        self.numbers.copy_(torch.tensor([lr, muon_lr, average, *corrections]))

    @torch.no_grad()
    def update(self, grad: Tensor) -> None:
        """One step along a flat gradient, which is clipped; one that is not finite is dropped."""
        lr, muon_lr, average, correct1, correct2 = self.numbers.unbind()
        grad = grad.float()
        norm = grad.norm()
        scaled = grad * (CLIP / (norm + 1e-6)).clamp_max(1.0)
        grad = torch.where(torch.isfinite(norm), scaled, 0.0)
        self._muon(grad[: self.muon_end], muon_lr)
        rest = grad[self.muon_end :]
        self.first.lerp_(rest, 1 - BETAS[0])
        self.second.lerp_(rest.square(), 1 - BETAS[1])
        change = (self.first / correct1) / ((self.second / correct2).sqrt() + EPS)
        self.master[self.muon_end : self.decay_end].mul_(1 - lr * self.weight_decay)
        self.master[self.muon_end :].sub_(lr * change)
        self.ema.lerp_(self.master, average)

    def _muon(self, grad: Tensor, lr: Tensor) -> None:
        if not self.muon_end:
            return
        self.momentum.lerp_(grad, 1 - MOMENTUM)
        direction = grad.lerp(self.momentum, MOMENTUM)
        if direction.is_cuda:
            direction = direction.bfloat16()
        self.master[: self.muon_end].mul_(1 - lr * self.weight_decay)
        for start, end, shape in self.groups:
            change = orthogonalise(direction[start:end].view(shape)).float()
            size = 0.2 * math.sqrt(max(shape[1:]))
            self.master[start:end].sub_((lr * size) * change.reshape(-1))
