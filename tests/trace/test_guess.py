"""A call of a model without a pipeline is found by trying, or the reason is given."""

from __future__ import annotations

import pytest
import torch

import zoo
from samovar.arch.skeleton import read_skeleton
from samovar.core import nested
from samovar.trace.guess import guess
from samovar.trace.rehearse import RequestSize

CASES = {case.id: case for case in zoo.load()}
SERVED = (
    "ChromaTransformer2DModel", "CogView4Transformer2DModel", "ErnieImageTransformer2DModel",
    "Flux2Transformer2DModel", "FluxTransformer2DModel", "HunyuanImageTransformer2DModel",
    "HunyuanVideoTransformer3DModel", "LTXVideoTransformer3DModel", "LongCatImageTransformer2DModel",
    "MochiTransformer3DModel", "PRXTransformer2DModel", "QwenImageTransformer2DModel", "SanaTransformer2DModel",
    "SkyReelsV2Transformer3DModel", "WanTransformer3DModel",
)  # fmt: skip
"""Classes of which a tiny model is served at the size below. May only grow."""


@pytest.mark.parametrize("name", SERVED)
def test_a_model_takes_what_was_found(name: str) -> None:
    case = CASES[name]
    model = case.build()
    found = guess(model, RequestSize(96, 128, 9))
    assert found.problem is None
    call, true = found.calls["transformer"], case.inputs(0)
    for argument in ("encoder_hidden_states", "pooled_projections"):
        if argument in true:
            assert call.kwargs[argument].shape[-1] == true[argument].shape[-1], argument
    filled = nested.map_tensors(lambda t: torch.zeros(t.shape, dtype=t.dtype) if t.is_meta else t, dict(call.kwargs))
    with torch.no_grad():
        output = next(nested.tensors(model(**filled)))
    sample = next(nested.tensors(next(iter(call.kwargs.values()))))
    assert output.ndim == sample.ndim
    assert found.peaks["transformer"] >= output.nbytes


def test_the_size_that_was_asked_for_is_the_size_that_is_found() -> None:
    model = CASES["FluxTransformer2DModel"].build()
    found = guess(model, RequestSize(height=160, width=96, batch=3))
    assert found.size == RequestSize(160, 96, None, 3)
    assert found.calls["transformer"].kwargs["hidden_states"].shape[:2] == (3, 10 * 6)


def test_flux_at_full_size_needs_what_arithmetic_says() -> None:
    _, parts = read_skeleton("FluxTransformer2DModel")
    (part,) = parts.values()
    assert part.module is not None
    found = guess(part.module)
    assert found.size == RequestSize(1024, 1024, None, 1)
    hidden = 2 * 3072 * (4096 + 512)
    # A single block holds its input and the norm of it, the attention's output, the MLP's, and all that side by side.
    least, most = hidden * (1 + 1 + 4 + 5), 2 * hidden * (1 + 1 + 1 + 4 + 5)
    assert least < found.peaks["transformer"] < most
    assert 0.3 * 2**30 < found.peaks["transformer"] < 0.6 * 2**30, "measured: 0.35 to 0.6 GiB"


def test_a_model_that_takes_something_else_says_so() -> None:
    class Strange(torch.nn.Module):
        def forward(self, runes: torch.Tensor, spell: str) -> torch.Tensor:
            if spell != "abracadabra":
                raise ValueError("not the word")
            return runes

    found = guess(Strange())
    assert found.problem is not None
    assert "not the word" in found.problem
    assert not found.calls
