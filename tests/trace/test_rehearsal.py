"""What is learned by skipping, on the model's shadow, a step that was just computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, Block, Gated, Plain, at, case, counted

import zoo
from samovar.arch import BlockDeclaration
from samovar.arch.declarations import DECLARATIONS
from samovar.errors import ModelError
from samovar.trace.forward import Tensors
from samovar.trace.passes import Outlook, StepPass
from samovar.trace.rehearsal import Rehearsal, Replay
from samovar.trace.shadow import TrialFailed

KEPT = {
    "FluxTransformer2DModel": [False, True, False, True],
    "Flux2Transformer2DModel": [False, True, True],
    "QwenImageTransformer2DModel": [False, True],
    "SD3Transformer2DModel": [False, True],
    "HunyuanVideoTransformer3DModel": [False, True, False, True, False],
    "WanVACETransformer3DModel": [False, False, True],
    "Krea2Transformer2DModel": [True, True, True],
    "LTXVideoTransformer3DModel": [True],
}
"""By zoo case: which streams of which segments matter for the output or the signal, as read from the model's source."""

LEADERS = {
    "FluxTransformer2DModel": ("transformer_blocks", "hidden_states"),
    "SD3Transformer2DModel": ("transformer_blocks", "hidden_states"),
    "HunyuanVideoTransformer3DModel": ("transformer_blocks", "hidden_states"),
    "Krea2Transformer2DModel": ("transformer_blocks", "hidden_states"),
    "Kandinsky5Transformer3DModel": ("visual_transformer_blocks", "visual_embed"),
    "Flux3Transformer2DModel-reference": ("mode_blocks.image", "hidden_states"),
    "Lumina2Transformer2DModel": ("noise_refiner", "hidden_states"),
    "ZImageTransformer2DModel": ("noise_refiner", "x"),
}
"""By zoo case: the stack that leads and the parameter that carries what is denoised; several run text first."""


@pytest.mark.parametrize("name", KEPT)
def test_only_residuals_that_have_an_effect_are_wanted(name: str) -> None:
    gated = Gated(case(name).build())
    (trace, residuals, _), _ = gated.rehearsed(gated.of(case(name)))
    kept = [part is not None and slot not in trace.idle_slots for slot, part in enumerate(residuals)]
    assert kept == KEPT[name]


@pytest.mark.parametrize("name", LEADERS)
def test_the_first_stack_that_sees_the_sample_leads(name: str) -> None:
    gated = Gated(case(name).build())
    (trace, _, first_calls), rehearsed = gated.rehearsed(gated.of(case(name)))
    segment = trace.leader.segment
    assert segment is not None
    assert (trace.leader.gate.path, segment.stack.streams[trace.stream].parameter) == LEADERS[name]
    assert trace.leader.is_first
    assert rehearsed.given is first_calls[segment]
    assert rehearsed.other is not None
    streams = [
        trace.leader.read(given.args, given.kwargs)[trace.stream] for given in (rehearsed.given, rehearsed.other)
    ]
    assert not torch.equal(*streams), "the other one has another sample"


def test_the_declared_leader_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Lumina2Transformer2DModel"
    monkeypatch.setitem(DECLARATIONS, name, BlockDeclaration(leader="layers"))
    gated = Gated(case(name).build())
    (trace, _, _), _ = gated.rehearsed(gated.of(case(name)))
    assert trace.leader.gate.path == "layers"


def test_nobody_sees_a_rehearsal() -> None:
    name = "FluxTransformer2DModel"
    gated = Gated(case(name).build())
    with counted(gated.model.modules()) as calls:
        gated.watched(gated.of(case(name)))
        bare = len(calls)
        calls.clear()
        gated.rehearsed(gated.of(case(name)))
    assert len(calls) == bare


class Leaking(Plain):
    """Its blocks hand something to the end of the forward behind everybody's back."""

    class Block(Block):
        leak: list[torch.Tensor]

        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            self.leak.append(x.mean(dim=1, keepdim=True))
            return super().forward(x, temb)

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        leak: list[torch.Tensor] = []
        for block in self.blocks:
            block.leak = leak
        x = super().run(x, temb)
        return x + sum(leak)


class Tapped(Plain):
    """A value in the middle of the stack is used behind it."""

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x, temb)
        middle = self.blocks[1](x, temb)
        return self.blocks[2](middle, temb) + middle


@pytest.mark.parametrize("make", [Leaking, Tapped])
def test_a_model_whose_skipped_step_differs_is_found_out(make: type[Plain]) -> None:
    gated = Gated(make())
    with pytest.raises(ModelError, match=r"a skipped step differs from a computed one by \d"):
        gated.rehearsed(gated.inputs(*at(0), COND))


def test_an_output_that_is_no_number_is_not_taken_for_equal() -> None:
    gated = Gated(Plain())
    watched, output = gated.watched(gated.inputs(*at(0), COND))
    rehearsal = Rehearsal(gated.model, gated.gates.by_module, watched, (*at(0), COND), {})
    with pytest.raises(ModelError, match="differs from a computed one by nan"):
        rehearsal.run(output * torch.nan, lambda with_time: ((*at(1), COND), {}))


class Deaf(Plain):
    """Its blocks see the conditioning alone; the sample is added behind them."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        temb = self.embed(timestep, encoder_hidden_states)
        return self.unembed(self.run(temb.expand(1, 5, -1), temb)) + hidden_states


def test_a_model_whose_sample_reaches_no_block_is_refused() -> None:
    gated = Gated(Deaf())
    with pytest.raises(ModelError, match="the sample reaches none of its blocks directly"):
        gated.rehearsed(gated.inputs(*at(0), COND))


class Refining(Plain):
    """Refines its text together with a token for the time, before the sample comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.refiner = torch.nn.ModuleList(Block(self.width) for _ in range(2))

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        text = torch.cat([self.embed_c(encoder_hidden_states), self.embed_t(timestep[:, None])])[None]
        for block in self.refiner:
            text = block(text, torch.zeros(1))
        return self.unembed(self.run(self.embed_x(hidden_states), text.mean(1, keepdim=True)))


def test_a_stack_that_sees_the_time_but_not_the_sample_does_not_lead() -> None:
    gated = Gated(Refining())
    (trace, _, _), _ = gated.rehearsed(gated.inputs(*at(0), COND))
    assert trace.leader.gate.path == "blocks"


class Picky(Plain):
    """Knows some times only."""

    times: tuple[float, ...] = (1.0,)

    def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        if float(time[0]) not in self.times:
            raise ValueError("no such time")
        return super().embed(time, conditioning)


def test_a_model_that_does_not_take_another_time_is_tried_at_its_own_alone() -> None:
    gated = Gated(Picky())
    (trace, _, _), rehearsed = gated.rehearsed(gated.inputs(*at(0), COND))
    assert trace.leader.gate.path == "blocks"
    assert rehearsed.other is None


class Strict(Plain):
    """Takes the very sample that it was made for, and no other."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        if not torch.equal(hidden_states, at(0)[0]):
            raise ValueError("another sample")
        return super().forward(hidden_states, timestep, encoder_hidden_states)


def test_a_model_that_refuses_another_sample_is_not_skipped() -> None:
    gated = Gated(Strict())
    with pytest.raises(ModelError, match=r"which of its blocks see the sample cannot be tried \(ValueError: another"):
        gated.rehearsed(gated.inputs(*at(0), COND))


class Once(Plain):
    """Cannot be run outside of its own run."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        if not at_home():
            raise RuntimeError("not at home")
        return super().forward(hidden_states, timestep, encoder_hidden_states)


HOME = [True]


def at_home() -> bool:
    return HOME[0]


def test_a_model_that_cannot_be_tried_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Gated(Once())
    watched, output = gated.watched(gated.inputs(*at(0), COND))
    rehearsal = Rehearsal(gated.model, gated.gates.by_module, watched, (*at(0), COND), {})
    monkeypatch.setitem(globals(), "HOME", [False])
    with pytest.raises(ModelError, match=r"cannot be tried outside its run \(RuntimeError: not at home\)"):
        rehearsal.run(output, lambda with_time: ((*at(1), COND), {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_rehearsed_as_well(dtype: torch.dtype) -> None:
    gated = Gated(Plain().to(dtype))
    sample, time = at(0)
    (trace, _, _), _ = gated.rehearsed(gated.inputs(sample.to(dtype), time.to(dtype), COND.to(dtype)))
    assert trace.leader.gate.path == "blocks"


# ------------------------------------------------------------------------------------------------ replays


def stored(residuals: Tensors) -> Outlook:
    return Outlook([1], [residuals])


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanAnimateTransformer3DModel", "Krea2Transformer2DModel"])
def test_it_gives_what_the_model_gives_with_its_blocks_skipped_and_calls_nothing_of_it(name: str) -> None:
    model = case(name).build()
    gated = Gated(model)
    (trace, residuals, _), _ = gated.rehearsed(gated.of(case(name)))
    replay, inputs = Replay(model, gated.gates.by_module, trace), gated.of(case(name), 1)
    exact = gated.through(StepPass(trace, "skip", stored(residuals)), inputs)
    with counted(model.modules()) as calls:
        output = replay.run(StepPass(trace, "skip", stored(residuals)), inputs.args, inputs.kwargs)
    assert not calls
    assert zoo.equal(output, exact)


def test_what_reaches_the_first_block_of_each_segment_is_copied_if_that_is_asked_for() -> None:
    name = "FluxTransformer2DModel"
    gated = Gated(case(name).build())
    inputs = gated.of(case(name))
    (trace, residuals, first_calls), _ = gated.rehearsed(inputs)
    replay = Replay(gated.model, gated.gates.by_module, trace)
    replay.run(StepPass(trace, "skip", stored(residuals)), inputs.args, inputs.kwargs)
    assert replay.first_calls == {}
    replay.run(StepPass(trace, "skip", stored(residuals)), inputs.args, inputs.kwargs, keeps_calls=True)
    assert set(replay.first_calls) == set(trace.segments)
    first = trace.segments[0]
    assert replay.first_calls[first].module is gated.model.transformer_blocks[0]
    found, known = replay.first_calls[first].kwargs, first_calls[first].kwargs
    assert all(zoo.equal(found[key], known[key]) for key in ("hidden_states", "encoder_hidden_states", "temb"))


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
    replay, step = Replay(gated.model, gated.gates.by_module, trace), StepPass(trace, "skip", stored(residuals))
    replay.run(step, (*at(0), COND), {})
    assert step.lost == "the forward ended before 'blocks'"


def test_a_replay_that_the_model_refuses_fails_and_the_next_one_works() -> None:
    gated = Gated(Plain())
    (trace, residuals, _), _ = gated.watched(gated.inputs(*at(0), COND))
    replay = Replay(gated.model, gated.gates.by_module, trace)
    with pytest.raises(TrialFailed):
        replay.run(StepPass(trace, "skip", stored(residuals)), (torch.ones(1, 5, 99), at(0)[1], COND), {})
    step = StepPass(trace, "skip", stored(residuals))
    assert replay.run(step, (*at(0), COND), {}).shape == (1, 5, 4)
    assert step.lost is None
