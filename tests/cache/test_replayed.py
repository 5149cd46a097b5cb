"""Steps of a cache that are replayed in two parts: the same decisions, the same bits, whatever is refused."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driving import case, stepped

import zoo
from samovar.cache import AutoConfig, TeaCacheConfig, apply_teacache_hook
from samovar.cache import step as step_module
from samovar.cache.decision import Signal
from samovar.cache.pace import Pace
from samovar.graphs import apply_graphs, forms
from samovar.graphs.forms import Places
from samovar.graphs.snapshot import Snapshot
from samovar.hooks import HookRegistry, call_context
from simulated import SimulatedRecorder, recording_by

NAMES = (
    "FluxTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "Lumina2Transformer2DModel",
    "LTXVideoTransformer3DModel",
)
"""The second and third have blocks before the one that leads."""
SETTINGS: dict[str, dict[str, Any]] = {
    "reuse": {}, "linear": {"forecast": "linear"}, "output": {"forecast": "linear", "forecast_of": "output"},
    "schedule": {"schedule": "##.#..#.##.#"},
}  # fmt: skip
STEPS = 12


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with recording_by(SimulatedRecorder(), torch.device("cpu")):
        yield


def drive(model: torch.nn.Module, which: zoo.Case, settings: dict[str, Any], runs: int = 2) -> tuple[Any, list[str]]:
    guards = {} if "schedule" in settings else {"rel_l1_thresh": 0.15, "min_steps": 0, "coefficients": (0, 0, 0, 1, 0)}
    hook = apply_teacache_hook(model, TeaCacheConfig(**guards, **settings))
    outputs, masks = [], []
    for _ in range(runs):
        hook.reset_state(model)
        with stepped(model, STEPS) as loop, call_context(branch="only"):
            outputs += [loop.call(lambda step=step: which.run(model, step)) for step in range(STEPS)]  # type: ignore[misc]
        masks.append(hook.stats().branches["only"].mask)
    hook.detach()
    return outputs, masks


def combined() -> list[Any]:
    """All of them; those that add least when there is time."""
    pairs = [(name, settings) for name in NAMES for settings in SETTINGS]
    plain = ("linear", "schedule")
    marks = {pair: [pytest.mark.slow] if pair[0] != NAMES[0] and pair[1] in plain else [] for pair in pairs}
    return [pytest.param(*pair, marks=marks[pair]) for pair in pairs]


@pytest.mark.parametrize(("name", "settings"), combined())
def test_the_same_decisions_and_bits(name: str, settings: str) -> None:
    which = case(name)
    model = which.build()
    expected, masks = drive(model, which, SETTINGS[settings])
    assert all("." in mask for mask in masks)
    with apply_graphs(model) as graphs:
        found, their_masks = drive(model, which, SETTINGS[settings])
    assert their_masks == masks
    assert [zoo.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)
    assert graphs.stats().replayed > 0
    assert not graphs.stats().reasons


@pytest.mark.parametrize("settings", ["schedule", "linear"])
def test_every_step_is_replayed_once_all_forms_are_known(settings: str) -> None:
    """Those too that are skipped with a forecast of their residuals."""
    which = case("FluxTransformer2DModel")
    model, given = which.build(), SETTINGS["schedule"] | SETTINGS[settings]
    with apply_graphs(model) as graphs:
        hook = apply_teacache_hook(model, TeaCacheConfig(**given))
        for _ in range(2):
            before = graphs.stats()
            hook.reset_state(model)
            with stepped(model, STEPS) as loop, call_context(branch="only"):
                for step in range(STEPS):
                    loop.call(lambda step=step: which.run(model, step))  # type: ignore[misc]
        assert (graphs.stats().replayed - before.replayed, graphs.stats().run) == (STEPS, before.run)
        hook.detach()


def test_what_is_stored_is_copied_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    which = case("FluxTransformer2DModel")
    model, copied = which.build(), list[int]()
    plain = forms.copy_each
    monkeypatch.setattr(forms, "copy_each", lambda to, what: (copied.append(len(what)), plain(to, what))[1])
    with apply_graphs(model):
        hook = apply_teacache_hook(model, TeaCacheConfig(schedule="##..##..."))
        counts = []
        with stepped(model, 9) as loop, call_context(branch="only"):
            for step in range(9):
                copied.clear()
                loop.call(lambda step=step: which.run(model, step))  # type: ignore[misc]
                counts.append(sum(copied))
        assert counts[6] > counts[7] == counts[8] > 0, "the residuals of the last computed step"
        hook.detach()


@pytest.mark.parametrize("how", ["schedule", "signal"])
def test_a_skipped_step_looks_at_the_blocks_only_for_its_signal(how: str) -> None:
    which = case("FluxTransformer2DModel")
    model = which.build()
    by_signal: dict[str, Any] = {"rel_l1_thresh": 1e9, "min_steps": 0, "max_skips": None, "first_steps": 3}
    with apply_graphs(model) as graphs, stepped(model, STEPS) as loop, call_context(branch="only"):
        hook = apply_teacache_hook(
            model, TeaCacheConfig(**({"schedule": "##.........."} if how == "schedule" else by_signal))
        )
        replayed = []
        for step in range(8):
            if step in (6, 7):  # First a block that does not run, then the one that the signal is read from.
                model.transformer_blocks[7 - step].note = step
            before = graphs.stats().replayed
            loop.call(lambda step=step: which.run(model, step))  # type: ignore[misc]
            replayed.append(graphs.stats().replayed - before)
        assert replayed[5:] == ([1, 1, 1] if how == "schedule" else [1, 1, 0])
        hook.detach()


class Refuses:
    """A recorder that replays nothing."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, what: Any, function: Any, given: Any, idle: Any = ()) -> Any:
        self.asked.append(what)
        return function(given)

    def ahead(self, what: Any, given: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def refuses(self, what: Any) -> bool:
        return what in self.asked


def test_what_is_refused_is_taken_as_without_graphs() -> None:
    which = case("FluxTransformer2DModel")
    model = which.build()
    expected, masks = drive(model, which, SETTINGS["reuse"])
    hooked = apply_graphs(model)
    recorder = HookRegistry.get_or_create(model).recorder = Refuses()
    found, their_masks = drive(model, which, SETTINGS["reuse"])
    assert their_masks == masks
    assert [zoo.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)
    assert len(recorder.asked) == len(set(recorder.asked)) == 2, "each is asked for once"
    hooked.detach()


def test_changed_weights_end_a_history() -> None:
    which = case("FluxTransformer2DModel")
    model = which.build()
    with apply_graphs(model):
        hook = apply_teacache_hook(model, TeaCacheConfig(rel_l1_thresh=1e9, min_steps=0, max_skips=None, last_steps=0))
        with stepped(model, STEPS) as loop, call_context(branch="only"):
            for step in range(8):
                if step == 6:
                    with torch.no_grad():
                        model.transformer_blocks[0].norm1.linear.weight.mul_(2)
                loop.call(lambda step=step: which.run(model, step))  # type: ignore[misc]
        assert hook.stats().branches["only"].mask == "#.....#."
        hook.detach()


@pytest.mark.parametrize("cache", ["signal", "auto"])
def test_a_computed_step_is_prepared_before_the_device_is_waited_for(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a step is launched that was decided upon, its inputs are in place and its weights have been looked at."""
    which = case("FluxTransformer2DModel")
    model = which.build()
    seen: list[str] = []

    def noting(owner: Any, name: str) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (seen.append(name), plain(*args, **kwargs))[1])

    config = TeaCacheConfig(rel_l1_thresh=1e-30, min_steps=0, last_steps=0) if cache == "signal" else AutoConfig(1e-30)
    with apply_graphs(model), stepped(model, STEPS) as loop, call_context(branch="only"):
        hook = apply_teacache_hook(model, config)
        for step in range(8):
            loop.call(lambda step=step: which.run(model, step))  # type: ignore[misc]
        waits = "measure" if cache == "signal" else "_drifts"
        noting(step_module if cache == "signal" else Pace, waits)
        noting(Places, "fill")
        noting(Snapshot, "is_in_place")
        loop.call(lambda: which.run(model, 8))
        hook.detach()
    decided = seen.index(waits)
    assert seen[:decided].count("fill") == 2, "the computed one's, and those of what decides"
    assert seen[decided + 1 :] == []


def test_what_decides_is_recorded_once() -> None:
    """With all steps that it looks at. There are fewer but once in a run, and graphs are limited in number."""
    which = case("FluxTransformer2DModel")
    model = which.build()
    with apply_graphs(model) as graphs:
        hook = apply_teacache_hook(model, AutoConfig(1e-30))
        for _ in range(3):
            hook.reset_state(model)
            with stepped(model, STEPS) as loop, call_context(branch="only"):
                for step in range(STEPS):
                    loop.call(lambda step=step: which.run(model, step))  # type: ignore[misc]
        assert graphs.stats().recorded == 2, "the forward, and what decides"
        assert not graphs.stats().reasons
        hook.detach()


def test_a_run_keeps_no_signals_but_the_last() -> None:
    """One may know how much it differs from the one before; it does not keep that one alive, nor all before it."""
    which = case("FluxTransformer2DModel")
    model = which.build()
    plain: dict[str, Any] = {"coefficients": (0, 0, 0, 1, 0), "min_steps": 0, "last_steps": 0, "max_skips": None}

    def alive() -> int:
        gc.collect()
        return sum(type(one) is Signal for one in gc.get_objects())

    with apply_graphs(model) as graphs:
        known = alive()
        hook = apply_teacache_hook(model, TeaCacheConfig(rel_l1_thresh=1e9, first_steps=4, **plain))
        with stepped(model, STEPS) as loop, call_context(branch="only"):
            for step in range(STEPS):
                loop.call(lambda step=step: which.run(model, step))  # type: ignore[misc]
            assert alive() == known + 1
        assert graphs.stats().replayed > 3
        hook.detach()
