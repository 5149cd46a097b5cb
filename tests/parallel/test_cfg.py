"""Branches on different ranks: batched or one by one, with sequence parallel, and with a cache that skips."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipelines
from samovar.cache import apply_teacache_hook
from samovar.core.errors import HookConflictError
from samovar.hooks import Handle, HookRegistry, call_context, running
from samovar.parallel import (
    Agreement,
    CfgParallelHook,
    SequenceParallelConfig,
    apply_cfg_parallel,
    enable_sequence_parallel_for_model,
    make_mesh,
)
from samovar.parallel.cfg import DeferredTensor

from . import toys
from .conftest import OnRanks, traces

STEPS = 4


def hook_of(model: torch.nn.Module) -> CfgParallelHook:
    hook = HookRegistry.get_or_create(model).get_hook("cfg_parallel")
    assert isinstance(hook, CfgParallelHook)
    return hook


def by_pipeline(names: list[str], ulysses_degree: int) -> dict[str, dict[str, Any]]:
    """Whole pipelines on one rank and on all: how far their latents are apart, and what each rank left to others."""
    warnings.simplefilter("ignore")
    config = SequenceParallelConfig(ulysses_degree=ulysses_degree, cfg_parallel_size=2)
    mesh = make_mesh(config)
    found = {}
    for name in names:
        tiny = pipelines.PIPELINES[name]
        pipe = tiny.build(0)
        denoisers = [getattr(pipe, path) for path in tiny.denoisers]
        bare, before = tiny.run(pipe, steps=STEPS), list(map(traces, denoisers))
        handles: list[Handle] = [apply_cfg_parallel(denoiser, mesh) for denoiser in denoisers]
        handles += [enable_sequence_parallel_for_model(denoiser, config) for denoiser in denoisers]
        with pytest.raises(HookConflictError, match="are on several ranks already"):
            apply_cfg_parallel(denoisers[0], mesh)
        hooks = [hook_of(denoiser) for denoiser in denoisers]
        apart = float((tiny.run(pipe, steps=STEPS) - bare).abs().max())
        deferred, split = sum(hook.num_deferred for hook in hooks), sum(hook.num_split for hook in hooks)
        found[name] = {"apart": apart, "deferred": deferred, "split": split}
        for handle in handles:
            handle.detach()
        assert list(map(traces, denoisers)) == before
        assert torch.equal(tiny.run(pipe, steps=STEPS), bare)
    return found


@pytest.mark.parametrize(
    ("names", "ulysses_degree"),
    [
        (list(pipelines.PIPELINES), 1),
        (["qwen-image", "sd3"], 2),
        pytest.param(list(pipelines.PIPELINES), 2, marks=pytest.mark.slow),
    ],
    ids=["branches", "branches and tokens", "branches and tokens of all"],
)
def test_pipelines(names: list[str], ulysses_degree: int, on_ranks: OnRanks) -> None:
    for found in on_ranks(2 * ulysses_degree, by_pipeline, names, ulysses_degree):
        for name in names:
            assert found[name].pop("apart") <= 1e-5, name
            # All ranks compute the first step of a model, and then each its own branch.
            left = STEPS - len(pipelines.PIPELINES[name].denoisers)
            is_batch = pipelines.PIPELINES[name].cfg == "fused"
            assert found[name] == ({"split": STEPS, "deferred": 0} if is_batch else {"split": 0, "deferred": left})


# ------------------------------------------------------------------------------------------------ with a cache

Loop = Callable[[toys.Transformer, torch.Tensor], torch.Tensor]
CHANGES = ((0, 0), (0.6, 0), (0.6, 0), (0, 0), (0, 0.9), (0, 0), (0.1, 0.1), (0, 0.5), (0.3, 0.3), (0, 0))


def drifting() -> list[torch.Tensor]:
    """Inputs whose first or second half of tokens changes much, in size and direction, by turns."""
    inputs, current, random = [], toys.tokens(12), torch.Generator().manual_seed(3)
    for first, second in CHANGES:
        scale = torch.tensor([float(first)] * 6 + [float(second)] * 6)[None, :, None]
        current = current + scale * torch.randn(current.shape, generator=random)
        inputs.append(current)
    return inputs


def branch_by_branch(num_branches: int, length: int) -> Loop:
    """A step that calls the model once for each branch, and then combines them."""
    conditions = [torch.arange(length)[None] + 12 * branch for branch in range(num_branches)]

    def step(model: toys.Transformer, hidden_states: torch.Tensor) -> torch.Tensor:
        outputs = [model(hidden_states, ids=ids) for ids in conditions]
        return sum((weight + 1) * output for weight, output in enumerate(outputs))  # type: ignore[return-value]

    return step


def in_one_batch(num_branches: int, length: int) -> Loop:
    """A step with all branches in one batch; the sample of the first does not change at all."""
    ids = torch.stack([torch.arange(length) + 12 * branch for branch in range(num_branches)])

    def step(model: toys.Transformer, hidden_states: torch.Tensor) -> torch.Tensor:
        return model(torch.cat([toys.tokens(length), *[hidden_states] * (num_branches - 1)]), ids=ids)

    return step


@torch.no_grad()
def by_branches(make: Callable[[int, int], Loop], num_branches: int, cfg_degree: int, ring: int) -> dict[str, Any]:
    """A loop with Samovar's own cache on one rank and on all, and what one would decide of parts of the inputs."""
    config = SequenceParallelConfig(ring_degree=ring, cfg_parallel_size=cfg_degree)
    mesh = make_mesh(config)

    def loop(step: Loop, is_parallel: bool, tokens: slice = slice(12)) -> tuple[list[torch.Tensor], set[str], Any]:
        model = toys.build()
        cache = apply_teacache_hook(model, {"rel_l1_thresh": 0.25}, agree=Agreement(mesh) if is_parallel else None)
        if is_parallel:
            apply_cfg_parallel(model, mesh)
            enable_sequence_parallel_for_model(model, config)
        outputs = [step(model, hidden_states[:, tokens]) + 0 for hidden_states in drifting()]
        masks = {branch.mask for branch in cache.stats().branches.values() if len(branch.steps) > 1}
        return outputs, masks, hook_of(model) if is_parallel and cfg_degree > 1 else CfgParallelHook

    expected, masks, _ = loop(make(num_branches, 12), False)
    outputs, found, hook = loop(make(num_branches, 12), True)
    halves = [loop(make(num_branches, 6), False, tokens)[1] for tokens in (slice(6), slice(6, 12))]
    assert max(float((one - other).abs().max()) for one, other in zip(outputs, expected, strict=True)) <= 1e-5
    assert found == masks
    assert masks not in (*halves, *([loop(make(1, 12), False)[1]] if make is in_one_batch else [])), "decided by a part"
    return {"deferred": hook.num_deferred, "split": hook.num_split}


@pytest.mark.parametrize(
    ("num_branches", "cfg_degree", "ring"), [(1, 1, 2), (3, 2, 1), (4, 2, 1), (2, 2, 2), (3, 4, 1)]
)
def test_any_number_of_branches(num_branches: int, cfg_degree: int, ring: int, on_ranks: OnRanks) -> None:
    """More branches than ranks, as many, and fewer. A rank asks its cache once in each step, whatever it computes."""
    by_rank = on_ranks(cfg_degree * ring, by_branches, branch_by_branch, num_branches, cfg_degree, ring)
    for rank, found in enumerate(by_rank):
        own = max(1, len(range(rank // ring, num_branches, cfg_degree)))
        assert found == {"deferred": (len(CHANGES) - 1) * (num_branches - own), "split": 0}


@pytest.mark.parametrize(("num_branches", "cfg_degree", "ring"), [(2, 2, 1), (3, 2, 1), (2, 2, 2)])
def test_a_batch_of_branches(num_branches: int, cfg_degree: int, ring: int, on_ranks: OnRanks) -> None:
    """The ranks decide by the whole batch, as one rank would, and not by their own items."""
    for found in on_ranks(cfg_degree * ring, by_branches, in_one_batch, num_branches, cfg_degree, ring):
        assert found == {"deferred": 0, "split": len(CHANGES)}


def some_inputs_are_new(model: toys.Transformer, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
    """Schedules by branch, and an input that is new at each step; the second branch gets another one twice."""
    texts = (torch.ones(4), torch.full((4,), 9.0 if step in (3, 4) else 1.0))
    cond, uncond = (called(model, branch, hidden_states, text=texts[branch]) for branch in (0, 1))
    return uncond + 2.0 * (cond - uncond)


def the_first_is_used_at_once(model: toys.Transformer, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
    cond = called(model, 0, hidden_states) * 2.0
    return cond - called(model, 1, hidden_states)


def the_second_stops(model: toys.Transformer, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
    cond = called(model, 0, hidden_states)
    return cond if step in (3, 4, 7, 8) else 2.0 * cond - called(model, 1, hidden_states)


def the_order_changes(model: toys.Transformer, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
    outputs = [called(model, branch, hidden_states) for branch in ((1, 0) if step in (3, 4, 8) else (0, 1))]
    return outputs[0] + outputs[1]


def called(model: toys.Transformer, branch: int, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
    with call_context(branch=("cond", "uncond")[branch]):
        return model(hidden_states, ids=torch.arange(12 * branch, 12 * branch + 12)[None], **others)


BY_BRANCH = {"schedule": {"cond": "##.##.#.##", "uncond": "#.#.....#."}}
BELOW = {"rel_l1_thresh": 0.25}


@torch.no_grad()
def unequally_asked(step: Callable[..., torch.Tensor], settings: dict[str, Any]) -> tuple[float, Any, Any]:
    """A cached loop on one rank and on two: how far apart, and what was computed of this rank's branch."""
    mesh = make_mesh(SequenceParallelConfig(cfg_parallel_size=2))
    runs = []
    for is_parallel in (False, True):
        model = toys.build()
        cache = apply_teacache_hook(model, settings, agree=Agreement(mesh) if is_parallel else None)
        if is_parallel:
            apply_cfg_parallel(model, mesh)
        samples, outputs = list(drifting()), []
        scheduler = SimpleNamespace(timesteps=range(len(samples)), _step_index=0)
        # A rank does not see the calls of others: their scheduler says which step it is.
        with running(type("Pipeline", (), {"transformer": model, "scheduler": scheduler})()):
            for scheduler._step_index, hidden_states in enumerate(samples):
                outputs.append(step(model, hidden_states, scheduler._step_index) + 0)
        runs.append((outputs, cache.stats().branches[("cond", "uncond")[mesh.cfg.index]].mask))
    (expected, mask), (outputs, found) = runs
    return max(float((one - other).abs().max()) for one, other in zip(outputs, expected, strict=True)), mask, found


UNEQUAL = (the_first_is_used_at_once, the_second_stops, the_order_changes)


@pytest.mark.parametrize(("step", "settings"), [(some_inputs_are_new, BY_BRANCH), *((of, BELOW) for of in UNEQUAL)])
def test_ranks_that_ask_unequally_often(
    step: Callable[..., torch.Tensor], settings: dict[str, Any], on_ranks: OnRanks
) -> None:
    """A rank that has nothing to ask joins those that have: else one of them would wait for ever."""
    by_rank = on_ranks(2, unequally_asked, step, settings)
    for apart, mask, found in by_rank:
        assert {"#", "."} <= set(mask)
        if step is not the_order_changes:  # Then the second is computed: the first has nothing to tell it yet.
            assert found == mask
            assert apart <= 1e-5
    if settings is BY_BRANCH:
        assert by_rank[1][1] == "#.##.#..#.", "its own inputs tell, and not those of the first"


# --------------------------------------------------------------------------- the tensor of another rank's branch


def deferred() -> tuple[DeferredTensor, torch.Tensor, list[int]]:
    value, fetched = torch.arange(12.0).reshape(3, 4), []

    def fetch() -> torch.Tensor:
        fetched.append(1)
        return value

    return DeferredTensor(torch.empty(3, 4), fetch), value, fetched


def test_the_form_of_a_deferred_tensor_fetches_nothing() -> None:
    tensor, _, fetched = deferred()
    assert (tensor.shape, tensor.dtype, tensor.device.type, len(tensor)) == ((3, 4), torch.float32, "cpu", 3)
    part = tensor[:, :2][0].detach()
    assert isinstance(part, DeferredTensor)
    assert part.shape == (2,)
    assert fetched == []
    assert torch.equal(part + 0, torch.tensor([0.0, 1.0]))
    assert fetched == [1]


OPERATIONS: list[Callable[[Any], Any]] = [
    lambda t: 1 - t, lambda t: t.chunk(2), lambda t: torch.cat([t, t]), lambda t: t.numpy(), lambda t: t.tolist(),
    lambda t: t.mul_(2), lambda t: t.max().item(), repr, copy.deepcopy,
]  # fmt: skip


@pytest.mark.parametrize("is_inference", [False, True])
def test_any_operation_fetches_a_deferred_tensor_once(is_inference: bool) -> None:
    for operation in OPERATIONS:
        with torch.inference_mode(is_inference):
            tensor, value, fetched = deferred()
            expected = str(operation(value.clone()))
            assert str(operation(tensor)) == expected
            operation(tensor)
        assert fetched == [1]
