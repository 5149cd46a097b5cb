"""A network that says which emoji a clip shows, and how it moves.

It learns from real clips, dirtied in ways of its own, and never sees a generated one or what the
autoencoder makes of a real one: its accuracy on both stands beside the model's figures.
"""

from __future__ import annotations

import itertools
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.motion.clips import KINDS, draw
from training.motion.models import conv3d
from training.motion.settings import MotionConfig

RATE = 2e-3


class Conv(nn.Conv3d):
    """A convolution of three by three by three."""

    def forward(self, x: Tensor) -> Tensor:
        return conv3d(x, self.weight, None, (self.stride[0], self.stride[1]), 1, 1, 1)


def layer(before: int, after: int, stride: int) -> nn.Sequential:
    return nn.Sequential(Conv(before, after, 3, stride, 1, bias=False), nn.BatchNorm3d(after), nn.ReLU())


class Judge(nn.Module):
    """Scores of the names and of the motions of clips (N, 3, 17, 64, 64)."""

    def __init__(self, names: int, width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        layers = [layer(3, width, 2), layer(width, width, 1)]
        for before, after in itertools.pairwise(widths):
            layers += [layer(before, after, 2), layer(after, after, 1)]
        self.body = nn.Sequential(*layers)
        self.name = nn.Linear(2 * widths[-1], names)
        self.motion = nn.Linear(widths[-1] * 2 * 4 * 4, len(KINDS))

    def forward(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(clips)
        pooled = torch.cat([x.amax((2, 3, 4)), x.mean((2, 3, 4))], 1)
        return self.name(F.dropout(pooled, 0.2, self.training)), self.motion(
            F.dropout(x.flatten(1), 0.2, self.training)
        )


def dirtied(clips: Tensor, generator: torch.Generator) -> Tensor:
    """Clips with other contrast and colours, blurred and noisy, each as much as chance has it."""

    def chance(*shape: int) -> Tensor:
        return torch.rand(len(clips), *shape, 1, 1, generator=generator, device=clips.device)

    flat = clips.transpose(1, 2).flatten(0, 1)
    blurred = (
        F.avg_pool2d(F.pad(flat, (1, 1, 1, 1), mode="replicate"), 3, 1).unflatten(0, (len(clips), -1)).transpose(1, 2)
    )
    out = torch.lerp(clips, blurred, chance(1, 1))
    out = 1 - (1 - out) * (0.8 + 0.4 * chance(3, 1))
    noise = torch.randn(clips.shape, generator=generator, device=clips.device)
    return out + 0.15 * chance(1, 1) * noise


def train_judge(config: MotionConfig, pictures: Tensor, names: Tensor, deadline: float) -> tuple[Judge, int]:
    """A judge that had until `deadline`, and its steps; `names` numbers the pictures' emoji."""
    device = pictures.device
    torch.manual_seed(config.seed + 1)
    judge = Judge(int(names.max()) + 1).to(device)
    optimiser = torch.optim.AdamW(judge.parameters(), RATE, weight_decay=0.02)
    generator = torch.Generator(device).manual_seed((config.seed << 32) + 11)
    began, step = time.monotonic(), 0
    while (now := time.monotonic()) < deadline or step < 2:
        fraction = min(1.0, (now - began) / max(1e-6, deadline - began))
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 100) * (1 - fraction) + 1e-6
        index = torch.randint(len(pictures), (config.judge_batch,), generator=generator, device=device)
        motions = torch.randint(len(KINDS), (config.judge_batch,), generator=generator, device=device)
        clips = dirtied(draw(pictures[index], motions, generator), generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=clips.is_cuda):
            name, motion = judge(clips.contiguous(memory_format=torch.channels_last_3d))
            loss = F.cross_entropy(name.float(), names[index]) + F.cross_entropy(motion.float(), motions)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        step += 1
        if step % 4 == 0:
            loss.item()  # waits, so that the clock tells the truth
    return judge.eval(), step


@torch.no_grad()
def verdict(judge: Judge, clips: Tensor, chunk: int = 128) -> tuple[Tensor, Tensor]:
    """The numbers of the name and of the motion of each clip in -1..1."""
    device = next(judge.parameters()).device
    scores = [judge(part.to(device).float()) for part in clips.split(chunk)]
    return torch.cat([s[0].argmax(1) for s in scores]).cpu(), torch.cat([s[1].argmax(1) for s in scores]).cpu()
