"""With what others have put on a pipeline: it works, to the bit, or is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compose.matrix import footprint
from pipelines import PIPELINES
from samovar import attach
from samovar.core.errors import SettingError

STEPS = 4
SCHEDULE = {"schedule": "#.#."}
CPU = torch.device("cpu")
FLUX = PIPELINES["flux"]


def group_offload(pipe: Any, **kind: Any) -> None:
    from diffusers.hooks import apply_group_offloading

    kind = kind or {"offload_type": "block_level", "num_blocks_per_group": 1}
    apply_group_offloading(pipe.transformer, onload_device=CPU, offload_device=CPU, **kind)


def group_offload_of_leaves(pipe: Any) -> None:
    group_offload(pipe, offload_type="leaf_level")


def first_block_cache(pipe: Any) -> None:
    from diffusers import FirstBlockCacheConfig

    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))


def taylor_seer_by_hand(pipe: Any) -> None:
    from diffusers import TaylorSeerCacheConfig, apply_taylorseer_cache

    apply_taylorseer_cache(pipe.transformer, TaylorSeerCacheConfig())


def model_offload(pipe: Any) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def sequential_offload(pipe: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(pipe.transformer, execution_device=CPU)


def layerwise_casting(pipe: Any) -> None:
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def compiled_whole(pipe: Any) -> None:
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")


def compiled_in_place(pipe: Any) -> None:
    pipe.transformer.compile(backend="eager")


def compiled_blocks(pipe: Any) -> None:
    pipe.transformer.compile_repeated_blocks(backend="eager")


CACHE: dict[str, Any] = {"cache": {"backend": "tea_cache", **SCHEDULE}}
MODEL: dict[str, Any] = {"offload": {"mode": "model", "device": "cpu"}}
LAYERWISE: dict[str, Any] = {"offload": {"mode": "layerwise", "device": "cpu"}}
RANKS: dict[str, Any] = {"parallel": {"cfg_parallel_size": 2}}
COMPILE: dict[str, Any] = {"compile": "eager"}

WORKS: list[Any] = [
    (group_offload, CACHE),
    (group_offload_of_leaves, CACHE),
    (model_offload, CACHE),
    (sequential_offload, CACHE),
    (first_block_cache, LAYERWISE),
    (taylor_seer_by_hand, MODEL),
    (layerwise_casting, CACHE | LAYERWISE),
    pytest.param(layerwise_casting, COMPILE, marks=pytest.mark.slow),
    (compiled_whole, CACHE),
    pytest.param(compiled_in_place, CACHE, marks=pytest.mark.slow),
    pytest.param(compiled_whole, LAYERWISE, marks=pytest.mark.slow),
    (compiled_blocks, CACHE | LAYERWISE),
    pytest.param(group_offload, COMPILE, marks=pytest.mark.slow),
]
REFUSED: list[tuple[Callable[[Any], None], dict[str, Any], str]] = [
    (group_offload, LAYERWISE, "transformer is offloaded by accelerate or diffusers"),
    (model_offload, MODEL, "is offloaded by accelerate or diffusers"),
    (sequential_offload, CACHE | LAYERWISE, "is offloaded by accelerate or diffusers"),
    (first_block_cache, CACHE, r"fbc_leader_block_hook is on transformer.transformer_blocks.0, and a second"),
    (taylor_seer_by_hand, CACHE, r"diffusers' taylorseer_cache is on transformer\.\S+, and a second cache"),
    (first_block_cache, RANKS, "and several ranks were asked for: each would decide for itself"),
    (compiled_in_place, RANKS, r"torch.compile is on transformer, and parallel needs its blocks.*compile=True"),
    (compiled_whole, COMPILE, r"torch.compile is on transformer, and its blocks.*compile=True"),
    (compiled_blocks, COMPILE, "transformer.transformer_blocks.0 is compiled already"),
]


def case_id(value: Any) -> str:
    return value.__name__ if callable(value) else "-".join(value) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("peer", "settings"), WORKS, ids=case_id)
def test_it_works_with_what_is_there(peer: Callable[[Any], None], settings: dict[str, Any]) -> None:
    """What we do to the peer's pipeline is what we do to a bare one: a cache that of the schedule, the rest nothing."""
    pipe = FLUX.build(0)
    peer(pipe)
    theirs = FLUX.run(pipe, STEPS)
    before = footprint(pipe)
    expected = theirs
    if "cache" in settings and peer is not layerwise_casting:
        bare = FLUX.build(0)
        with attach(bare, **CACHE):
            expected = FLUX.run(bare, STEPS)
    elif "cache" in settings:
        with attach(pipe, **CACHE):
            expected = FLUX.run(pipe, STEPS)
    with attach(pipe, **settings) as attached:
        assert torch.equal(FLUX.run(pipe, STEPS), expected)
        cache = attached.stats().cache
        assert cache is None or cache.skipped == 4
    assert ("cache" in settings) == (not torch.equal(expected, theirs)), "the schedule skips nothing"
    assert torch.equal(FLUX.run(pipe, STEPS), theirs), "theirs goes on"
    assert footprint(pipe) == before


@pytest.mark.parametrize(("peer", "settings", "message"), REFUSED, ids=case_id)
def test_it_is_refused_by_name_and_nothing_is_changed(
    peer: Callable[[Any], None], settings: dict[str, Any], message: str
) -> None:
    pipe = FLUX.build(0)
    peer(pipe)
    before = footprint(pipe)
    with pytest.raises(SettingError, match=message):
        attach(pipe, **settings)
    assert footprint(pipe) == before


def test_cache_dit_is_refused_by_name() -> None:
    cache_dit = pytest.importorskip("cache_dit")
    pipe = FLUX.build(0)
    cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(Fn_compute_blocks=1))
    try:
        with pytest.raises(SettingError, match="cache-dit is on transformer, and a second cache was asked for"):
            attach(pipe, **CACHE)
    finally:
        cache_dit.disable_cache(pipe)
    with attach(pipe, **CACHE):
        FLUX.run(pipe, STEPS)


@pytest.mark.parametrize("settings", [LAYERWISE, COMPILE], ids="-".join)
def test_cache_dit_as_our_cache_goes_with_the_rest(settings: dict[str, Any]) -> None:
    pytest.importorskip("cache_dit")
    theirs = {"Fn_compute_blocks": 1, "max_warmup_steps": 1, "residual_diff_threshold": 0.5}
    pipe = FLUX.build(0)
    bare = FLUX.run(pipe, STEPS)
    with attach(pipe, cache={"backend": "cache_dit", **theirs}) as attached:
        cached = FLUX.run(pipe, STEPS)
        assert str(attached.explain()) == "FluxPipeline:\n  cache: CacheDit\n    skips steps that would change little"
    assert not torch.equal(cached, bare)
    with attach(pipe, cache={"backend": "cache_dit", **theirs}, **settings):
        assert torch.equal(FLUX.run(pipe, STEPS), cached)
    assert torch.equal(FLUX.run(pipe, STEPS), bare)


def lora(pipe: Any) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=2, target_modules=["to_q", "to_v", "proj_mlp"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pipe.transformer.add_adapter(config)


COMPILED = pytest.param(CACHE | LAYERWISE | COMPILE, marks=pytest.mark.slow, id="compiled")


@pytest.mark.parametrize("settings", [CACHE, MODEL, LAYERWISE, CACHE | LAYERWISE, COMPILED], ids=case_id)
def test_an_adapter_before_or_after_gives_the_same(settings: dict[str, Any]) -> None:
    cache = {name: value for name, value in settings.items() if name.startswith("cache")}
    alone = FLUX.build(0)
    without = FLUX.run(alone, STEPS)
    lora(alone)
    with attach(alone, **cache):
        expected = FLUX.run(alone, STEPS)
    assert not torch.equal(expected, without)
    for before, after in itertools.permutations((True, False)):
        pipe = FLUX.build(0)
        if before:
            lora(pipe)
        attached = attach(pipe, **settings)
        if after:
            FLUX.run(pipe, STEPS)
            lora(pipe)
        assert torch.equal(FLUX.run(pipe, STEPS), expected), "before" if before else "after"
        pipe.transformer.delete_adapters("default")
        attached.detach()
        assert torch.equal(FLUX.run(pipe, STEPS), without)
