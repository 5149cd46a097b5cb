"""Trains the transformer and the text encoders.

Rectified flow: between a picture's latents (time 0) and noise (time 1) the network learns the
velocity noise - latents, given a caption. All pictures, captions and weights are on the device;
a batch is a function of the step, so a run continued from a checkpoint sees what it would have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training import forward
from training.flat import make_layout
from training.loop import Batch
from training.models import part_weights
from training.optim import Optimiser
from training.settings import Settings

LONG_TEXT = 512


def pack(latents: Tensor) -> Tensor:
    """(N, C, H, W) to the pipeline's tokens of two by two latents, (N, HW/4, 4C)."""
    n, c, h, w = latents.shape
    tokens = latents.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tokens.reshape(n, h * w // 4, c * 4)


@dataclass(frozen=True)
class Captions:
    """Token ids of all captions, the empty one last, and which belong to which picture."""

    clip: Tensor
    ends: Tensor
    t5: Tensor
    of_picture: Tensor

    def to(self, device: torch.device) -> Captions:
        return Captions(*(t.to(device) for t in (self.clip, self.ends, self.t5, self.of_picture)))


def tokenize(captions: Sequence[Sequence[str]], clip_tokenizer: Any, t5_tokenizer: Any, tokens: int) -> Captions:
    """Ids of every distinct caption, as FluxPipeline would make them.

    CLIP reads from left to right, so what follows the first end of text cannot matter: its ids
    are cut to the longest caption.
    """
    numbers = {text: i for i, text in enumerate(dict.fromkeys(t for c in captions for t in c))}
    texts = [*(t for t in numbers if t), ""]
    numbers = {text: i for i, text in enumerate(texts)}
    clip = clip_tokenizer(texts, padding="longest", truncation=True, max_length=77)
    t5 = t5_tokenizer(texts, padding="max_length", truncation=True, max_length=tokens)
    clip_ids = torch.tensor(clip.input_ids)
    ends = (clip_ids == clip_tokenizer.eos_token_id).int().argmax(dim=1)
    of_picture = torch.tensor([[numbers[text] for text in some] for some in captions])
    return Captions(clip_ids, ends, torch.tensor(t5.input_ids), of_picture)


def takes_muon(name: str, shape: tuple[int, ...]) -> bool:
    """Muon has the matrices of the transformer's blocks, but not their modulation."""
    return "transformer_blocks" in name and ".norm" not in name


class FlowStage:
    """Transformer and text encoders over latents and captions on one device."""

    name = "flow"
    capturable = True

    def __init__(
        self, settings: Settings, weights: dict[str, Tensor], latents: Tensor, captions: Captions,
        pad_id: int, rate: float = 1.0,
    ) -> None:  # fmt: skip
        """`latents` are packed, shifted and scaled; `weights` are the initial ones."""
        self.settings, self.config, self.rate = settings, settings.flow, rate
        self.latents, self.device, self.pad_id = latents, latents.device, pad_id
        self.captions = captions.to(self.device)
        self.batch_size = self.config.batch
        self.dtype = torch.bfloat16 if latents.is_cuda else torch.float32
        self.layout = make_layout({n: tuple(w.shape) for n, w in weights.items()}, takes_muon)
        start = self.layout.flatten(weights).to(self.device)
        self.optimiser = Optimiser(self.layout, start, self.config.weight_decay)
        tokens = settings.model.text_tokens
        lengths = (tokens, LONG_TEXT)
        self.ropes = {n: forward.rotary(settings.model, n, self.device) for n in lengths}
        self.buckets = {n: forward.t5_buckets(n, self.device) for n in lengths}
        self.epochs: dict[int, Tensor] = {}
        self.use_compiled(False)

    def use_compiled(self, on: bool) -> None:
        """Compiled blocks serve the usual batches; the few long ones stay plain."""
        self.blocks: tuple[forward.Block, ...] = (forward.dual_block, forward.single_block)
        if on:
            self.blocks = tuple(torch.compile(block, dynamic=False, fullgraph=True) for block in self.blocks)

    # -- batches

    def is_long(self, step: int) -> bool:
        every = self.config.long_every
        return every > 0 and step % every == every - 1

    def batch(self, step: int) -> Batch:
        """Noisy tokens, times, caption ids and velocities of a step."""
        generator = torch.Generator(self.device).manual_seed((self.settings.seed << 32) + step)
        draw: dict[str, Any] = {"generator": generator, "device": self.device}
        if self.is_long(step):
            count = max(1, int(self.batch_size * self.config.long_share))
            index = torch.randint(len(self.latents), (count,), **draw)
        else:
            count = self.batch_size
            ordinal = step - (step // self.config.long_every if self.config.long_every else 0)
            index = self._shuffled(ordinal * count, count)
        variants = self.captions.of_picture.shape[1]
        variant = torch.randint(variants, (count,), **draw)
        caption = self.captions.of_picture[index, variant]
        dropped = torch.rand(count, **draw) < self.config.drop
        caption = torch.where(dropped, len(self.captions.t5) - 1, caption)
        t = self._times(count, draw)
        clean = self.latents[index]
        noise = torch.randn(clean.shape, **draw)
        noisy = torch.lerp(clean, noise, t[:, None, None])
        t5 = self.captions.t5[caption]
        if self.is_long(step):
            t5 = F.pad(t5, (0, LONG_TEXT - t5.shape[1]), value=self.pad_id)
        return (
            noisy, t, self.captions.clip[caption], self.captions.ends[caption], t5, noise - clean
        )  # fmt: skip

    def _times(self, count: int, draw: dict[str, Any]) -> Tensor:
        """Logit-normal times, one from each of `count` equally likely slices."""
        u = (torch.randperm(count, **draw) + torch.rand(count, **draw)) / count
        normal = math.sqrt(2) * torch.erfinv((2 * u - 1).clamp(-0.99999, 0.99999))
        return torch.sigmoid(self.config.time_mean + self.config.time_std * normal)

    def _shuffled(self, start: int, count: int) -> Tensor:
        """Pictures start..start+count of an endless row of shuffled epochs."""
        pieces = []
        while count > 0:
            epoch, offset = divmod(start, len(self.latents))
            if epoch not in self.epochs:
                self.epochs = {e: p for e, p in self.epochs.items() if e >= epoch - 1}
                seed = torch.Generator().manual_seed((self.settings.seed << 32) + epoch)
                order = torch.randperm(len(self.latents), generator=seed)
                self.epochs[epoch] = order.to(self.device)
            pieces.append(self.epochs[epoch][offset : offset + count])
            start, count = start + len(pieces[-1]), count - len(pieces[-1])
        return torch.cat(pieces)

    # -- the step

    def predict(self, w: dict[str, Tensor], batch: Batch) -> Tensor:
        """The velocity at the batch's noisy tokens."""
        noisy, t, clip_ids, ends, t5_ids, _ = batch
        model, tokens = self.settings.model, t5_ids.shape[1]
        usual = tokens == model.text_tokens
        dual, single = self.blocks if usual else (forward.dual_block, forward.single_block)
        pooled = forward.clip_text(part_weights(w, "text_encoder"), model, clip_ids, ends)
        text = part_weights(w, "text_encoder_2")
        context = forward.t5_text(text, model, t5_ids, self.buckets[tokens])
        return forward.flux(
            part_weights(w, "transformer"), model, noisy.to(self.dtype), t, pooled, context,
            self.ropes[tokens], dual, single,
        )  # fmt: skip

    def gradient(self, batch: Batch, fraction: float, master: Tensor) -> tuple[Tensor, Tensor]:
        weights = master.detach().to(self.dtype).requires_grad_()
        out = self.predict(self.layout.views(weights), batch)
        loss = F.mse_loss(out.float(), batch[-1])
        return loss, torch.autograd.grad(loss, weights)[0]

    def set_rates(self, step: int, fraction: float) -> None:
        config = self.config
        warm = min(1.0, (step + 1) / max(1, config.warmup))
        fall = min(1.0, max(0.0, (1 - fraction) / (1 - config.decay_from)))
        scale = self.rate * warm * fall
        self.optimiser.set_numbers(step, config.lr * scale, config.muon_lr * scale, config.ema)

    def averaged(self) -> dict[str, Tensor]:
        """The averaged weights by name."""
        return self.layout.views(self.optimiser.ema)
