"""In which style is a picture drawn?

A judge that cannot see the layout: four convolutions, each value of the last one looking at a
patch of 31 by 31 pixels, averaged over the picture, and a linear layer. It is trained on random
crops of the training pictures and of what the model's own autoencoder makes of some of them, since
generated pictures bear the decoder's marks. It never sees a held-out picture: its accuracy on
those, as they are and through the autoencoder, says how far its word can be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.pictures import Dataset
from training.vae import reconstruct

WIDTHS = (24, 48, 64, 96)
STRIDES = (2, 2, 2, 1)
STEPS, BATCH, RATE = 700, 64, 4e-3
REBUILT = 600  # training pictures that are also shown through the autoencoder


def network(styles: int) -> nn.Sequential:
    """Pictures (N, 3, H, W) in 0..1 to a score for each style."""
    layers: list[nn.Module] = []
    for before, after, stride in zip((3, *WIDTHS), WIDTHS, STRIDES, strict=False):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], styles))


def random_crops(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """One square of half the side from each picture, at a random place, half of them mirrored."""
    count, side = len(pictures), pictures.shape[-1]
    crop = side // 2
    top, left = torch.randint(side - crop + 1, (2, count, 1), generator=generator).to(pictures.device)
    offsets = torch.arange(crop, device=pictures.device)
    mirrored = torch.rand(count, 1, generator=generator).to(pictures.device) < 0.5
    rows, columns = top + offsets, left + torch.where(mirrored, offsets.flip(0), offsets)
    index = torch.arange(count, device=pictures.device)[:, None, None]
    return pictures.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def train_network(pictures: Tensor, labels: Tensor, styles: int, steps: int, seed: int) -> nn.Sequential:
    """A network trained on uint8 pictures (N, 3, H, W); the same seed gives the same one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        torch.manual_seed(seed)
        net = network(styles).to(pictures.device).train()
        optimiser = torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
        for _ in range(steps):
            some = torch.randint(len(pictures), (BATCH,), generator=generator).to(pictures.device)
            crops = random_crops(pictures[some], generator).float() / 255
            loss = F.cross_entropy(net(crops), labels[some], label_smoothing=0.05)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return net.eval()


def to_bytes(images: Tensor) -> Tensor:
    """Pictures in 0..1 as they would be saved, in 8 bits."""
    return images.mul(255).round().clamp(0, 255).byte()


@dataclass(frozen=True)
class StyleJudge:
    """Names the style of pictures."""

    net: nn.Sequential
    styles: tuple[str, ...]

    @torch.no_grad()
    def name(self, images: Tensor) -> list[str]:
        """The style of each picture (N, 3, H, W), given in 0..1 and judged in 8 bits."""
        device = next(self.net.parameters()).device
        scores = [self.net(to_bytes(some).to(device).float() / 255) for some in images.split(64)]
        return [self.styles[i] for i in torch.cat(scores).argmax(1).tolist()]

    def agreement(self, images: Tensor, styles: Sequence[str]) -> float:
        """The share of pictures that are of the style they should be."""
        hits = [a == b for a, b in zip(self.name(images), styles, strict=True)]
        return round(sum(hits) / max(1, len(hits)), 4)


def train_judge(
    dataset: Dataset, seen: Sequence[int], vae: Any, steps: int = STEPS, rebuilt: int = REBUILT, seed: int = 0,
) -> StyleJudge:  # fmt: skip
    """A judge that knows the pictures `seen`, as they are and, some, through the autoencoder."""
    chosen = torch.tensor(list(seen))
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
    again = chosen[order[:rebuilt]]
    plain = torch.from_numpy(dataset.pictures[chosen.numpy()]).permute(0, 3, 1, 2)
    through = to_bytes(reconstruct(vae, torch.from_numpy(dataset.pictures[again.numpy()]).to(vae.device)))
    # the rebuilt ones are few: shown as often, all together, as the plain ones
    times = max(1, len(plain) // max(1, len(through)))
    style = torch.tensor([dataset.styles.index(row.style) for row in dataset.rows])
    pictures = torch.cat([plain.to(vae.device), *[through] * times])
    labels = torch.cat([style[chosen], *[style[again]] * times]).to(vae.device)
    return StyleJudge(train_network(pictures, labels, len(dataset.styles), steps, seed), dataset.styles)
