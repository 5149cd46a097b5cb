"""Named models on two and four ranks, and everything that must be refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pipelines
from samovar.cache import apply_teacache_hook
from samovar.hooks import HookRegistry, ModelHook
from samovar.offload import OffloadConfig, apply_offload
from samovar.parallel import (
    SequenceParallelConfig,
    SequenceParallelInput,
    SequenceParallelOutput,
    StrategyError,
    agreement,
    apply_sequence_parallel,
    disable_sequence_parallel_for_model,
    enable_sequence_parallel_for_model,
    make_mesh,
    remove_sequence_parallel,
    sharding_of,
)

from . import models, toys
from .conftest import Count, OnRanks

STRATEGIES = {
    2: {"ulysses 2": {"ulysses_degree": 2}, "ring 2": {"ring_degree": 2}, "gathered 2": {"allgather_degree": 2}},
    4: {
        "ulysses 4": {"ulysses_degree": 4},
        "ring 4": {"ring_degree": 4},
        "hybrid 2x2": {"ulysses_degree": 2, "ring_degree": 2},
        "gathered 4": {"allgather_degree": 4},
    },
}
LEAST_EXACT = 1e-5


def traces(model: torch.nn.Module) -> list[tuple[type, set[str]]]:
    return [(type(module), set(vars(module))) for module in model.modules()]


def named_models(degrees: dict[str, dict[str, int]], names: list[str], shapes: list[str]) -> dict[str, Any]:
    """The greatest error of each model in each shape by each strategy; what a strategy refuses, by its error."""
    found: dict[str, Any] = {}
    for name in names:
        for shape in shapes:
            model, inputs = models.MODELS[name](*models.SHAPES[shape])
            bare, before = models.run(model, inputs), traces(model)
            for strategy, settings in degrees.items():
                with enable_sequence_parallel_for_model(model, SequenceParallelConfig(**settings)):
                    try:
                        apart: Any = float((models.run(model, inputs) - bare).abs().max())
                    except StrategyError as error:
                        apart = str(error)
                found[f"{name}, {shape}, {strategy}"] = apart
                assert torch.equal(models.run(model, inputs), bare), "the bits of the bare model"
                assert traces(model) == before, "no trace"
    return found


def check(by_rank: list[dict[str, Any]], count: int) -> str:
    """Asserts that all cases are exact, or refused as they should be; how exact, in a line."""
    for found in by_rank:
        assert len(found) == count
        for case, apart in found.items():
            if "3 heads" in case and "ulysses 4" in case:
                assert (
                    "Ulysses over 4 ranks needs at least as many heads, but this attention has 3. Use gathered" in apart
                )
            else:
                assert not isinstance(apart, str), f"{case}: {apart}"
                assert apart <= LEAST_EXACT, case
    worst = max((apart, case) for case, apart in by_rank[0].items() if isinstance(apart, float))
    return f"parallel: {len(by_rank[0])} cases on {len(by_rank)} ranks, the worst {worst[0]:.1e} ({worst[1]})"


def test_named_models_on_two_ranks(on_ranks: OnRanks, record_property: Count) -> None:
    shapes = ["3 heads, odd"]
    found = on_ranks(2, named_models, STRATEGIES[2], list(models.MODELS), shapes)
    record_property("count", check(found, 3 * len(models.MODELS) * len(shapes)))


def test_named_models_on_four_ranks(on_ranks: OnRanks, record_property: Count) -> None:
    strategies = {name: STRATEGIES[4][name] for name in ("ulysses 4", "hybrid 2x2")}
    found = on_ranks(4, named_models, strategies, list(models.MODELS), ["5 heads, odd"])
    record_property("count", check(found, 2 * len(models.MODELS)))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_named_models_in_every_shape_by_every_strategy(
    num_ranks: int, on_ranks: OnRanks, record_property: Count
) -> None:
    count = len(models.MODELS) * len(models.SHAPES) * len(STRATEGIES[num_ranks])
    found = on_ranks(num_ranks, named_models, STRATEGIES[num_ranks], list(models.MODELS), list(models.SHAPES))
    record_property("count", check(found, count))


# ------------------------------------------------------------------------------------------------ refusals


def refusals() -> dict[str, str]:
    """Errors by name; a model that was refused has no hook."""
    found: dict[str, str] = {}
    two = SequenceParallelConfig(ulysses_degree=2)

    def refused(name: str, model: torch.nn.Module, enable: Callable[[torch.nn.Module], Any]) -> None:
        before = traces(model)
        try:
            enable(model)
        except (ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        assert traces(model) == before, name

    plan = {"": {"hidden_states": SequenceParallelInput(1)}, "proj_uot": SequenceParallelOutput(1)}
    refused("path", toys.build(), lambda m: apply_sequence_parallel(m, two, plan))
    refused(
        "world", toys.build(), lambda m: enable_sequence_parallel_for_model(m, SequenceParallelConfig(ring_degree=3))
    )
    refused("plan", torch.nn.Sequential(torch.nn.Linear(2, 2)), lambda m: enable_sequence_parallel_for_model(m, two))
    refused("strategy", toys.build(), lambda m: enable_sequence_parallel_for_model(m, two, strategy="ring"))
    flux = models.MODELS["Flux"](*models.SHAPES["even"])[0]
    flux.transformer_blocks[0].attn.processor._attention_backend = "flash"
    refused("backend", flux, lambda m: enable_sequence_parallel_for_model(m, two))
    model = toys.build()
    sharding = enable_sequence_parallel_for_model(model, two)
    refused("twice", model, lambda m: enable_sequence_parallel_for_model(m, two))
    sharding.detach()
    sharding.detach()  # No error: it is detached already.
    assert sharding_of(model) is None
    return found


def test_what_is_refused_is_refused_by_name_and_changes_nothing(on_ranks: OnRanks) -> None:
    found = on_ranks(2, refusals)[0]
    assert "'proj_uot', but Transformer has no such module. Did you mean 'proj_out'?" in found["path"]
    assert "need 3 ranks" in found["world"]
    assert (
        "2 are running. Start them with torchrun --nproc-per-node 3, or choose degrees whose product is 2"
        in found["world"]
    )
    assert "ModelError: Sequential has no plan" in found["plan"]
    assert "strategy='ring' contradicts" in found["strategy"]
    assert "is 'flash', which cannot be sharded" in found["backend"]
    assert "HookConflictError: This Transformer is sharded already" in found["twice"]


@torch.no_grad()
def three_heads_on_four_ranks() -> tuple[str, float]:
    model, inputs = models.MODELS["SD3"](*models.SHAPES["3 heads"])
    bare = models.run(model, inputs)
    message = ""
    with enable_sequence_parallel_for_model(model, SequenceParallelConfig(ulysses_degree=4)):
        try:
            models.run(model, inputs)
        except StrategyError as error:
            message = str(error)
    enable_sequence_parallel_for_model(model, strategy="auto")
    return message, float((models.run(model, inputs) - bare).abs().max())


def test_a_strategy_that_cannot_says_which_can_and_auto_takes_it(on_ranks: OnRanks) -> None:
    for message, apart in on_ranks(4, three_heads_on_four_ranks):
        assert (
            "needs at least as many heads, but this attention has 3. Use gathered keys and values (allgather_degree)"
            in message
        )
        assert apart <= LEAST_EXACT


@torch.no_grad()
def removed() -> dict[str, Any]:
    """Shardings taken off by the function that goes with the one that put them on; what was true afterwards."""
    two = SequenceParallelConfig(ulysses_degree=2)
    found: dict[str, Any] = {}

    def is_bare(model: torch.nn.Module, run: Callable[[], torch.Tensor], bare: torch.Tensor, before: Any) -> bool:
        return traces(model) == before and torch.equal(run(), bare)

    model, hidden_states = toys.build(), toys.tokens(13)
    bare, before = model(hidden_states), traces(model)
    plan = {"": {"hidden_states": SequenceParallelInput(1)}, "proj_out": (SequenceParallelOutput(1),)}
    remove_sequence_parallel(model, plan)
    disable_sequence_parallel_for_model(model)
    found["never sharded"] = is_bare(model, lambda: model(hidden_states), bare, before)
    apply_sequence_parallel(model, two, plan)
    model(hidden_states)
    try:
        remove_sequence_parallel(model, {**plan, "proj_out": SequenceParallelOutput(0)})
    except ValueError as error:
        found["another plan"] = str(error), sharding_of(model) is not None
    remove_sequence_parallel(model, plan)
    found["applied"] = is_bare(model, lambda: model(hidden_states), bare, before)
    sharding = enable_sequence_parallel_for_model(model, two)
    model(hidden_states)
    remove_sequence_parallel(model, sharding.plan)
    found["derived"] = is_bare(model, lambda: model(hidden_states), bare, before)
    registry = HookRegistry.get_or_create(model.blocks[0])
    registry.register_hook("other", ModelHook())
    before = traces(model)
    enable_sequence_parallel_for_model(model, two)
    disable_sequence_parallel_for_model(model)
    found["with another hook"] = is_bare(model, lambda: model(hidden_states), bare, before)

    flux: Any
    flux, inputs = models.MODELS["Flux"](*models.SHAPES["odd"])
    bare, before = models.run(flux, inputs), traces(flux)
    for name, remove in {
        "diffusers' plan": lambda: remove_sequence_parallel(flux, flux._cp_plan),
        "whatever its plan": lambda: disable_sequence_parallel_for_model(flux),
    }.items():
        for runs in (False, True):  # Before a plan was compared, and after.
            enable_sequence_parallel_for_model(flux, two)
            if runs:
                models.run(flux, inputs)
            remove()
            found[f"{name}, {runs}"] = is_bare(flux, lambda: models.run(flux, inputs), bare, before)
    return found


def test_a_sharding_is_taken_off_by_its_plan_or_whatever_its_plan(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, removed):
        message, is_still_sharded = found.pop("another plan")
        assert "is sharded by another plan than {" in message
        assert "call disable_sequence_parallel_for_model(model)" in message
        assert is_still_sharded
        assert len(found) == 8
        assert all(value is True for value in found.values()), found


def test_one_rank_adds_nothing() -> None:
    model, inputs = models.MODELS["Flux"](*models.SHAPES["odd"])
    bare, before = models.run(model, inputs), traces(model)
    shardings = [enable_sequence_parallel_for_model(model, config) for config in (None, SequenceParallelConfig())]
    assert sharding_of(model) is None
    assert traces(model) == before, "no hook is attached"
    assert torch.equal(models.run(model, inputs), bare)
    for sharding in shardings:
        sharding.detach()
    assert traces(model) == before


@torch.no_grad()
def declared() -> dict[str, str]:
    """Where the plan came from, and what did not fit."""
    sources: dict[str, str] = {}
    for name in ("Flux", "SD3"):
        model, inputs = models.MODELS[name](*models.SHAPES["odd"])
        sharding = enable_sequence_parallel_for_model(model, SequenceParallelConfig(ring_degree=2))
        models.run(model, inputs)
        sources[name] = sharding.source
    model, hidden_states = toys.build(), toys.tokens(12)
    bare = model(hidden_states)
    # A plan of the model's own that is wrong: the second block would see the whole sequence.
    vars(model)["_sp_plan"] = {"blocks.0.norm": {0: SequenceParallelInput(1, split_output=True)}}
    sharding = enable_sequence_parallel_for_model(model, SequenceParallelConfig(ring_degree=2))
    assert torch.allclose(model(hidden_states), bare, atol=1e-5)
    sources["wrong"] = sharding.source
    model = toys.build()
    vars(model)["_sp_plan"] = {
        "": {"hidden_states": SequenceParallelInput(split_dim=1, expected_dims=3)},
        "proj_out": SequenceParallelOutput(gather_dim=1, expected_dims=3),
    }
    right = enable_sequence_parallel_for_model(model, SequenceParallelConfig(ring_degree=2))
    assert torch.allclose(model(hidden_states), bare, atol=1e-5)
    sources["right"] = right.source
    sources["why"] = sharding.rejected["_sp_plan"]
    return sources


def test_plans_are_checked_before_they_are_trusted(on_ranks: OnRanks) -> None:
    for sources in on_ranks(2, declared):
        assert sources["Flux"] == "_cp_plan"
        assert sources["SD3"] == "derived for transformer_blocks (split once)"
        assert sources["right"] == "_sp_plan"
        assert sources["wrong"] == "derived for blocks (split once)"
        assert "RuntimeError" in sources["why"]


@torch.no_grad()
def exchanges() -> dict[str, dict[str, int]]:
    """How often the ranks exchange anything in a forward, once it has been rehearsed."""
    found = {}
    for name, settings in STRATEGIES[2].items():
        model, inputs = models.MODELS["Flux"](*models.SHAPES["odd"])
        config = SequenceParallelConfig(**settings)
        enable_sequence_parallel_for_model(model, config)
        models.run(model, inputs)
        traffic = make_mesh(config).traffic
        traffic.reset()
        models.run(model, inputs)
        found[name] = dict(traffic.calls)
    return found


def test_a_forward_exchanges_tokens_and_no_sizes(on_ranks: OnRanks) -> None:
    """For each attention what its strategy sends, and one gather at the end."""
    attentions = 5  # Two blocks of text and image, three of both together.
    for found in on_ranks(2, exchanges):
        assert found == {
            "ulysses 2": {"all-to-all": 2 * attentions, "all-gather": 1},
            "ring 2": {"ring": attentions, "all-gather": 1},
            "gathered 2": {"all-gather": attentions + 1},
        }


def with_offload(names: list[str]) -> dict[str, tuple[float, bool, bool]]:
    """Whole pipelines with offload on two ranks: the difference from one rank, whether the bits are those without
    offload, and whether the model is bare again."""
    config = SequenceParallelConfig(ulysses_degree=2)
    found = {}
    for name in names:
        tiny = pipelines.PIPELINES[name]
        pipe = tiny.build(0)
        denoisers = [getattr(pipe, path) for path in tiny.denoisers]
        alone, before = tiny.run(pipe, steps=2), [trace for denoiser in denoisers for trace in traces(denoiser)]

        def shard(is_on: bool, denoisers: list[torch.nn.Module] = denoisers) -> None:
            for denoiser in denoisers:
                if is_on:
                    enable_sequence_parallel_for_model(denoiser, config)
                else:
                    sharding = sharding_of(denoiser)
                    assert sharding is not None
                    sharding.detach()

        shard(True)
        sharded = tiny.run(pipe, steps=2)
        shard(False)
        for mode in ("layerwise", "model"):
            for is_first in (True, False):
                if not is_first:
                    shard(True)
                offloaded = apply_offload(pipe, OffloadConfig(mode=mode, device="cpu"))
                if is_first:
                    shard(True)
                latents = tiny.run(pipe, steps=2)
                moved = offloaded.stats().sent_bytes > 0
                if is_first:
                    offloaded.detach()
                shard(False)
                if not is_first:
                    offloaded.detach()
                is_bare = [trace for denoiser in denoisers for trace in traces(denoiser)] == before
                apart = float((latents - alone).abs().max())
                found[f"{name}, {mode}, {is_first}"] = apart, torch.equal(latents, sharded) and moved, is_bare
        assert torch.equal(tiny.run(pipe, steps=2), alone)
    return found


@pytest.mark.parametrize("names", [["flux", "sd3"], pytest.param(["wan", "qwen-image"], marks=pytest.mark.slow)])
def test_offload_on_each_rank(names: list[str], on_ranks: OnRanks) -> None:
    """Plans of diffusers and derived ones, one denoiser and two, offload and sharding in either order."""
    for found in on_ranks(2, with_offload, names):
        assert len(found) == 4 * len(names)
        for case, (apart, is_same, is_bare) in found.items():
            assert apart <= LEAST_EXACT, case
            assert is_same, case
            assert is_bare, case


def with_teacache(names: list[str]) -> dict[str, tuple[float, bool, int]]:
    """Whole pipelines with Samovar's own cache, on one rank and on two: how far apart, the same steps, how many."""
    warnings.simplefilter("ignore")
    config = SequenceParallelConfig(ulysses_degree=2)
    found = {}
    for name in names:
        runs = []
        for is_sharded in (False, True):
            tiny = pipelines.PIPELINES[name]
            pipe = tiny.build(0)
            agree = agreement(make_mesh(config)) if is_sharded else None
            cache = apply_teacache_hook(pipe.transformer, {"rel_l1_thresh": 0.3}, agree=agree)
            if is_sharded:
                enable_sequence_parallel_for_model(pipe.transformer, config)
            latents = tiny.run(pipe, steps=10)
            branches = cache.stats().branches
            runs.append((latents, {branch: [step.computed for step in s.steps] for branch, s in branches.items()}))
        skipped = sum(computed.count(False) for computed in runs[0][1].values())
        found[name] = float((runs[0][0] - runs[1][0]).abs().max()), runs[0][1] == runs[1][1], skipped
    return found


def test_teacache_skips_the_same_steps_as_on_one_rank(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, with_teacache, ["flux", "qwen-image", "sd3"]):
        for name, (apart, is_same, skipped) in found.items():
            assert apart <= LEAST_EXACT, name
            assert is_same, name
            assert skipped > 3, name


def compile_blocks(model: toys.Transformer, hidden_states: torch.Tensor) -> None:
    for block in model.blocks:
        block.compile(backend="eager")
    model(hidden_states)


@torch.no_grad()
def compiled() -> list[float]:
    """Blocks that were compiled before the model was sharded, and after."""
    errors = []
    for is_first in (True, False):
        model, hidden_states = toys.build(), toys.tokens(13)
        bare = model(hidden_states)
        if is_first:
            compile_blocks(model, hidden_states)
        with enable_sequence_parallel_for_model(model, SequenceParallelConfig(ulysses_degree=2)):
            if not is_first:
                compile_blocks(model, hidden_states)
            errors += [float((model(hidden_states) - bare).abs().max()) for _ in range(2)]
        assert torch.equal(model(hidden_states), bare)
    return errors


def test_compiled_blocks(on_ranks: OnRanks) -> None:
    for errors in on_ranks(2, compiled):
        assert max(errors) <= LEAST_EXACT
