"""What nobody reads is not recorded, and nothing else is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zoo
from samovar.cache import TeaCacheConfig, apply_teacache_hook
from samovar.graphs import apply_graphs
from samovar.graphs.forms import has_same_bits
from samovar.graphs.spared import Spared
from simulated import SimulatedRecorder

CASES = {case.id: case for case in zoo.load()}


def recorded(function: Callable[[], Any], *given: torch.Tensor) -> tuple[list[str], Any]:
    """The operations that are left, and what answers for others. A replay gives what the function gives, also of other
    numbers."""
    expected, spared = function(), Spared(function)
    assert has_same_bits(Spared(function).run(), expected), "also where nobody holds what is computed on the way"
    recording = SimulatedRecorder().record(spared.run)
    recording.replay()
    assert has_same_bits(recording.output, expected)
    for tensor in given:
        tensor.copy_(torch.rand_like(tensor))
    recording.replay()
    assert not has_same_bits(recording.output, expected)
    assert has_same_bits(recording.output, function())
    names = [str(done[0]).split(".")[1] for done in recording.replay.__self__._done]  # type: ignore[attr-defined]
    return names, spared


def test_what_nobody_reads_is_left_out() -> None:
    given, other = torch.randn(4, 4), torch.randn(4, 4)

    def function() -> Any:
        unread = (other.sin() @ other).view(2, 8).cos()
        return given.exp(), {"more": [given.view(16)[:8] * 2]}, unread.shape

    names, spared = recorded(function, given, other)
    assert not {"sin", "mm", "cos"} & set(names)
    assert {"exp", "mul"} <= set(names)
    assert given.untyped_storage()._cdata in spared.live
    assert other.untyped_storage()._cdata not in spared.live


def test_what_is_the_same_each_time_is_computed_once() -> None:
    given, weight = torch.randn(4), torch.nn.Parameter(torch.randn(4), requires_grad=False)
    names, spared = recorded(lambda: given * (torch.arange(4).float() * 2).exp() + weight.cos(), given, weight)
    assert [name for name in names if name != "detach"] == ["mul", "cos", "add"]
    assert len(spared.constants) == 1


def test_what_is_written_in_place_stays() -> None:
    given = torch.randn(4)

    def function() -> Any:
        counter, filled = torch.zeros(4), torch.empty(4)
        counter += given
        filled.copy_(given)
        own = given * 2
        copy = own.clone()
        own.add_(1)
        return (counter * 2 + 1) * 3, filled * 1, own * copy

    names, _ = recorded(function, given)
    assert {"zeros", "add_", "empty", "copy_", "clone"} <= set(names)


def test_copies_that_nobody_writes_into_are_not_made() -> None:
    given = torch.randn(4, 4)

    def function() -> Any:
        own = given * 2
        return own.clone() + 1, given.clone() + 1, own.t().clone(memory_format=torch.contiguous_format) + 1, own.clone()

    names, _ = recorded(function, given)
    assert names.count("clone") == 3, "one is of an input, one has another form, and one is returned"


def test_a_function_that_does_something_else_is_seen() -> None:
    calls: list[int] = []

    def function() -> Any:
        calls.append(1)
        return torch.ones(2).sin() if len(calls) == 1 else torch.ones(2).cos()

    spared = Spared(function)
    with pytest.raises(RuntimeError, match="was not called here before"):
        spared.run()


class Hidden(torch.nn.Module):
    """Reads a tensor where no operation shows it, as kernels of other packages do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = x.sin().numpy()
        return x + float(numbers[0] != numbers[0])


def test_what_is_read_unseen_shows_in_the_output() -> None:
    given, model = torch.randn(4), Hidden()
    assert not torch.equal(Spared(lambda: model(given)).run(), model(given))


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel"])
def test_skipped_steps_have_fewer_operations_and_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, counts = CASES[name], list[int]()
    record = SimulatedRecorder.record

    def counted(self: Any, function: Callable[[], Any]) -> Any:
        recording: Any = record(self, function)
        counts.append(len(recording.replay.__self__._done))
        return recording

    def outputs(model: Any) -> list[Any]:
        hook = apply_teacache_hook(model, TeaCacheConfig(schedule="##......"))
        found = []
        with torch.no_grad():
            for step in range(8):
                with model.cache_context("cond"):
                    found.append(case.run(model, step))
        assert hook.stats().branches["cond"].mask == "##......"
        hook.detach()
        return found

    monkeypatch.setattr(SimulatedRecorder, "record", counted)
    expected = outputs(case.build())
    model = case.build()
    with apply_graphs(model) as graphs:
        assert has_same_bits(outputs(model), expected)
        assert graphs.stats().replayed >= 4
    spared, counts[:] = min(counts), []
    monkeypatch.setattr("samovar.graphs.replayer.is_compiled", lambda module: True)  # Then nothing is left out.
    model = case.build()
    with apply_graphs(model):
        assert has_same_bits(outputs(model), expected)
    assert spared < min(counts)
