"""A pipeline is called with the generators of its seeds, and nothing else that it draws depends on chance."""

from __future__ import annotations

from typing import Any

import torch

from samovar.engine import call_pipeline


def test_what_a_pipeline_draws_without_its_generator_follows_the_seed() -> None:
    drawn: list[float] = []

    class Pipeline:
        def __call__(self, prompt: str, generator: Any) -> None:
            drawn.append(torch.rand(()).item())

    torch.manual_seed(1)
    before = torch.get_rng_state()
    for seed in (3, 4, 3):
        call_pipeline(Pipeline(), ["a cat"], [seed], {})
    assert drawn[0] == drawn[2] != drawn[1]
    assert torch.equal(torch.get_rng_state(), before), "and nobody else's draws do"
