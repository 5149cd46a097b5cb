"""A judge of the style in which a picture is drawn.

A judge that cannot see the layout. It is told how often each colour occurs (the palette) and how
often each pair of slopes, over a short and over a longer way (edges, shading, flat areas), and
nothing about where. Small networks, whose mean probabilities decide, learn the styles from the
training pictures and from what the model's own autoencoder makes of some of them, since generated
pictures bear the decoder's marks. They never see a held-out picture: their accuracy on those, as
they are and through the autoencoder, says how far the judge can be trusted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.pictures import Dataset
from training.vae import reconstruct

COLOUR_LEVELS, SLOPE_LEVELS = 8, 10
WAYS = (1, 4)  # the slopes' lengths, in pixels of the picture at half its side
FAINTEST = 2e-3  # slopes below this are no slopes
SPREAD = 0.02  # added to the features' deviations, so that rare colours are not blown up
HIDDEN, DROP = 128, 0.3
STEPS, BATCH, RATE, DECAY = 600, 128, 2e-3, 0.1
NETWORKS = 5  # one alone is a matter of luck: on generated pictures, seeds differ by 3 % of the cases
REBUILT = 300  # training pictures that are also shown through the autoencoder


def soft_histogram(values: Tensor, levels: int) -> Tensor:
    """Joint histograms (N, levels ** D) of points (N, D, M) in 0..1.

    Each point is shared by the levels around it, so that a small change of colour is a small change.
    """
    count, axes, points = values.shape
    scaled = values.clamp(0, 1) * (levels - 1)
    low = scaled.floor().clamp(max=levels - 2)
    part, low = scaled - low, low.long()
    histogram = torch.zeros(count, levels**axes)
    for corner in itertools.product((0, 1), repeat=axes):
        weight, index = torch.ones(count, points), torch.zeros(count, points, dtype=torch.long)
        for axis, up in enumerate(corner):
            weight = weight * (part[:, axis] if up else 1 - part[:, axis])
            index = index * levels + low[:, axis] + up
        histogram.scatter_add_(1, index, weight)
    return histogram / points


def slopes(pictures: Tensor, way: int) -> Tensor:
    """How much the colour changes over `way` pixels, down and across; logarithmic, in 0..1."""
    corner = pictures[..., :-way, :-way]
    across, down = pictures[..., :-way, way:] - corner, pictures[..., way:, :-way] - corner
    size = (across.square() + down.square()).sum(1).sqrt()
    return 1 - (size + FAINTEST).clamp(max=1).log() / torch.tensor(FAINTEST).log()


def features(images: Tensor) -> Tensor:
    """Palette and texture of pictures (N, 3, H, W) in 0..1, taken as they would be saved, in 8 bits."""
    halved = F.avg_pool2d(images.float().cpu().mul(255).round().clamp(0, 255) / 255, 2)
    short, long = (slopes(halved, way) for way in WAYS)
    pairs = torch.stack([short[:, : long.shape[1], : long.shape[2]], long], 1)
    palette = soft_histogram(halved.flatten(2), COLOUR_LEVELS)
    return torch.cat([palette, soft_histogram(pairs.flatten(2), SLOPE_LEVELS)], 1).sqrt()


def all_features(pictures: Tensor, chunk: int = 128) -> Tensor:
    """The features of uint8 pictures (N, H, W, 3), a few at a time."""
    return torch.cat([features(some.permute(0, 3, 1, 2) / 255) for some in pictures.split(chunk)])


@dataclass(frozen=True)
class StyleJudge:
    """Names the style of pictures."""

    styles: tuple[str, ...]
    mean: Tensor
    deviation: Tensor
    nets: tuple[nn.Sequential, ...]

    @torch.no_grad()
    def name(self, images: Tensor) -> list[str]:
        """The style of each picture (N, 3, H, W) in 0..1."""
        inputs = (features(images) - self.mean) / self.deviation
        votes = torch.stack([net(inputs).softmax(1) for net in self.nets])
        return [self.styles[i] for i in votes.mean(0).argmax(1).tolist()]


def fit(inputs: Tensor, labels: Tensor, first: int, styles: int, seed: int) -> nn.Sequential:
    """A network that tells the styles; three in four examples of a batch are of the `first` ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Dropout(DROP), nn.Linear(inputs.shape[1], HIDDEN), nn.ReLU(), nn.Dropout(DROP),
            nn.Linear(HIDDEN, styles),
        )  # fmt: skip
        optimiser = torch.optim.AdamW(net.parameters(), RATE, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=STEPS)
        for _ in range(STEPS):
            plain = torch.randint(first, (BATCH * 3 // 4,))
            rebuilt = torch.randint(first, len(inputs), (BATCH // 4,))
            some = torch.cat([plain, rebuilt])
            optimiser.zero_grad()
            F.cross_entropy(net(inputs[some]), labels[some]).backward()
            optimiser.step()
            schedule.step()
    return net.eval()


def train_judge(dataset: Dataset, seen: Sequence[int], vae: Any, seed: int = 0) -> StyleJudge:
    """A judge that knows the pictures `seen`; the same seed gives the same judge.

    All but the autoencoder runs on the CPU: some sums on a GPU depend on the order of its threads.
    """
    rows = torch.tensor(list(seen))
    again = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:REBUILT]]
    plain = all_features(torch.from_numpy(dataset.pictures[rows.numpy()]))
    rebuilt = reconstruct(vae, torch.from_numpy(dataset.pictures[again.numpy()]).to(vae.device))
    inputs = torch.cat([plain, features(rebuilt)])
    number = torch.tensor([dataset.styles.index(row.style) for row in dataset.rows])
    mean, deviation = plain.mean(0), plain.std(0) + SPREAD
    labels = torch.cat([number[rows], number[again]])
    inputs, styles = (inputs - mean) / deviation, len(dataset.styles)
    nets = tuple(fit(inputs, labels, len(rows), styles, NETWORKS * seed + i) for i in range(NETWORKS))
    return StyleJudge(dataset.styles, mean, deviation, nets)
