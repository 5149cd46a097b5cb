"""A skipped step, replayed without a call of the model."""

from __future__ import annotations

import pytest
import torch
from driving import COND, Gated, Plain, at, case, counted

import zoo
from samovar.trace.passes import StepPass
from samovar.trace.rehearsal import Residuals
from samovar.trace.replay import Replay
from samovar.trace.shadow import TrialFailed


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanAnimateTransformer3DModel", "Krea2Transformer2DModel"])
def test_it_gives_what_the_model_gives_with_its_blocks_skipped_and_calls_nothing_of_it(name: str) -> None:
    model = case(name).build()
    gated = Gated(model)
    (trace, residuals, _), _ = gated.rehearsed(gated.of(case(name)))
    replay, inputs = Replay(model, gated.gates.by_module, trace), gated.of(case(name), 1)
    exact = gated.through(StepPass(trace, "skip", Residuals(residuals)), inputs)
    with counted(model.modules()) as calls:
        output = replay.run(StepPass(trace, "skip", Residuals(residuals)), inputs.args, inputs.kwargs)
    assert not calls
    assert zoo.equal(output, exact)


def test_what_reaches_the_first_block_of_each_segment_is_copied_if_that_is_asked_for() -> None:
    name = "FluxTransformer2DModel"
    gated = Gated(case(name).build())
    inputs = gated.of(case(name))
    (trace, residuals, first_calls), _ = gated.rehearsed(inputs)
    replay = Replay(gated.model, gated.gates.by_module, trace)
    replay.run(StepPass(trace, "skip", Residuals(residuals)), inputs.args, inputs.kwargs)
    assert replay.first_calls == {}
    replay.run(StepPass(trace, "skip", Residuals(residuals)), inputs.args, inputs.kwargs, keeps_calls=True)
    assert set(replay.first_calls) == set(trace.segments)
    first = trace.segments[0]
    assert replay.first_calls[first].module is gated.model.transformer_blocks[0]
    found, known = replay.first_calls[first].kwargs, first_calls[first].kwargs
    assert all(zoo.equal(found[key], known[key]) for key in ("hidden_states", "encoder_hidden_states", "temb"))


class Wave(torch.nn.Module):
    """Something without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()


class Wayward(Plain):
    order: tuple[int, ...] = (0, 1, 2)

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x, temb)
        return x


def test_a_replay_that_goes_another_way_says_so() -> None:
    gated = Gated(Wayward())
    (trace, residuals, _), _ = gated.watched(gated.inputs(*at(0), COND))
    gated.model.order = (0, 1)
    replay, step = Replay(gated.model, gated.gates.by_module, trace), StepPass(trace, "skip", Residuals(residuals))
    replay.run(step, (*at(0), COND), {})
    assert step.lost == "the forward ended before 'blocks'"


def test_a_replay_that_the_model_refuses_fails_and_the_next_one_works() -> None:
    gated = Gated(Plain())
    (trace, residuals, _), _ = gated.watched(gated.inputs(*at(0), COND))
    replay = Replay(gated.model, gated.gates.by_module, trace)
    with pytest.raises(TrialFailed):
        replay.run(StepPass(trace, "skip", Residuals(residuals)), (torch.ones(1, 5, 99), at(0)[1], COND), {})
    step = StepPass(trace, "skip", Residuals(residuals))
    assert replay.run(step, (*at(0), COND), {}).shape == (1, 5, 4)
    assert step.lost is None
