"""A tape keeps what leads to its layers and nothing else, and finds tensors wherever torch takes them."""

from __future__ import annotations

import collections

import torch
from test_time_only import Toy, as_it_is, inputs, search
from torch import nn

from samovar.trace.tape import Call, Form, Here, Value, Weight, leaves, make_tape, map_parts, tensors_in

Pair = collections.namedtuple("Pair", "one other")


def test_tensors_are_found_wherever_torch_takes_them() -> None:
    a, b, c, d, e = torch.arange(5).unbind()
    value = [a, (b, {"x": c, "y": 1}), slice(None, d), Pair(e, None), "text"]
    assert [int(tensor) for tensor in tensors_in(value)] == [0, 1, 2, 3, 4]
    doubled = map_parts(lambda part: part * 2 if isinstance(part, torch.Tensor) else part, value)
    assert [int(tensor) for tensor in tensors_in(doubled)] == [0, 2, 4, 6, 8]
    assert isinstance(doubled[3], Pair)
    assert leaves((Value(3), Weight("a", "b"))) == [Value(3), Weight("a", "b")]  # These are no containers.


def test_what_leads_to_no_layer_is_dropped() -> None:
    def call(layer: str, takes: tuple[int, ...], makes: tuple[int, ...], memory: int | None = None) -> Call:
        form = Form(torch.Size([1]), torch.float32) if layer else None
        return Call(torch.sin, layer, tuple(map(Value, takes)), {}, makes, memory, (), form)

    calls = [
        call("", (0,), (1,)),
        call("", (0,), (9,)),  # Leads nowhere.
        call("", (1, 7), (), memory=5),  # Writes into what the layer is given, from another argument.
        call("layer", (1,), (2,)),
        call("", (2,), (3,)),  # Comes after the last layer.
    ]
    tape = make_tape(calls, {0: 0, 1: 7, 2: 8}, {1: 5})
    assert tape is not None
    assert [one.values() for one in tape.calls] == [{0}, {1, 7}, {1}]
    assert tape.layers == ("layer",)
    assert tape.inputs == (0, 1)
    assert make_tape(calls[:3], {0: 0}, {}) is None


def test_the_forms_of_what_layers_take_and_return_are_known_beforehand() -> None:
    tape = search(Toy())
    assert tape is not None
    model = Toy()
    parts = dict(model.named_modules())
    given = inputs()
    with torch.no_grad():
        played = tape.play(model, [[given["timestep"]]], lambda path: as_it_is(parts[path]))
        for call, (tensors, outputs) in zip(tape.layer_calls, played, strict=True):
            assert call.returns == (outputs[0].shape, outputs[0].dtype)
            assert list(call.given) == [(tensor.shape, tensor.dtype) for tensor in tensors[0]]
            assert call.returns.num_bytes == outputs[0].nbytes


def test_devices_are_those_of_the_player() -> None:
    tape = search(Toy())
    assert tape is not None
    found = [part for call in tape.calls for part in leaves((call.args, call.kwargs))]
    assert any(isinstance(part, Here) for part in found)
    assert not any(isinstance(part, (torch.device, nn.Module)) for part in found)
