"""What a trace says of a forward: which blocks, in which runs, with which streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, Gated, Plain, at, case, tensors_in
from samovar.cache.trace import Call, Desynchronised, Gate, Tracer, added, alike

import zoo
from samovar.arch import find_anatomy

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


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments(name: str) -> None:
    gated = Gated(case(name).build())
    trace, attempt = gated.computed(gated.of(case(name)))
    assert [(segment.stack.path, len(segment.stack.streams)) for segment in trace.segments] == SEGMENTS[name]
    counts = [len(segment.stack.streams) for segment in trace.segments]
    assert [segment.slot for segment in trace.segments] == [sum(counts[:index]) for index in range(len(counts))]
    assert attempt.parts is not None
    assert len(attempt.parts) == sum(counts)
    for segment in trace.segments:
        own = [call for call in trace.calls if call.segment is segment]
        assert [call.is_first for call in own] == [True] + [False] * (len(own) - 1)
        assert [call.is_last for call in own] == [False] * (len(own) - 1) + [True]


@pytest.mark.parametrize("name", LEADERS)
def test_the_first_stack_that_sees_the_sample_leads(name: str) -> None:
    gated = Gated(case(name).build())
    trace, _ = gated.computed(gated.of(case(name)))
    assert trace.leader.segment is not None
    streams = trace.leader.segment.stack.streams
    assert (trace.leader.gate.path, streams[trace.stream].parameter) == LEADERS[name]
    assert trace.leader.is_first
    before = trace.segments[: trace.segments.index(trace.leader.segment)]
    assert not any(segment.sees_sample for segment in before)


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
    tracer = Tracer(model, find_anatomy(model))
    assert zoo.equal(gated.through(tracer, gated.of(case(name))), exact)
    trace, residuals = tracer.finish()
    parameters = [stream.parameter for stream in trace.segments[0].stack.streams]
    expected = [after - inputs[0][name or ""] for name, after in zip(parameters, outputs[0], strict=True)]
    assert zoo.equal(residuals[: len(expected)], expected)


def test_what_runs_between_blocks_is_answered_too() -> None:
    gated = Gated(case("WanAnimateTransformer3DModel").build())
    trace, _ = gated.computed(gated.of(case("WanAnimateTransformer3DModel")))
    assert trace.side == ("face_adapter",)
    between = [call.gate.path for call in trace.calls if call.segment is None]
    assert between
    assert set(between) == {"face_adapter"}


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "RFD4ProteinaTransformer-recycling"])
def test_a_trace_holds_nothing_of_the_forward_that_it_was_made_of(name: str) -> None:
    gated = Gated(case(name).build())
    trace, _ = gated.computed(gated.of(case(name)))
    gated.runner.forget()
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(trace))
    assert held <= 64, "zeros, of one element each"


def test_a_forward_is_watched_without_being_changed() -> None:
    model = Plain()
    with torch.no_grad():
        exact = model(*at(0), COND)
    gated = Gated(model)
    tracer = Tracer(model, find_anatomy(model))
    assert torch.equal(gated.through(tracer, gated.inputs(*at(0), COND)), exact)
    assert [call.gate.index for call in tracer.finish()[0].calls] == [0, 1, 2]


# ------------------------------------------------------------------------------------------------ its parts


def call_of(places: tuple[Any, ...], returned: Any) -> Call:
    return Call(Gate(None, "blocks"), None, False, False, places, returned)  # type: ignore[arg-type]


def test_arguments_are_read_where_they_were_given() -> None:
    call = call_of(("hidden_states", None, 1), None)
    assert call.read(["a", "b"], {"hidden_states": "c"}) == ["c", None, "b"]
    for args, kwargs in ((["a"], {"hidden_states": "c"}), (["a", "b"], {})):
        with pytest.raises(Desynchronised, match="'blocks' is called in another way"):
            call.read(args, kwargs)


def test_residuals_of_streams_of_every_form() -> None:
    before, after = torch.ones(2, 3), torch.full((2, 3), 3.0)
    longer = torch.zeros(2, 4)
    same, other, none, idle = added([before, before, before, before], [after, longer, None, after], 4, {7})
    assert torch.equal(same, torch.full((2, 3), 2.0))
    assert torch.equal(other, longer), "what has no input of its form is kept as it is"
    assert other.data_ptr() != longer.data_ptr(), "its owner may change it"
    assert none is None
    assert idle is None
    (kept,) = added([before.requires_grad_()], after)
    assert not kept.requires_grad


def test_what_is_alike_can_be_added() -> None:
    assert alike(torch.ones(2), torch.zeros(2))
    assert not alike(torch.ones(2), torch.zeros(3))
    assert not alike(None, torch.zeros(3))
    assert not alike(torch.ones(2), None)


def test_an_answer_has_the_form_of_what_the_block_returned() -> None:
    gated = Gated(Plain())
    trace, _ = gated.computed(gated.inputs(*at(0), COND))
    form, value = torch.empty(2, 3, device="meta"), torch.ones(2, 3)
    empty = torch.empty(4, dtype=torch.bfloat16, device="meta")
    call = call_of((0, None, None, None), [form, None, empty, (empty, form)])
    answer = trace.answer(call, [value, None, None, None], (value,), {})
    assert type(answer) is list
    assert answer[0] is value
    assert answer[1] is None
    assert zoo.equal(answer[2], torch.zeros(4, dtype=torch.bfloat16)), "zeros where nothing is carried"
    assert [tuple(part.shape) for part in answer[3]] == [(4,), (2, 3)]
    assert trace.answer(call_of((), None), (), (), {}) is None
