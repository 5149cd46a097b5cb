"""Quantised weights go with several ranks and with layers that are computed ahead: bits are those without offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.foreseen import count_small_layers
from offload.quantised import KINDS, pipeline_with, plain_flux
from offload.test_quantised import LAYERWISE, draw
from ranks import Ranks
from samovar import attach

RANKS: dict[str, Any] = {
    "Ulysses 2": {"ulysses_degree": 2}, "ring 2": {"ring_degree": 2}, "CFG 2": {"cfg_parallel_size": 2}
}  # fmt: skip
CASES = [(kind, ranks) for kind in KINDS for ranks in RANKS]


def on_a_rank(cases: list[tuple[str, str]]) -> list[tuple[torch.Tensor, ...]]:
    """Alone, on ranks, and on ranks with offload; nothing for a kind whose library is not here."""
    found: list[tuple[torch.Tensor, ...]] = []
    for kind, ranks in cases:
        call: dict[str, Any] = {"negative_prompt": "a dog", "true_cfg_scale": 2.0}
        try:
            pipe = pipeline_with(KINDS[kind](plain_flux()))
        except pytest.skip.Exception:
            found.append(())
            continue
        alone = draw(pipe, **call)
        with attach(pipe, parallel=RANKS[ranks]):
            apart = draw(pipe, **call)
        with attach(pipe, parallel=RANKS[ranks], offload=LAYERWISE):
            streamed = draw(pipe, **call)
        found.append((alone, apart, streamed))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES], ids=["all"])
def test_two_ranks(ranks: Ranks, cases: list[tuple[str, str]]) -> None:
    for results in ranks.call(on_a_rank, cases, limit_s=900.0):
        assert len(results) == len(cases)
        here = [(case, made) for case, made in zip(cases, results, strict=True) if made]
        assert here
        for case, (alone, apart, streamed) in here:
            assert torch.equal(apart, streamed), case
            # Ranks add up in another order, in bfloat16, and 8-bit activations round at other places.
            assert (apart.float() - alone.float()).norm() < 0.1 * alone.float().norm(), case


@pytest.mark.parametrize("kind", ["torchao-int8", "gguf-q4", "sdnq-uint4"])
def test_layers_that_see_time_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count_small_layers(monkeypatch)
    pipe = pipeline_with(KINDS[kind](plain_flux()))
    expected = [draw(pipe), draw(pipe, num_inference_steps=3)]
    with attach(pipe, offload=LAYERWISE | {"precompute": True}) as attached:
        assert torch.equal(draw(pipe), expected[0])
        assert torch.equal(draw(pipe, num_inference_steps=3), expected[1])
        stats = attached.stats().offload.ahead["transformer"]
        inside = [path for path in attached.offloaded.time_layers["transformer"].layers if "blocks" in path]
        if kind == "torchao-int8":  # The layers of other libraries are not torch's own, and are computed as ever.
            assert inside
            layer = pipe.transformer.get_submodule(inside[0])
            with torch.no_grad():
                layer.weight.scale.mul_(1.5)
            assert not torch.equal(draw(pipe), expected[0])
            layer.weight.scale.data.div_(1.5)
            assert torch.equal(draw(pipe), expected[0])
        else:
            assert {type(pipe.transformer.get_submodule(path)).__name__ for path in inside} <= {"Linear"}
        assert stats.found_forwards
    assert torch.equal(draw(pipe), expected[0])
