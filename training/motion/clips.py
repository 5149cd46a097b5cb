"""Clips: an emoji on white that moves in one of twelve ways, drawn on the device, with its words.

The pictures are on white, so a clip is white less the moved picture's shadow: no mask is needed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from training.captions import with_article
from training.pictures import Row

FRAMES, SIDE = 17, 64
VARIANTS = 12  # captions of a picture in a motion
MOTIONS: dict[str, tuple[str, ...]] = {
    "up": ("flying up", "moving up", "going up", "rising"),
    "down": ("flying down", "moving down", "going down", "falling"),
    "left": ("flying left", "moving left", "going left", "flying to the left"),
    "right": ("flying right", "moving right", "going right", "flying to the right"),
    "clockwise": ("turning clockwise", "spinning clockwise", "rotating clockwise"),
    "counterclockwise": ("turning counterclockwise", "spinning counterclockwise", "rotating counterclockwise"),
    "growing": ("growing", "getting bigger"),
    "shrinking": ("shrinking", "getting smaller"),
    "bouncing": ("bouncing", "jumping", "hopping"),
    "fading in": ("fading in", "appearing"),
    "fading out": ("fading out", "disappearing", "vanishing"),
    "still": ("standing still", "not moving", ""),
}
"""Each kind and direction, with its phrases; the first one is the plain one."""
KINDS = tuple(MOTIONS)


def caption(row: Row, motion: str) -> str:
    """The plain caption: "NAME, STYLE style, MOTION"."""
    return f"{row.name}, {row.style} style, {MOTIONS[motion][0]}"


def _varied(row: Row, motion: str, rng: random.Random) -> str:
    """One of the freer captions: another phrase, an article, another order, no style."""
    phrase, a_name = rng.choice(MOTIONS[motion]), with_article(row.name)
    forms = [
        (3.0, f"{row.name} {phrase}"),
        (2.0, f"{a_name} {phrase}"),
        (2.0, f"{row.name}, {row.style} style, {phrase}"),
        (1.0, f"{a_name}, {row.style} style, {phrase}"),
        (1.0, f"{row.style} {row.name} {phrase}"),
        (0.5, f"{phrase}, {row.name}, {row.style} style"),
        (0.5, f"{row.name} emoji {phrase}"),
    ]
    weights, texts = zip(*forms, strict=True)
    return rng.choices(texts, weights)[0].strip(" ,")


def all_captions(rows: Sequence[Row], seed: int = 0) -> list[list[str]]:
    """The captions of each picture in each motion: picture by picture, a list for each motion."""
    rng = random.Random(seed)
    plain = VARIANTS // 3
    return [
        [caption(row, motion)] * plain + [_varied(row, motion, rng) for _ in range(VARIANTS - plain)]
        for row in rows
        for motion in KINDS
    ]


def paths(motions: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Across, down, size, angle and strength (N, FRAMES) of each clip; the canvas reaches from -1 to 1.

    Where and how large varies a little; the motion itself covers most of the canvas.
    """

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(motions), 1, generator=generator, device=motions.device)

    def when(kind: str, value: Tensor, otherwise: Tensor) -> Tensor:
        return torch.where((motions == KINDS.index(kind))[:, None], value, otherwise)

    time = torch.linspace(0, 1, FRAMES, device=motions.device)[None]
    moves = (motions < 4) | (motions == KINDS.index("bouncing"))
    size = torch.where(moves[:, None], uniform(0.54, 0.64), uniform(0.7, 0.8)).expand(-1, FRAMES)
    large, small = uniform(0.8, 0.92), uniform(0.28, 0.38)
    size = when("growing", small + (large - small) * time, size)
    size = when("shrinking", large + (small - large) * time, size)
    way = uniform(0.34, 0.4) * (2 * time - 1)
    hop = uniform(0.3, 0.36) - uniform(0.58, 0.7) * (2 * math.pi * time).sin().abs()
    shift = torch.where(moves[:, None], uniform(-0.14, 0.14), uniform(-0.06, 0.06))
    across = when("left", -way, when("right", way, shift))
    down = when("up", -way, when("down", way, when("bouncing", hop, uniform(-0.06, 0.06))))
    turn = math.pi * uniform(0.9, 1.1) * time
    angle = when("clockwise", turn, when("counterclockwise", -turn, torch.zeros_like(turn)))
    strength = when("fading in", time, when("fading out", 1 - time, torch.ones_like(time)))
    shape = (len(motions), FRAMES)
    return tuple(value.expand(shape) for value in (across, down, size, angle, strength))  # type: ignore[return-value]


def draw(pictures: Tensor, motions: Tensor, generator: torch.Generator) -> Tensor:
    """Clips (N, 3, FRAMES, SIDE, SIDE) in -1..1 of uint8 pictures (N, H, W, 3) moving in the ways `motions`."""
    across, down, size, angle, strength = (value.flatten() for value in paths(motions, generator))
    cos, sin = angle.cos() / size, angle.sin() / size
    # where on the picture a point of the canvas comes from: shifted back, turned back, scaled up
    rows = [
        torch.stack([cos, sin, -cos * across - sin * down], 1),
        torch.stack([-sin, cos, sin * across - cos * down], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), [len(size), 3, 2 * SIDE, 2 * SIDE], align_corners=False)
    shadow = 1 - pictures.permute(0, 3, 1, 2).float() / 255
    shadow = shadow.repeat_interleave(FRAMES, 0)
    moved = F.avg_pool2d(F.grid_sample(shadow, grid, align_corners=False), 2) * strength[:, None, None, None]
    return (1 - 2 * moved).unflatten(0, (-1, FRAMES)).transpose(1, 2).contiguous()
