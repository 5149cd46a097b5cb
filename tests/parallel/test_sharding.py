"""Named models on two and four ranks, plans and where they come from, and everything that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from samovar.hooks import HookRegistry, ModelHook
from samovar.parallel import (
    SequenceParallelConfig,
    SequenceParallelInput,
    SequenceParallelOutput,
    StrategyError,
    apply_cfg_parallel,
    apply_sequence_parallel,
    disable_sequence_parallel_for_model,
    make_mesh,
    remove_sequence_parallel,
    sharding_of,
)
from samovar.parallel import enable_sequence_parallel_for_model as enable

from . import models, toys
from .conftest import OnRanks, traces
from .traffic import Traffic

STRATEGIES = {
    2: {"ulysses 2": {"ulysses_degree": 2}, "ring 2": {"ring_degree": 2}, "gathered 2": {"allgather_degree": 2}},
    4: {
        "ulysses 4": {"ulysses_degree": 4},
        "hybrid 2x2": {"ulysses_degree": 2, "ring_degree": 2},
        "ring 4": {"ring_degree": 4},
        "gathered 4": {"allgather_degree": 4},
    },
}
TWO = SequenceParallelConfig(ulysses_degree=2)
MAX_ERROR = 1e-5
PLAN = {"": {"hidden_states": SequenceParallelInput(1)}, "proj_out": SequenceParallelOutput(1)}


def named_models(degrees: dict[str, dict[str, int]], shapes: list[str]) -> dict[str, Any]:
    """The greatest error of each model in each shape by each strategy; what a strategy refuses, by its error."""
    found: dict[str, Any] = {}
    for name in models.MODELS:
        for shape in shapes:
            model, inputs = models.MODELS[name](*models.SHAPES[shape])
            bare, before = models.run(model, inputs), traces(model)
            for strategy, settings in degrees.items():
                with enable(model, SequenceParallelConfig(**settings)):
                    try:
                        apart: Any = float((models.run(model, inputs) - bare).abs().max())
                    except StrategyError as error:
                        apart = str(error)
                found[f"{name}, {shape}, {strategy}"] = apart
                assert torch.equal(models.run(model, inputs), bare), "the bits of the bare model"
                assert traces(model) == before, "no trace"
    return found


@pytest.mark.parametrize(
    ("num_ranks", "strategies", "shapes"),
    [
        (2, list(STRATEGIES[2]), ["3 heads, odd"]),
        (4, ["ulysses 4", "hybrid 2x2"], ["5 heads, odd"]),
        pytest.param(2, list(STRATEGIES[2]), list(models.SHAPES), marks=pytest.mark.slow),
        pytest.param(4, list(STRATEGIES[4]), list(models.SHAPES), marks=pytest.mark.slow),
    ],
)
def test_named_models(num_ranks: int, strategies: list[str], shapes: list[str], on_ranks: OnRanks) -> None:
    degrees = {name: STRATEGIES[num_ranks][name] for name in strategies}
    for found in on_ranks(num_ranks, named_models, degrees, shapes):
        assert len(found) == len(models.MODELS) * len(shapes) * len(strategies)
        for case, apart in found.items():
            if "3 heads" in case and "ulysses 4" in case:
                assert "needs at least as many heads, but this attention has 3. Use gathered" in apart
            else:
                assert not isinstance(apart, str), f"{case}: {apart}"
                assert apart <= MAX_ERROR, case


@torch.no_grad()
def three_heads() -> float:
    model, inputs = models.MODELS["SD3"](*models.SHAPES["3 heads"])
    bare = models.run(model, inputs)
    enable(model)
    return float((models.run(model, inputs) - bare).abs().max())


def test_without_degrees_attentions_with_few_heads_are_gathered(on_ranks: OnRanks) -> None:
    assert max(on_ranks(4, three_heads)) <= MAX_ERROR


def refusals() -> dict[str, str]:
    """Errors by name; a model that was refused has no hook."""
    found: dict[str, str] = {}

    def refused(name: str, model: torch.nn.Module, shard: Callable[[torch.nn.Module], Any]) -> None:
        before = traces(model)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            shard(model)
        found[name] = f"{caught.type.__name__}: {caught.value}"
        assert traces(model) == before, name

    refused("world", toys.build(), lambda m: enable(m, SequenceParallelConfig(ring_degree=3)))
    refused("plan", torch.nn.Sequential(torch.nn.Linear(2, 2)), lambda m: enable(m, TWO))
    flux = models.MODELS["Flux"](*models.SHAPES["even"])[0]
    flux.transformer_blocks[0].attn.processor._attention_backend = "flash"
    refused("backend", flux, lambda m: enable(m, TWO))
    model = toys.build()
    sharding = enable(model, TWO)
    refused("twice", model, lambda m: enable(m, TWO))
    sharding.detach()
    sharding.detach()  # No error: it is detached already.
    assert sharding_of(model) is None
    return found


def test_what_is_refused_is_refused_by_name_and_changes_nothing(on_ranks: OnRanks) -> None:
    found = on_ranks(2, refusals)[0]
    assert "2 are running. Start them with torchrun --nproc-per-node 3, or choose degrees whose" in found["world"]
    assert "ModelError: Sequential has no plan" in found["plan"]
    assert "is 'flash', which cannot be sharded" in found["backend"]
    assert "HookConflictError: This Transformer is sharded already" in found["twice"]


@torch.no_grad()
def removed() -> dict[str, bool]:
    """Shardings taken off by the functions that go with those that put them on; whether the model was bare then."""
    found: dict[str, bool] = {}
    model, hidden_states = toys.build(), toys.tokens(13)
    HookRegistry.get_or_create(model.blocks[0]).register_hook("other", ModelHook())
    bare, before = model(hidden_states), traces(model)

    def check(name: str) -> None:
        found[name] = traces(model) == before and torch.equal(model(hidden_states), bare)

    remove_sequence_parallel(model, PLAN)
    disable_sequence_parallel_for_model(model)
    check("never sharded")
    apply_sequence_parallel(model, TWO, PLAN)
    model(hidden_states)
    with pytest.raises(ValueError, match=r"by another plan than \{.*call disable_sequence_parallel_for_model\(model\)"):
        remove_sequence_parallel(model, {**PLAN, "proj_out": SequenceParallelOutput(0)})
    assert sharding_of(model) is not None
    remove_sequence_parallel(model, PLAN)
    check("applied")
    for has_run in (False, True):
        sharding = enable(model, TWO)
        if has_run:
            model(hidden_states)
            remove_sequence_parallel(model, sharding.plan)
        disable_sequence_parallel_for_model(model)
        check(f"derived, {has_run}")
    flux: Any = models.MODELS["Flux"](*models.SHAPES["odd"])[0]
    before = traces(flux)
    enable(flux, TWO)
    remove_sequence_parallel(flux, flux._cp_plan)  # Before it was compared.
    found["diffusers' plan"] = traces(flux) == before
    return found


def test_a_sharding_is_taken_off_by_its_plan_or_whatever_its_plan(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, removed):
        assert set(found.values()) == {True}, found


def test_one_rank_adds_nothing() -> None:
    model, one = toys.build(), SequenceParallelConfig()
    before = traces(model)
    for handle in (
        enable(model), enable(model, one), apply_sequence_parallel(model, one, PLAN),
        apply_cfg_parallel(model, make_mesh(one)),
    ):  # fmt: skip
        assert sharding_of(model) is None
        assert traces(model) == before, "no hook is attached"
        handle.detach()


class Mixing(toys.Block):
    """Mixes its tokens in another way than by attention."""

    def forward(self, hidden_states: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden_states, table) + hidden_states.mean(1, keepdim=True)


@torch.no_grad()
def declared() -> dict[str, str]:
    """Where the plan came from, and what did not fit."""
    sources: dict[str, str] = {}
    for name in ("Flux", "SD3"):
        model, inputs = models.MODELS[name](*models.SHAPES["odd"])
        sharding = enable(model, SequenceParallelConfig(ring_degree=2))
        models.run(model, inputs)
        sources[name] = sharding.source
    # A plan of the model's own that is wrong: the second block would see the whole sequence.
    wrong = {"blocks.0.norm": {0: SequenceParallelInput(1, split_output=True)}}
    for name, plan in {"wrong": wrong, "right": PLAN, "wrong without an error": PLAN}.items():
        model, hidden_states = toys.build(), toys.tokens(12)
        if "without" in name:
            torch.manual_seed(0)
            model.blocks = torch.nn.ModuleList(Mixing(toys.Attention) for _ in range(2)).eval()
        bare = model(hidden_states)
        vars(model)["_sp_plan"] = plan
        sharding = enable(model, SequenceParallelConfig(ring_degree=2))
        assert torch.allclose(model(hidden_states), bare, atol=1e-5)
        sources[name] = f"{sharding.source} {sharding.rejected}"
    return sources


def test_plans_are_checked_before_they_are_trusted(on_ranks: OnRanks) -> None:
    for sources in on_ranks(2, declared):
        assert sources["Flux"] == "_cp_plan"
        assert sources["SD3"] == "derived for transformer_blocks (split once)"
        assert sources["right"] == "_sp_plan {}"
        assert sources["wrong"].startswith("derived for blocks (split once) {'_sp_plan': 'RuntimeError: ")
        assert sources["wrong without an error"].startswith("derived for blocks (split inside blocks) {'_sp_plan': ")
        assert "the output differs from the unsharded one by" in sources["wrong without an error"]


def exchanges() -> dict[str, dict[str, int]]:
    """How often the ranks exchange anything in a forward, once it has been rehearsed."""
    found = {}
    for name, settings in STRATEGIES[2].items():
        model, inputs = models.MODELS["Flux"](*models.SHAPES["odd"])
        enable(model, SequenceParallelConfig(**settings))
        models.run(model, inputs)
        with Traffic() as traffic:
            models.run(model, inputs)
        found[name] = dict(traffic.calls)
    return found


def test_a_forward_exchanges_tokens_and_no_sizes(on_ranks: OnRanks) -> None:
    """For each attention what its strategy sends, and one gather at the end."""
    attentions = 5  # Two blocks of text and image, three of both together.
    for found in on_ranks(2, exchanges):
        assert found == {
            "ulysses 2": {"alltoall_base": 2 * attentions, "allgather_base": 1},
            "ring 2": {"send": attentions, "recv": attentions, "allgather_base": 1},
            "gathered 2": {"allgather_base": attentions + 1},
        }


@torch.no_grad()
def compiled() -> list[float]:
    """Blocks that were compiled before the model was sharded, and after."""
    errors = []
    for is_first in (True, False):
        model, hidden_states = toys.build(), toys.tokens(13)
        bare = model(hidden_states)
        if is_first:
            toys.compile_blocks(model)
            model(hidden_states)
        with enable(model, TWO):
            if not is_first:
                toys.compile_blocks(model)
            errors += [float((model(hidden_states) - bare).abs().max()) for _ in range(2)]
        assert torch.equal(model(hidden_states), bare)
    return errors


def test_compiled_blocks(on_ranks: OnRanks) -> None:
    for errors in on_ranks(2, compiled):
        assert max(errors) <= MAX_ERROR
