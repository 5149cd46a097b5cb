"""Graphs on pipelines: the bits of the same run without them, with every cache, and every change is seen.

On a CPU a list of operations stands for a graph (`tests/simulated.py`). The tests marked `gpu` run the
real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compose.matrix import footprint, num_hooks
from pipelines import PIPELINES, TinyPipeline
from ranks import Ranks
from samovar import attach
from samovar.core.errors import SettingError
from samovar.graphs import recorders
from samovar.parallel import SequenceParallelConfig
from simulated import SimulatedRecorder, recording_by

STEPS = 10
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CACHES: dict[str, Any] = {
    "none": None,
    "signal": {"backend": "tea_cache", "rel_l1_thresh": 0.3, "min_steps": 1},
    "schedule": {"backend": "tea_cache", "schedule": "##.##.#.##"},
    "outputs": {"backend": "tea_cache", "schedule": "##.##.#.##", "forecast": "linear", "forecast_of": "output"},
    "auto": {"backend": "auto", "tolerance": 1e6},
}


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with recording_by(SimulatedRecorder(), torch.device("cpu")):
        yield


def built(name: str, device: str) -> tuple[TinyPipeline, Any]:
    tiny = PIPELINES[name]
    return tiny, tiny.build(0).to(device)


def masks(attached: Any) -> list[str]:
    stats = attached.stats().cache
    return [] if stats is None else [b.mask for one in stats.denoisers.values() for b in one.branches.values()]


COMBINED = [
    *(("flux", cache) for cache in CACHES),
    *((name, "signal") for name in ("qwen-image", "sd3", "wan", "flux-controlnet", "ltx")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("z-image", "schedule"), ("flux2-klein", "none"))),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "cache"), COMBINED)
def test_bits_of_the_same_run_without_graphs(name: str, cache: str, device: str) -> None:
    tiny, pipe = built(name, device)
    tiny.run(pipe, 1)
    before = footprint(pipe)
    with attach(pipe, cache=CACHES[cache]) as attached:
        expected = [tiny.run(pipe, STEPS, seed) for seed in (0, 1)]
        computed = masks(attached)
    attached = attach(pipe, cache=CACHES[cache], compile="graphs")
    found = [tiny.run(pipe, STEPS, seed) for seed in (0, 1)]
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True, True]
    assert masks(attached) == computed
    stats = attached.stats().graphs
    is_whole = cache in ("none", "outputs", "forecast", "auto")  # Others answer for blocks inside of their forwards.
    assert all((one.replayed > 1) == is_whole and not one.reasons for one in stats.values()), stats
    attached.detach()
    assert footprint(pipe) == before
    assert num_hooks(pipe) == 0
    assert attached.stats().graphs == stats, "the figures stay"


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_callback_holds_is_not_overwritten(device: str) -> None:
    tiny, pipe = built("flux", device)
    held: list[tuple[Any, Any]] = []
    with attach(pipe, compile="graphs"):
        original = pipe.scheduler.step

        def step(output: Any, *args: Any, **kwargs: Any) -> Any:
            held.append((output, output.clone()))
            return original(output, *args, **kwargs)

        pipe.scheduler.step = step
        tiny.run(pipe, 6, true_cfg_scale=1.0)
    assert len(held) == 6
    assert all(torch.equal(one, copy) for one, copy in held)
    assert len({one.data_ptr() for one, _ in held}) == 6


@pytest.mark.parametrize("device", DEVICES)
def test_other_sizes_and_batches_are_other_graphs(device: str) -> None:
    tiny, pipe = built("sd3", device)
    sizes = [{}, {"height": 32}, {"prompt": ["a cat", "a dog"], "negative_prompt": ["x", "y"]}]
    expected = [tiny.run(pipe, 4, **size) for size in sizes]
    for settings, counts in (({}, (3, 6, 18)), ({"max_graphs": 1}, (1, 18, 6))):
        with attach(pipe, compile={"backend": "graphs", **settings}) as attached:
            for _ in range(2):
                assert all(torch.equal(tiny.run(pipe, 4, **s), e) for s, e in zip(sizes, expected, strict=True))
            stats = attached.stats().graphs["transformer"]
            limit = "there are 1 graphs already (max_graphs=1)" in str(attached.explain())
        assert ((stats.recorded, stats.run, stats.replayed), limit) == (counts, bool(settings))


def test_graphs_of_compiled_blocks() -> None:
    tiny, pipe = built("flux", "cpu")
    tiny.run(pipe, 1)
    before = footprint(pipe)
    with attach(pipe, compile="aot_eager"):
        expected = tiny.run(pipe, 6)
    with attach(pipe, compile={"backend": "graphs", "blocks": "aot_eager"}) as attached:
        assert [torch.equal(tiny.run(pipe, 6), expected) for _ in range(2)] == [True, True]
        assert attached.stats().graphs["transformer"].replayed > 6
        assert "5 blocks" in str(attached.explain())
        assert "by aot_eager" in str(attached.explain())
    assert footprint(pipe) == before


def test_streamed_blocks_run_with_the_reason() -> None:
    tiny, pipe = built("flux", "cpu")
    expected = tiny.run(pipe, 4)
    with attach(pipe, compile="graphs", offload={"mode": "layerwise", "device": "cpu"}) as attached:
        assert torch.equal(tiny.run(pipe, 4), expected)
        assert attached.stats().graphs["transformer"].replayed == 0
        assert "its weights are streamed" in str(attached.explain())


def _on_two_ranks(parallel: Any) -> tuple[bool, int, str]:
    """Whether graphs leave the bits, how many calls they replay, and what is said about it."""
    tiny, pipe = built("flux", "cpu")
    with attach(pipe, parallel=parallel):
        expected = [tiny.run(pipe, 6, seed) for seed in (0, 1)]
    with (
        recording_by(SimulatedRecorder(), torch.device("cpu")),
        attach(pipe, parallel=parallel, compile="graphs") as attached,
    ):
        found = [tiny.run(pipe, 6, seed) for seed in (0, 1)]
        same = all(map(torch.equal, found, expected))
        return same, attached.stats().graphs["transformer"].replayed, str(attached.explain())


@pytest.mark.parametrize(
    "parallel",
    [SequenceParallelConfig(ulysses_degree=2), pytest.param({"cfg_parallel_size": 2}, marks=pytest.mark.slow)],
)
def test_ranks_run_with_the_reason(parallel: Any, ranks: Ranks) -> None:
    for same, replayed, explained in ranks.call(_on_two_ranks, parallel, limit_s=300.0):
        assert (same, replayed) == (True, 0)
        assert "ranks exchange tensors inside its forward" in explained


def test_components_that_take_turns_are_recorded_where_they_are() -> None:
    tiny, pipe = built("flux", "cpu")
    expected = tiny.run(pipe, 6)
    with attach(pipe, compile="graphs", offload={"mode": "model", "device": "cpu"}) as attached:
        assert [torch.equal(tiny.run(pipe, 6), expected) for _ in range(3)] == [True] * 3
        stats = attached.stats().graphs["transformer"]
    assert stats.replayed >= 24
    assert not stats.reasons


def test_unknown_settings_are_refused() -> None:
    _, pipe = built("sd3", "cpu")
    with pytest.raises(SettingError, match="max_graphs=0; expected a whole number"):
        attach(pipe, compile={"backend": "graphs", "max_graphs": 0})
    with pytest.raises(SettingError, match="max_graph"):
        attach(pipe, compile={"backend": "graphs", "max_graph": 3})
    with pytest.raises(SettingError, match="expected settings of graphs"):
        attach(pipe, compile={"max_graphs": 3})
    with pytest.raises(SettingError, match="Did you mean 'graphs'"):
        attach(pipe, compile="graph")
    attach(pipe, compile="graphs").detach()


def test_without_a_gpu_it_says_that_there_is_nothing_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(recorders._recorders, torch.device("cpu"))
    tiny, pipe = built("sd3", "cpu")
    expected = tiny.run(pipe, 3)
    with attach(pipe, compile="graphs") as attached:
        assert torch.equal(tiny.run(pipe, 3), expected)
        assert "not replayed: there are no graphs on cpu" in str(attached.explain())
