"""The video model's training computes what the pipeline will."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from training.forward import t5_buckets
from training.models import named_weights
from training.motion import forward, models
from training.motion.settings import TINY

CONFIG = replace(TINY, head_dim=24)


class Tokens:
    """What a text encoder asks of a tokenizer."""

    pad_token_id, eos_token_id = 0, 1

    def __len__(self) -> int:
        return 40


def shaken(module: Any) -> Any:
    """With no weight at zero or one, so that each of them matters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


@pytest.mark.parametrize("padding", [0, 20])
def test_the_transformer(padding: int) -> None:
    model = shaken(models.build_transformer(CONFIG))
    x, t, text = torch.randn(2, 8, 3, 4, 4), torch.tensor([0.2, 0.9]), torch.randn(2, 6, 32)
    text[:, 4:] = 0
    long = torch.cat([text, torch.zeros(2, padding, 32)], 1)
    with torch.no_grad():
        theirs = model(x, t * 1000, long, return_dict=False)[0]
        bias = torch.zeros(2, 1, 1, 6)
        bias[..., -1] = torch.tensor(1.0 + padding).log()
        ours = forward.wan(
            named_weights(model), CONFIG, x.flatten(2).mT, t, text, bias,
            forward.rotary(CONFIG, (3, 4, 4), torch.device("cpu")),
        )  # fmt: skip
    torch.testing.assert_close(ours.mT.reshape(x.shape), theirs, rtol=2e-4, atol=2e-4)


def test_the_text_encoder() -> None:
    model = shaken(models.build_text_encoder(CONFIG, Tokens()))
    ids, mask = torch.randint(2, 40, (2, 12)), torch.arange(12)[None] < torch.tensor([[5], [12]])
    with torch.no_grad():
        theirs = model(ids, mask.long()).last_hidden_state * mask[..., None]
        ours = forward.umt5(named_weights(model), CONFIG, ids, mask, t5_buckets(12, torch.device("cpu")))
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_the_autoencoder_over_whole_clips() -> None:
    vae = shaken(models.build_vae(CONFIG))
    clips = torch.rand(1, 3, 17, 32, 32) * 2 - 1
    with torch.no_grad():
        latents = vae.encode(clips).latent_dist.mode()
        decoded = vae.decode(latents).sample
        models.over_whole_clips(vae)
        assert latents.shape == (1, 8, 5, 4, 4)
        torch.testing.assert_close(models.encode(vae, clips)[0], latents, rtol=1e-3, atol=1e-4)
        whole = models.decode(vae, latents).clamp(-1, 1)
    torch.testing.assert_close(whole, decoded, rtol=1e-3, atol=1e-4)
