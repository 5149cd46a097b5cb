"""A tape, played at another step, gives the inputs and outputs of the model's own layers, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from samovar.core import nested
from samovar.trace import time_only
from samovar.trace.time_only import Tape, find_tape

CASES = {case.id: case for case in zoo.load()}


@contextlib.contextmanager
def as_it_is(module: nn.Module) -> Iterator[nn.Module]:
    yield module


def play(tape: Tape, model: nn.Module, args: Any, kwargs: Any, steps: int = 1) -> list[Any]:
    tensors = list(nested.tensors((args, kwargs)))
    parts = dict(model.named_modules())
    inputs = [tensors[place] for place in tape.inputs]
    played = []
    with torch.no_grad():
        for call in tape.play(model, [inputs] * steps, lambda path: as_it_is(parts[path])):
            played.append(nested.map_tensors(torch.clone, call))  # The next calls may write into them.
    return played


def live(model: nn.Module, paths: Any, call: Any) -> list[tuple[str, list[torch.Tensor], torch.Tensor]]:
    """What the layers are given and return in a forward of the model, in order."""
    seen: list[Any] = []
    parts = dict(model.named_modules())
    with contextlib.ExitStack() as hooks:
        for path in set(paths):

            def note(_: Any, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                seen.append((path, [tensor.clone() for tensor in nested.tensors((args, kwargs))], output.clone()))

            hooks.callback(parts[path].register_forward_hook(note, with_kwargs=True).remove)
        call()
    return seen


def is_same(tape: Tape, played: list[Any], seen: list[Any]) -> bool:
    return len(played) == len(seen) and all(
        path == other and all(map(torch.equal, given[0], inputs)) and torch.equal(outputs[0], output)
        for path, (given, outputs), (other, inputs, output) in zip(tape.layers, played, seen, strict=True)
    )


@pytest.mark.parametrize("name", ["HunyuanDiT2DModel", "SD3Transformer2DModel", "WanAnimate2Transformer3DModel"])
def test_a_model_is_left_alone_and_its_tape_gives_its_bits(name: str) -> None:
    case = CASES[name]
    model = case.build()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    tape = find_tape(model, (), case.inputs(1), 64)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert tape.layers, tape.problem
    seen = live(model, tape.layers, lambda: case.run(model, 2))
    assert is_same(tape, play(tape, model, (), case.inputs(2)), seen)


# ---------------------------------------------------------------------------------------------- what is on the tape


class Embedder(nn.Module):
    """A time embedding that writes in place, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.act = nn.SiLU(inplace=True)
        self.scale = torch.tensor([3.0])
        self.register_buffer("shift", torch.tensor([0.5]))

    def forward(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        angles = timestep[:, None].float() * torch.arange(16, device=timestep.device)
        embedding = torch.zeros(len(timestep), 32, device=timestep.device)
        embedding[:, ::2] = angles.sin()
        torch.cos(angles, out=embedding[:, 1::2])
        embedding.mul_(self.scale).add_(self.shift)
        return self.act(self.first(embedding.to(dtype)))


class Toy(nn.Module):
    """Blocks with a modulation each."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedder = Embedder()
        self.mods = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        temb = self.embedder(timestep, hidden_states.dtype)
        for mod, layer in zip(self.mods, self.layers, strict=True):
            way = self.way if mod is self.mods[1] else Toy.way
            scale, shift = way(mod, temb, hidden_states).chunk(2, -1)
            hidden_states = hidden_states + layer(hidden_states * scale[:, None] + shift[:, None])
        return hidden_states

    @staticmethod
    def way(mod: nn.Module, temb: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """How the second modulation is called."""
        modulation: torch.Tensor = mod(temb)
        return modulation


def toy(way: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> Toy:
    model = Toy()
    vars(model)["way"] = way
    return model


def inputs(time: float = 500.0, batch: int = 2) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.randn(batch, 5, 64), "timestep": torch.full((batch,), time)}


def search(model: nn.Module, **kwargs: Any) -> Tape:
    return find_tape(model, (), kwargs or inputs(), 64)


def test_in_place_writes_attributes_and_buffers_are_on_the_tape() -> None:
    model = Toy()
    tape = search(model)
    assert set(tape.layers) == {"embedder.first", "mods.0", "mods.1", "mods.2"}
    assert tape.inputs == (1,)
    other = inputs(70.0)
    with torch.no_grad():
        seen = live(model, tape.layers, lambda: model(**other))
    assert is_same(tape, play(tape, model, (), other), seen)


def test_several_steps_are_played_at_once_and_their_forms_are_known_beforehand() -> None:
    model = toy(lambda mod, temb, x: mod(temb + model.embedder.shift.add_(1)))
    tape = search(model)
    for call, (given, outputs) in zip(tape.layer_calls, play(tape, model, (), inputs(), steps=3), strict=True):
        assert len(given) == len(outputs) == 3
        assert torch.equal(outputs[0], outputs[2])
        assert call.returns == (outputs[0].shape, outputs[0].dtype)
        assert call.returns.num_bytes == outputs[0].nbytes
        assert list(call.given) == [(tensor.shape, tensor.dtype) for tensor in given[0]]
    assert torch.equal(model.embedder.shift, torch.tensor([0.5])), "playing writes into nothing of the model"


def autocast(mod: nn.Module, temb: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mod(temb).float()


class Own(nn.Linear):
    """A layer with a state of its own."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


WAYS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sees the sample": lambda mod, temb, x: mod(temb + x.mean(1)),
    "random": lambda mod, temb, x: mod(temb + torch.randn_like(temb)),
    "called twice, once with the sample": lambda mod, temb, x: mod(temb) + mod(x[:, 0]),
    "its weight is read": lambda mod, temb, x: mod(temb) * mod.weight.sum(),
    "its place is read": lambda mod, temb, x: mod(temb.to(mod.weight.device)),
    "autocast": autocast,
}


@pytest.mark.parametrize("way", [*WAYS, "a class of its own"])
def test_a_layer_that_does_not_qualify_is_left_out(way: str) -> None:
    model = toy(WAYS.get(way, Toy.way))
    if way not in WAYS:
        model.mods[1] = Own(64, 128)
    tape = search(model)
    assert set(tape.layers) == {"embedder.first", "mods.0", "mods.2"}


@pytest.mark.parametrize(
    "write",
    [lambda temb, x: temb.add_(x.mean(1)), lambda temb, x: temb.view(-1)[:5].copy_(x[0, :, 0])],
    ids=["in place", "through a view"],
)
def test_what_the_sample_is_written_into_is_unknown_from_then_on(write: Any) -> None:
    tape = search(toy(lambda mod, temb, x: mod((write(temb, x), temb)[1])))
    assert set(tape.layers) == {"embedder.first", "mods.0"}


def test_outputs_that_are_large_do_not_qualify(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(Toy(), **inputs(batch=32)).layers == ()
    monkeypatch.setattr(time_only, "SMALL_OUTPUT", 1.0)
    assert search(Toy(), **inputs(batch=32)).layers


def test_why_nothing_was_searched_is_said() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in find_tape(Toy(), (), inputs(), 64).problem
    assert "item" in find_tape(toy(lambda mod, temb, x: mod(temb) * float(mod(temb).sum())), (), inputs(), 64).problem


def test_inference_mode_and_bfloat16() -> None:
    model = Toy().to(torch.bfloat16)
    with torch.inference_mode():
        given = {name: tensor.to(torch.bfloat16) for name, tensor in inputs(300.0).items()}
        tape = search(model, **given)
        assert is_same(tape, play(tape, model, (), given), live(model, tape.layers, lambda: model(**given)))
    assert not any(parameter.is_inference() for parameter in model.parameters())
