"""A tape, played at another step, gives the inputs and outputs of the model's own layers, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
    tape, problem = find_tape(model, (), case.inputs(1), 64)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert tape is not None, problem
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
            scale, shift = self.modulate(mod, temb, hidden_states).chunk(2, -1)
            hidden_states = hidden_states + layer(hidden_states * scale[:, None] + shift[:, None])
        return hidden_states

    def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return mod(temb)


def inputs(time: float = 500.0, batch: int = 2) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.randn(batch, 5, 64), "timestep": torch.full((batch,), time)}


def search(model: nn.Module, **kwargs: Any) -> Tape | None:
    return find_tape(model, (), kwargs or inputs(), 64).tape


def test_in_place_writes_attributes_and_buffers_are_on_the_tape() -> None:
    model = Toy()
    tape = search(model)
    assert tape is not None
    assert set(tape.layers) == {"embedder.first", "mods.0", "mods.1", "mods.2"}
    assert tape.inputs == (1,)
    other = inputs(70.0)
    with torch.no_grad():
        seen = live(model, tape.layers, lambda: model(**other))
    assert is_same(tape, play(tape, model, (), other), seen)


def test_several_steps_are_played_at_once_and_their_forms_are_known_beforehand() -> None:
    model = Toy()
    tape = search(model)
    assert tape is not None
    for call, (given, outputs) in zip(tape.layer_calls, play(tape, model, (), inputs(), steps=3), strict=True):
        assert len(given) == len(outputs) == 3
        assert torch.equal(outputs[0], outputs[2])
        assert call.returns == (outputs[0].shape, outputs[0].dtype)
        assert call.returns.num_bytes == outputs[0].nbytes
        assert list(call.given) == [(tensor.shape, tensor.dtype) for tensor in given[0]]


class Keeping(Toy):
    """Writes into a buffer on the way to a layer."""

    def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return mod(temb + self.embedder.shift.add_(1))


def test_playing_writes_into_nothing_of_the_model() -> None:
    model = Keeping()
    tape = search(model)
    assert tape is not None
    play(tape, model, (), inputs(), steps=2)
    assert torch.equal(model.embedder.shift, torch.tensor([0.5]))


class Sees(Toy):
    """One of the modulations sees the sample."""

    def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return mod(temb + hidden_states.mean(1) if mod is self.mods[1] else temb)


class SeesInPlace(Toy):
    """The same by a write into the embedding, from then on."""

    def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if mod is self.mods[1]:
            temb += hidden_states.mean(1)
        return mod(temb)


class SeesThroughAView(Toy):
    def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if mod is self.mods[1]:
            temb.view(-1)[:5].copy_(hidden_states[0, :, 0])
        return mod(temb)


class Noisy(Toy):
    def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return mod(temb + torch.randn_like(temb) if mod is self.mods[1] else temb)


class Twice(Toy):
    """A layer that also has a look at the sample."""

    def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return mod(temb) + (mod(hidden_states[:, 0]) if mod is self.mods[1] else 0)


class ReadsWeight(Toy):
    def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return mod(temb) * (mod.weight.sum() if mod is self.mods[1] else 1)


class AsksWhere(Toy):
    def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return mod(temb.to(mod.weight.device) if mod is self.mods[1] else temb)


class Autocasts(Toy):
    def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mod is self.mods[1]):
            return mod(temb).float()


class Own(nn.Linear):
    """A layer with a state of its own."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class HasOwn(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.mods[1] = Own(64, 128)


@pytest.mark.parametrize("cls", [Sees, Noisy, Twice, ReadsWeight, AsksWhere, Autocasts, HasOwn])
def test_a_layer_that_does_not_qualify_is_left_out(cls: type[Toy]) -> None:
    model = cls()
    tape = search(model)
    assert tape is not None
    assert set(tape.layers) == {"embedder.first", "mods.0", "mods.2"}


@pytest.mark.parametrize("cls", [SeesInPlace, SeesThroughAView])
def test_what_the_sample_is_written_into_is_unknown_from_then_on(cls: type[Toy]) -> None:
    tape = search(cls())
    assert tape is not None
    assert set(tape.layers) == {"embedder.first", "mods.0"}


def test_outputs_that_are_large_do_not_qualify(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(Toy(), **inputs(batch=32)) is None
    monkeypatch.setattr(time_only, "SMALL_OUTPUT", 1.0)
    assert search(Toy(), **inputs(batch=32)) is not None


def test_nothing_is_searched_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        tape, problem = find_tape(Toy(), (), inputs(), 64)
    assert tape is None
    assert "autocast" in problem


def test_a_model_that_cannot_be_rehearsed_says_why() -> None:
    class Reads(Toy):
        def modulate(self, mod: nn.Module, temb: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
            return mod(temb) * float(mod(temb).sum())

    tape, problem = find_tape(Reads(), (), inputs(), 64)
    assert tape is None
    assert "item" in problem


def test_inference_mode_and_bfloat16() -> None:
    model = Toy().to(torch.bfloat16)
    with torch.inference_mode():
        given = {name: tensor.to(torch.bfloat16) for name, tensor in inputs(300.0).items()}
        tape = search(model, **given)
        assert tape is not None
        assert is_same(tape, play(tape, model, (), given), live(model, tape.layers, lambda: model(**given)))
    assert not any(parameter.is_inference() for parameter in model.parameters())
