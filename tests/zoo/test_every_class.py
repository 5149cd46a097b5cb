"""Everything that works with any model, on every transformer class of the installed diffusers.

Each model is built once, and one after the other is tried in all ways; each way leaves it as it was.
"""

from __future__ import annotations

import contextlib
import json
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import zoo
from offload.foreseen import count_small_layers
from parallel.conftest import OnRanks, on_ranks, started
from samovar.arch import find_anatomy
from samovar.cache import AutoConfig, TeaCacheConfig, TeaCacheHook, apply_teacache_hook
from samovar.core import nested
from samovar.graphs import apply_graphs
from samovar.hooks import call_context, running
from samovar.offload import HostStage, OffloadConfig, apply_offload
from samovar.parallel import enable_sequence_parallel_for_model
from samovar.trace import probe_anatomy
from simulated import SimulatedRecorder, recording_by
from zoo import table, time_shares

__all__ = ["on_ranks", "started"]

CASES = {case.id: case for case in zoo.load()}
STEPS = 4
BLIND = {"PriorTransformer"}
"""Its output is read off a token that is learned: what enters the blocks there does not depend on the sample."""
_NO_TIME = "it has no time embedding"
NOT_AHEAD = {
    "CosmosTransformer3DModel-controlnet": "its controlnet's blocks share their modulations with tokens",
    "DreamLiteTransformer2DModel": _NO_TIME,
    "DualTransformer2DModel": _NO_TIME,
    "HiDreamImageTransformer2DModel": "its experts are chosen by values (bincount)",
    "SanaWMTransformer3DModel": "each token has its own time, and outputs for each take more than the weights",
    "Transformer2DModel": _NO_TIME,
    "TransformerTemporalModel": _NO_TIME,
}
"""Cases in which no layer is found that sees time alone, and why."""
FORESEEN_WRONGLY = {"Cosmos3OmniTransformer"}
"""Cases whose layers are given other values than were foreseen, so that they are computed as without this."""


class Tried:
    """A model, what it gives at some steps, and a loop around it whose scheduler names the step."""

    def __init__(self, case: zoo.Case, device: str = "cpu") -> None:
        self.case, self.transformer, self._device = case, case.build().to(device), device
        self.exact = [self.run(step) for step in range(STEPS)]
        self.scheduler = types.SimpleNamespace(timesteps=list(range(1000)))
        self._parts = self._state()

    def _state(self) -> list[tuple[type, set[str], int]]:
        modules = self.transformer.modules()
        return [(type(m), set(vars(m)), len(m._forward_hooks) + len(m._forward_pre_hooks)) for m in modules]

    def run(self, step: int = 0) -> Any:
        if self._device == "cpu":
            return self.case.run(self.transformer, step)
        with torch.no_grad():
            return self.transformer(
                **nested.map_tensors(lambda tensor: tensor.to(self._device), self.case.inputs(step))
            )

    def is_restored(self) -> bool:
        return self._state() == self._parts and nested.equal(self.run(), self.exact[0])

    @contextlib.contextmanager
    def looping(self) -> Iterator[Callable[[int], Any]]:
        """A run, in which each call is a step, with the inputs of any step."""
        self.scheduler._step_index, self._num_timesteps = -1, 1000
        with running(self):

            def call(step: int) -> Any:
                self.scheduler._step_index += 1
                with call_context(branch="only"):
                    return self.run(step)

            yield call

    @contextlib.contextmanager
    def watching(self, parts: list[torch.nn.Module]) -> Iterator[list[torch.nn.Module]]:
        """The modules among these that run, call by call."""
        calls: list[torch.nn.Module] = []
        handles = [part.register_forward_pre_hook(lambda module, _: calls.append(module)) for part in parts]
        yield calls
        for handle in handles:
            handle.remove()


def installed(case: zoo.Case) -> zoo.Case:
    if case.model not in zoo.exported_classes():
        pytest.skip(f"the installed diffusers has no {case.model}")
    return case


# ------------------------------------------------------------------------------------------------ structure


def check_anatomy(tried: Tried) -> None:
    model, case = tried.transformer, tried.case
    anatomy = probe_anatomy(model, case.inputs(0), case.inputs(1))
    assert table.summary(anatomy) == ([stack[:4] for stack in case.stacks], case.side)
    assert anatomy.leader in [stack.path for stack in case.stacks if {"image", "joint"} & set(stack.kinds)]
    assert {stack.path for stack in anatomy.stacks} <= {stack.path for stack in find_anatomy(model).stacks}
    assert not zoo.equal(*tried.exact[:2]), "the next step differs"


# ------------------------------------------------------------------------------------------------ cache


@contextlib.contextmanager
def cached(tried: Tried, config: TeaCacheConfig | AutoConfig) -> Iterator[TeaCacheHook]:
    """A cache that knows the model: two steps show which arguments change, where their names do not say."""
    hook = apply_teacache_hook(tried.transformer, config)
    with tried.looping() as call:
        for step in range(3):
            call(step)
    hook.reset_state(tried.transformer)
    yield hook
    hook.detach()


def check_a_neutral_cache(tried: Tried) -> None:
    with cached(tried, TeaCacheConfig(rel_l1_thresh=0)), tried.looping() as call:
        assert [zoo.equal(call(step), exact) for step, exact in enumerate(tried.exact)] == [True] * STEPS


def check_a_cache_by_threshold(tried: Tried) -> None:
    case = tried.case
    paths = {stack.path for stack in case.stacks}
    stacks = [stack for stack in find_anatomy(tried.transformer).stacks if stack.path in paths]
    blocks = [block for stack in stacks for block in stack.modules(tried.transformer)]
    config = TeaCacheConfig(rel_l1_thresh=float("inf"), max_skips=None, min_steps=0)
    with cached(tried, config) as hook, tried.watching(blocks) as ran, tried.looping() as call:
        assert zoo.equal(call(0), tried.exact[0]), "a computed step has the model's bits"
        assert ran
        ran.clear()
        skipped = call(0)
        assert hook.stats().branches["only"].mask == "#.", hook.stats()
        assert not ran, "a skipped step runs no block"
        assert difference(skipped, tried.exact[0]) <= 1e-5, "what the blocks did is in what is stored"
        assert case.model in BLIND or not zoo.equal(call(1), skipped), "a skipped step sees its own input"
        hook.reset_state(tried.transformer)
        assert zoo.equal(call(2), tried.exact[2]), "computing after skipping is exact"


def check_a_cache_by_tolerance(tried: Tried) -> None:
    leaves = [module for module in tried.transformer.modules() if not list(module.children())]
    with cached(tried, AutoConfig(1e6)) as hook, tried.watching(leaves) as ran, tried.looping() as call:
        assert [zoo.equal(call(step), tried.exact[step]) for step in range(3)] == [True] * 3
        ran.clear()
        skipped = call(3)
        assert hook.stats().branches["only"].mask == "###.", hook.stats().branches["only"].steps
        assert not ran, "a skipped step runs nothing"
        assert pytree.tree_structure(skipped) == pytree.tree_structure(tried.exact[3])
        assert forms(skipped) == forms(tried.exact[3])
        assert all(tensor.isfinite().all() for tensor in nested.tensors(skipped))


def difference(one: Any, other: Any) -> float:
    """The largest difference of two outputs, in proportion to the largest value."""
    pairs = zip(nested.tensors(one), nested.tensors(other), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def forms(output: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in nested.tensors(output)]


# ------------------------------------------------------------------------------------------------ offload, graphs


def check_streaming(tried: Tried) -> None:
    stacks = find_anatomy(tried.transformer).stacks
    blocks = [block for stack in stacks for block in stack.modules(tried.transformer)]
    settings = OffloadConfig("layerwise", precompute=False)
    # A device that copies late shows what is used too early.
    offloaded = apply_offload(tried, settings, stage=HostStage(lazy=len(tried.case.id) % 2 == 0))
    assert offloaded.plan.component("transformer").streamed == {path for stack in stacks for path in stack.block_paths}
    with running(tried), tried.watching(blocks) as ran:
        for step in range(3):
            before = offloaded.stats()
            ran.clear()
            assert zoo.equal(tried.run(step), tried.exact[step])
        after = offloaded.stats()  # The order is known now: each block comes once, on time, and nothing else does.
        assert after.block_loads - before.block_loads == len(ran)
        assert (after.late_blocks, after.dropped_blocks) == (before.late_blocks, before.dropped_blocks)
    assert after.peak_held_bytes <= offloaded.plan.peak_bytes
    offloaded.detach()
    assert offloaded.stage.stats.held_bytes == 0


def check_layers_that_see_time_alone(tried: Tried) -> None:
    """They are computed ahead of the steps, for the times that the scheduler has."""
    tried.scheduler.timesteps = times_of(tried.case)
    settings = OffloadConfig("layerwise", precompute=True, activations=0)
    with pytest.MonkeyPatch.context() as patch:
        count_small_layers(patch)
        offloaded = apply_offload(tried, settings, stage=HostStage(lazy=True))
        for _ in range(2):
            with running(tried):
                found = [tried.run(step) for step in range(3)]
            assert list(map(zoo.equal, found, tried.exact)) == [True] * 3
    ahead = offloaded.stats().ahead
    offloaded.detach()
    assert bool(ahead) is (tried.case.id not in NOT_AHEAD)
    for stats in ahead.values():
        assert stats.layers > 0
        if tried.case.id not in FORESEEN_WRONGLY:
            assert stats.live_calls == 0
            assert stats.found_forwards >= 3, "all of the second run"


def times_of(case: zoo.Case) -> torch.Tensor:
    """What a scheduler says that gives the model the times of a case."""
    one, other = case.inputs(0), case.inputs(1)
    moving = [name for name, value in one.items() if isinstance(value, torch.Tensor) and not value.equal(other[name])]
    names = [name for name in moving if one[name].is_floating_point() and one[name].unique().numel() == 1]
    steps = range(STEPS)
    return torch.stack([case.inputs(step)[names[0]].flatten()[0] if names else zoo.time(step)[0] for step in steps])


def check_graphs(tried: Tried) -> None:
    device = next(tried.transformer.parameters()).device
    with contextlib.ExitStack() as stack:
        if device.type == "cpu":
            stack.enter_context(recording_by(SimulatedRecorder(), device))
        hook = stack.enter_context(apply_graphs(tried.transformer))
        found = [tried.run(step) for step in range(STEPS)]
    assert list(map(nested.equal, found, tried.exact)) == [True] * STEPS
    stats = hook.stats()
    if tried.case.model in zoo.UNREPLAYED and device.type == "cpu":
        assert stats.replayed == 0
        assert zoo.UNREPLAYED[tried.case.model] in stats.reasons[0]
    elif device.type == "cpu":
        assert not stats.reasons
        assert stats.replayed >= 1
    else:
        assert stats.replayed >= 1 or stats.reasons, "a recording was lost without a reason"


# ------------------------------------------------------------------------------------------------ the sweeps

CHECKS = [
    check_anatomy, check_a_neutral_cache, check_a_cache_by_threshold, check_a_cache_by_tolerance, check_streaming,
    check_layers_that_see_time_alone, check_graphs,
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_way_on_every_class(name: str, subtests: pytest.Subtests) -> None:
    tried = Tried(installed(CASES[name]))
    for check in CHECKS:
        with subtests.test(check.__name__.removeprefix("check_")):
            check(tried)
            assert tried.is_restored()
        if not tried.is_restored():  # The next ways are tried on a whole model.
            tried = Tried(tried.case)


def test_every_exported_class_has_a_case(record_property: Callable[[str, object], None]) -> None:
    exported, served = zoo.exported_classes(), {case.model for case in CASES.values()}
    assert exported - served - set(zoo.UNSERVED) == set(), "write a case for each in tests/zoo"
    assert not set(zoo.UNSERVED) & served
    record_property("count", f"{len(exported & served)} of {len(exported)} transformer classes are served")


def on_gpus() -> Iterator[Any]:
    """One case of each class: those that people use most at once, the others when there is time."""
    common = ("Flux", "QwenImage", "SD3", "Wan", "LTXVideo", "HunyuanVideo")
    for case in {case.model: case for case in CASES.values()}.values():
        is_common = case.model in [f"{name}Transformer{kind}DModel" for name in common for kind in ("2", "3")]
        yield pytest.param(case, id=case.id, marks=[] if is_common else [pytest.mark.slow])


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(on_gpus()))
def test_graphs_on_a_gpu(case: zoo.Case) -> None:
    check_graphs(Tried(installed(case), "cuda"))


# ------------------------------------------------------------------------------------------------ ranks

LEAST_CLASSES, LEAST_WHOLE = 75, 65
"""Classes that run sharded by a derived plan, and those whose blocks are split as a whole and not around the modules in
them. May only grow."""
UNSHARED = {"T5FilmDecoder": "attention by a processor that multiplies its scores"}
"""Classes that cannot run on several ranks, each with the attention that is why."""


def survey(names: list[str]) -> dict[str, Any]:
    """On each rank: by case, the greatest error under a derived plan and its source, or why it was refused."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in names:
        model = CASES[name].build()
        vars(model)["_cp_plan"] = None
        bare = CASES[name].run(model), CASES[name].run(model, step=1)
        try:
            with enable_sequence_parallel_for_model(model) as sharding:
                error = max(apart(CASES[name].run(model, step), bare[step]) for step in range(2))
                found[name] = error, sharding.source
            assert zoo.equal(CASES[name].run(model), bare[0]), name
        except ValueError as error:
            found[name] = None, str(error)
    return found


def apart(one: Any, other: Any) -> float:
    if isinstance(one, torch.Tensor):
        return float((one - other).abs().max()) if one.shape == other.shape else float("inf")
    return max(map(apart, one, other), default=0.0) if isinstance(one, (list, tuple)) else 0.0


@pytest.mark.parametrize("which", ["classes", pytest.param("cases", marks=pytest.mark.slow)])
def test_every_class_on_two_ranks(
    which: str, on_ranks: OnRanks, record_property: Callable[[str, object], None]
) -> None:
    models = zoo.exported_classes()
    names = {case.id if which == "cases" else case.model: name for name, case in reversed(CASES.items())}.values()
    found = on_ranks(2, survey, [name for name in names if CASES[name].model in models])[0]
    wrong = {name: error for name, (error, _) in found.items() if error is not None and not error <= 1e-5}
    assert wrong == {}, "a model that runs gives the right output; any other is refused"
    refused = {CASES[name].model: reason for name, (error, reason) in found.items() if error is None}
    assert {model for model, reason in refused.items() if UNSHARED.get(model, "?") not in reason} == set()
    sources = {CASES[name].model: source for name, (error, source) in reversed(found.items()) if error is not None}
    derived = {model for model, source in sources.items() if source.startswith("derived ")}
    inside = {model for model in derived if "split inside" in sources[model]}
    missing = len({case.model for case in CASES.values()} - models)  # in an older diffusers
    assert len(derived) >= LEAST_CLASSES - missing
    assert len(derived - inside) >= LEAST_WHOLE - missing
    record_property(
        "count",
        f"{len(derived)} of {len(models)} transformer classes run on two ranks by a derived plan, {len(inside)} of "
        f"them split inside their blocks: {', '.join(sorted(inside))}; not at all: {', '.join(sorted(refused))}",
    )


# ------------------------------------------------------------------------------------------------ the documented table


def test_the_documented_table_is_the_tested_one() -> None:
    file = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
    assert file.read_text(encoding="utf-8") == table.page(CASES.values()), "run `make models-table`"


def test_the_documented_shares_are_of_every_class() -> None:
    documented = json.loads(time_shares.FILE.read_text(encoding="utf-8"))
    assert documented.keys() == {case.model for case in CASES.values()}
    for name in ("SD3Transformer2DModel", "HunyuanDiT2DModel"):
        assert time_shares.share_of(installed(CASES[name])) == documented[name], "run `python -m zoo.time_shares`"
