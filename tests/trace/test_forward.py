"""What a trace says of a forward: which blocks, in which runs, with which streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, Block, Gated, Plain, at, case, tensors_in

import zoo
from samovar.arch import BlockDeclaration, find_anatomy
from samovar.arch.declarations import DECLARATIONS
from samovar.core.errors import ModelError
from samovar.trace.forward import Call, Given, Tracer, added, alike
from samovar.trace.watch import Gate, _Active

SEGMENTS: dict[str, list[tuple[str, int]]] = {
    "FluxTransformer2DModel": [("transformer_blocks", 2), ("single_transformer_blocks", 2)],
    "Flux2Transformer2DModel": [("transformer_blocks", 2), ("single_transformer_blocks", 1)],
    "SD3Transformer2DModel": [("transformer_blocks", 2)],
    "LTXVideoTransformer3DModel": [("transformer_blocks", 1)],
    "T5FilmDecoder": [("decoders", 1)],
    # The same blocks over and over, and one list whose blocks run with two lengths of the sequence.
    "RFD4ProteinaTransformer-recycling": [("transformer_layers", 1), ("transformer_layers", 1)],
    "MotifVideoTransformer3DModel": [
        ("transformer_blocks", 2), ("single_transformer_blocks", 2), ("single_transformer_blocks", 2)
    ],
    # Stacks that run inside another are no segments.
    "LatteTransformer3DModel": [("transformer_blocks", 1)],
    "WanVACETransformer3DModel": [("vace_blocks", 2), ("blocks", 1)],
}  # fmt: skip
"""By zoo case: list and number of streams of each segment, in the order in which they run."""


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments(name: str) -> None:
    gated = Gated(case(name).build())
    (trace, residuals, first_calls), _ = gated.watched(gated.of(case(name)))
    assert [(segment.stack.path, len(segment.stack.streams)) for segment in trace.segments] == SEGMENTS[name]
    counts = [len(segment.stack.streams) for segment in trace.segments]
    assert [segment.slot for segment in trace.segments] == [sum(counts[:index]) for index in range(len(counts))]
    assert len(residuals) == sum(counts)
    assert set(first_calls) == set(trace.segments)
    stacks = dict.fromkeys(segment.stack.path for segment in trace.segments)
    assert tuple(stacks) == tuple(dict.fromkeys(path for path, _ in SEGMENTS[name]))
    for segment in trace.segments:
        own = [call for call in trace.calls if call.segment is segment]
        assert [call.is_first for call in own] == [True] + [False] * (len(own) - 1)
        assert [call.is_last for call in own] == [False] * (len(own) - 1) + [True]


@pytest.mark.parametrize("name", ["FluxTransformer2DModel-controlnet", "QwenImageTransformer2DModel-controlnet"])
def test_a_residual_runs_from_the_first_input_to_the_last_output(name: str) -> None:
    model = case(name).build()
    stack = find_anatomy(model).stacks[0]
    inputs: list[dict[str, Any]] = []
    outputs: list[Any] = []
    blocks = stack.modules(model)
    handles = [
        blocks[0].register_forward_pre_hook(lambda _, args, kwargs: inputs.append(kwargs), with_kwargs=True),
        blocks[-1].register_forward_hook(lambda _, args, output: outputs.append(output)),
    ]
    exact = case(name).run(model)
    for handle in handles:
        handle.remove()
    gated = Gated(model)
    (trace, residuals, _), output = gated.watched(gated.of(case(name)))
    assert zoo.equal(output, exact)
    parameters = [stream.parameter for stream in trace.segments[0].stack.streams]
    expected = [after - inputs[0][name or ""] for name, after in zip(parameters, outputs[0], strict=True)]
    assert zoo.equal(residuals[: len(expected)], expected)


def test_what_runs_between_blocks_is_answered_too() -> None:
    gated = Gated(case("WanAnimateTransformer3DModel").build())
    (trace, _, _), _ = gated.watched(gated.of(case("WanAnimateTransformer3DModel")))
    assert trace.side == ("face_adapter",)
    between = [call.gate.path for call in trace.calls if call.segment is None]
    assert between
    assert set(between) == {"face_adapter"}


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "RFD4ProteinaTransformer-recycling"])
def test_a_trace_holds_nothing_of_the_forward_that_it_was_made_of(name: str) -> None:
    gated = Gated(case(name).build())
    (trace, _, _), _ = gated.rehearsed(gated.of(case(name)))
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(trace))
    assert held <= 64, "zeros, of one element each"


def test_a_forward_is_watched_without_being_changed() -> None:
    model = Plain()
    with torch.no_grad():
        exact = model(*at(0), COND)
    gated = Gated(model)
    (trace, _, first_calls), output = gated.watched(gated.inputs(*at(0), COND))
    assert torch.equal(output, exact)
    assert [call.gate.index for call in trace.calls] == [0, 1, 2]
    (given,) = first_calls.values()
    assert given.module is model.blocks[0]
    with torch.no_grad():
        assert torch.equal(given.args[0], model.embed_x(at(0)[0]))


class InPlace(Plain):
    """Its blocks write into what they are given."""

    class Block(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return x.copy_(super().forward(x, temb))

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)


@pytest.mark.parametrize(("make", "writes"), [(Plain, False), (InPlace, True)])
def test_blocks_that_write_in_place_are_seen_and_their_residual_is_the_true_one(
    make: type[Plain], writes: bool
) -> None:
    gated, plain = Gated(make()), Gated(Plain())
    (trace, residuals, _), _ = gated.watched(gated.inputs(*at(0), COND))
    (_, expected, _), _ = plain.watched(plain.inputs(*at(0), COND))
    assert [segment.writes_in_place for segment in trace.segments] == [writes]
    assert zoo.equal(residuals, expected)


class Uneven(Plain):
    """Its last block returns more than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_forward_hook(lambda module, args, output: (output, output))

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = super().run(x, temb)[0]
        return last


def test_a_forward_that_cannot_be_understood_runs_to_its_end_all_the_same() -> None:
    gated = Gated(Uneven())
    tracer = Tracer(gated.model, gated.structure)
    with torch.no_grad():
        exact = Plain()(*at(0), COND)
    assert torch.equal(gated.through(tracer, gated.inputs(*at(0), COND)), exact)
    with pytest.raises(ModelError, match="different numbers of values"):
        tracer.finish()


def test_the_declared_leader_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ZImageTransformer2DModel"
    gated = Gated(case(name).build())
    (trace, _, _), _ = gated.watched(gated.of(case(name)))
    assert (trace.leader_is_declared, trace.leader.gate.path != "layers") == (False, True)
    monkeypatch.setitem(DECLARATIONS, name, BlockDeclaration(leader="layers"))
    (trace, _, _), _ = gated.watched(gated.of(case(name)))
    assert (trace.leader_is_declared, trace.leader.gate.path) == (True, "layers")
    early = [segment.stack.path for segment in trace.early_segments]
    assert early
    assert "layers" not in early


# ------------------------------------------------------------------------------------------------ its parts


def call_of(places: tuple[Any, ...], returned: Any) -> Call:
    return Call(Gate(_Active(), "blocks", None, 0), None, False, False, places, returned)


def test_arguments_are_read_where_they_were_given() -> None:
    call = call_of(("hidden_states", None, 1), None)
    assert call.read(["a", "b"], {"hidden_states": "c"}) == ["c", None, "b"]


def test_copied_arguments_are_nobody_elses() -> None:
    module, tensor = torch.nn.Identity(), torch.ones(2)
    given = Given(module, (tensor,), {"more": [tensor]})
    copied = given.copied()
    tensor.zero_()
    assert copied.module is module
    assert torch.equal(copied.args[0], torch.ones(2))
    assert torch.equal(copied.kwargs["more"][0], torch.ones(2))


def test_residuals_of_streams_of_every_form() -> None:
    before, after = torch.ones(2, 3), torch.full((2, 3), 3.0)
    longer = torch.zeros(2, 4)
    same, other, none, idle = added([before, before, before, before], [after, longer, None, after], 4, {7})
    assert same is not None
    assert other is not None
    assert torch.equal(same, torch.full((2, 3), 2.0))
    assert torch.equal(other, longer), "what has no input of its form is kept as it is"
    assert other.data_ptr() != longer.data_ptr(), "its owner may change it"
    assert none is None
    assert idle is None
    (kept,) = added([before.requires_grad_()], after)
    assert kept is not None
    assert not kept.requires_grad


def test_what_is_alike_can_be_added() -> None:
    assert alike(torch.ones(2), torch.zeros(2))
    assert not alike(torch.ones(2), torch.zeros(3))
    assert not alike(None, torch.zeros(3))
    assert not alike(torch.ones(2), None)


def test_an_answer_has_the_form_of_what_the_block_returned() -> None:
    form, value = torch.empty(2, 3, device="meta"), torch.ones(2, 3)
    empty = torch.empty(4, dtype=torch.bfloat16, device="meta")
    call = call_of((0, None, None, None), [form, None, empty, (empty, form)])
    answer = call.answer([value, None, None, None], (value,), {})
    assert type(answer) is list
    assert answer[0] is value
    assert answer[1] is None
    assert zoo.equal(answer[2], torch.zeros(4, dtype=torch.bfloat16)), "zeros where nothing is carried"
    assert [tuple(part.shape) for part in answer[3]] == [(4,), (2, 3)]
    assert call_of((), None).answer((), (), {}) is None


class Styled(Plain):
    """Calls its blocks by position, by name, or both; they return a tensor, or a tuple of one."""

    by_name, in_tuple = False, False

    def block(self) -> torch.nn.Module:
        block = super().block()
        block.register_forward_hook(lambda module, args, output: (output,) if self.in_tuple else output)
        return block

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x, temb=temb) if self.by_name else block(x, temb)
            x = x[0] if self.in_tuple else x
        return x


@pytest.mark.parametrize("in_tuple", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_block_in_the_middle_hands_on_what_it_is_given(by_name: bool, in_tuple: bool) -> None:
    model, x = Styled(), torch.ones(1, 5, 8)
    model.by_name, model.in_tuple = by_name, in_tuple
    gated = Gated(model)
    (trace, _, _), _ = gated.watched(gated.inputs(*at(0), COND))
    first, middle, last = trace.calls
    assert first.hand_on is None
    assert last.hand_on is None
    assert middle.hand_on is not None
    given = middle.hand_on(() if by_name else (x, None), {"x": x, "temb": None} if by_name else {})
    assert (given[0] if in_tuple else given) is x
    assert isinstance(given, tuple) is in_tuple
