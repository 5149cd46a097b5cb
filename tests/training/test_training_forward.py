"""The training functions compute what diffusers and transformers compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from training import forward, models
from training.settings import ModelConfig

CONFIG = ModelConfig(
    picture=32, latent_channels=4, vae_channels=(8, 16, 16), heads=2, head_dim=16,
    dual_blocks=2, single_blocks=2, text_dim=32, text_head_dim=16, text_tokens=12,
)  # fmt: skip


class Tokens(SimpleNamespace):
    """As much of a tokenizer as the encoders' configurations ask for."""

    def __len__(self) -> int:
        return 50


CLIP = Tokens(bos_token_id=0, eos_token_id=1, pad_token_id=1)
T5 = Tokens(pad_token_id=0, eos_token_id=1)


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """The zero-initialised parts, and all else, moved off their start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_flux_equals_diffusers() -> None:
    model = shaken(models.build_transformer(CONFIG))
    x, t = torch.randn(3, 16, 16), torch.tensor([0.03, 0.5, 0.991])
    pooled, context = torch.randn(3, 32), torch.randn(3, 12, 32)
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    with torch.no_grad():
        expected = model(
            hidden_states=x, timestep=t, pooled_projections=pooled,
            encoder_hidden_states=context, txt_ids=torch.zeros(12, 3), img_ids=ids,
            return_dict=False,
        )[0]  # fmt: skip
        weights = dict(models.named_weights(model))
        rope = forward.rotary(CONFIG, 12, x.device)
        got = forward.flux(weights, CONFIG, x, t, pooled, context, rope)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_clip_equals_transformers() -> None:
    model = shaken(models.build_clip(CONFIG, CLIP))
    ids = torch.randint(2, 50, (3, 9))
    ids[0, 4:], ids[1, 8:], ids[2, 1:] = 1, 1, 1
    ends = (ids == 1).int().argmax(1)
    with torch.no_grad():
        expected = model(ids).pooler_output
        got = forward.clip_text(dict(models.named_weights(model)), CONFIG, ids, ends)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [7, 200])
def test_t5_equals_transformers(tokens: int) -> None:
    model = shaken(models.build_t5(CONFIG, T5))
    ids = torch.randint(0, 50, (2, tokens))
    with torch.no_grad():
        expected = model(ids)[0]
        buckets = forward.t5_buckets(tokens, ids.device)
        got = forward.t5_text(dict(models.named_weights(model)), CONFIG, ids, buckets)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_compiles_without_a_graph_break() -> None:
    weights = dict(models.named_weights(shaken(models.build_transformer(CONFIG))))
    rope = forward.rotary(CONFIG, 12, torch.device("cpu"))
    args = (torch.randn(2, 28, 32), torch.randn(2, 32), *rope)
    names = (forward.SINGLE_NAMES, forward.SINGLE_NORMS)
    compiled = torch.compile(forward.single_block, backend="aot_eager", fullgraph=True)
    for i in range(2):
        block = forward.block_weights(weights, f"single_transformer_blocks.{i}", *names)
        torch.testing.assert_close(compiled(*args, block), forward.single_block(*args, block))
