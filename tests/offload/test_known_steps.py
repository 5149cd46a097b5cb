"""Steps are found by the bits of what the model is given, as long as the weights are what they were."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from samovar.core.tensor_parts import bits
from samovar.offload import HostStage, time_layers
from samovar.offload.time_layers import KnownSteps, SeenWeights, key_of
from samovar.trace.time_only import find_tape

from .foreseen import count_small_layers
from .test_never_lost import EDITS
from .test_time_layers import Toy


@pytest.fixture(autouse=True)
def _small_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    count_small_layers(monkeypatch)


def at(time: float) -> torch.Tensor:
    return torch.full((2,), time)


def known_of(model: Toy) -> tuple[KnownSteps, Callable[[list[float]], torch.Tensor]]:
    tape = find_tape(model, (), {"hidden_states": torch.ones(2, 5, 64), "timestep": at(500.0)}, 64).tape
    assert tape is not None
    parts = dict(model.named_modules())
    known = KnownSteps(tape, [id(parts[path]) for path in tape.layers])

    @contextlib.contextmanager
    def fetch(path: str) -> Iterator[nn.Module]:
        yield parts[path]

    @torch.no_grad()
    def compute(times: list[float]) -> torch.Tensor:
        steps = [[at(time)] for time in times]
        return known.compute(model, steps, fetch, HostStage())

    return known, compute


def key(time: float) -> torch.Tensor:
    return key_of([at(time)])


def test_each_step_has_the_outputs_of_its_own_time() -> None:
    model = Toy()
    known, compute = known_of(model)
    assert known.find(key(3.0)) is None
    compute([1.0, 2.0, 3.0])
    compute([4.0])
    last = known.tape.layers.index("blocks.2.mod")
    for time in (1.0, 2.0, 3.0, 4.0):
        row = known.find(key(time))
        assert row is not None
        with torch.no_grad():
            temb = model.embedder((at(time)[:, None] * torch.arange(1, 9)).sin())
            assert torch.equal(known.inputs[last][0].view(row), temb)
            assert torch.equal(known.outputs[last].view(row), model.blocks[2].mod(temb))
    assert known.find(key(5.0)) is None
    assert known.find(key(-0.0)) is None


def test_layers_that_are_given_the_same_are_of_a_kind() -> None:
    known, compute = known_of(Toy())
    compute([1.0])
    kinds = dict(zip(known.tape.layers, known.kinds, strict=True))
    assert kinds["blocks.0.mod"] == kinds["blocks.1.mod"] == kinds["blocks.2.mod"] != kinds["embedder"]


def test_guesses_that_fail_in_a_row_are_given_up_until_one_holds() -> None:
    known, compute = known_of(Toy())
    compute([1.0])
    assert known.is_guessing
    for time in (2.0, 3.0):
        known.find(key(time))
    assert not known.is_guessing
    known.find(key(1.0))
    assert known.is_guessing


def test_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    known, compute = known_of(Toy())
    row = compute([1.0])
    monkeypatch.setattr(time_layers, "_MAX_KEPT", 3 * row.numel())
    compute([2.0, 3.0])
    compute([4.0])
    assert [known.find(key(time)) is None for time in (1.0, 2.0, 3.0, 4.0)] == [True, False, False, False]
    compute([5.0, 6.0, 7.0, 8.0])  # A run that is longer is kept nevertheless.
    assert known.find(key(8.0)) is not None


@pytest.mark.parametrize("is_new_run", [False, True])
@pytest.mark.parametrize("edit", [*EDITS, "tiny"])
def test_weights_that_change_are_seen(edit: str, is_new_run: bool) -> None:
    layer = nn.Linear(64, 64).to(torch.bfloat16)
    seen = SeenWeights([layer])
    assert seen.are_same(is_new_run=is_new_run)
    if edit == "tiny":  # As much as a weak adapter that is fused: most numbers round to what they were.
        layer.weight.data += 2e-4 * torch.randn(64, 64)
    else:
        EDITS[edit](layer)
    assert not seen.are_same(is_new_run=is_new_run or edit == "tiny")


def test_a_weight_that_is_no_plain_block_is_seen_too() -> None:
    layer = nn.Linear(16, 16)
    layer.weight = nn.Parameter(torch.randn(16, 16).T)
    seen = SeenWeights([layer])
    assert seen.are_same(is_new_run=True)
    layer.weight.data.mul_(1.5)
    assert not seen.are_same(is_new_run=False)


def test_bits_tell_zeros_apart_and_nan_equals_itself() -> None:
    nan, zeros = torch.tensor([float("nan")]), torch.tensor([0.0, -0.0])
    assert torch.equal(bits(nan), bits(nan.clone()))
    assert not torch.equal(bits(zeros[:1]), bits(zeros[1:]))
    assert torch.equal(bits(torch.ones(1).expand(3)), bits(torch.ones(3)))
    assert bits(torch.tensor(1.0, dtype=torch.float64)).numel() == 8


def test_a_counted_change_of_a_wrapper_is_seen() -> None:
    library = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)
    library.quantize_(layer, library.Int8WeightOnlyConfig())
    seen = SeenWeights([layer])
    assert seen.are_same(is_new_run=True)
    with torch.no_grad():
        layer.weight.copy_(copy.deepcopy(layer.weight))  # The same values, so that no sample differs.
    assert not seen.are_same(is_new_run=False)
    seen = SeenWeights([layer])
    layer.weight.qdata.data.add_(1)  # Nobody counts this.
    assert not seen.are_same(is_new_run=True)
