"""A cache, offload and several ranks on one pipeline: every pair, in every order, and off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pipelines import PIPELINES
from samovar.compose import AttachConfig, Attached, attach
from samovar.cache import CACHE_BACKENDS, TeaCacheBackend, register_cache_backend
from samovar.errors import ModelError, SamovarError, SettingError
from samovar.hooks import HookRegistry
from samovar.offload import OffloadConfig, apply_offload
from samovar.parallel import Ranks, SequenceParallelConfig

STEPS, MASK = 6, "#.##.#"
SCHEDULE = {"schedule": MASK}
NAMES = ("flux", "qwen-image", "sd3", "wan")
PLACES = ("model", "layerwise")


@pytest.fixture(autouse=True)
def _no_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFUSION_CACHE_BACKEND", raising=False)


@pytest.fixture(scope="module", params=NAMES)
def known(request: pytest.FixtureRequest) -> tuple[str, torch.Tensor, torch.Tensor]:
    """A pipeline by name, what it gives bare, and with a cache and everything resident."""
    tiny = PIPELINES[request.param]
    pipe = tiny.build(0)
    bare = tiny.run(pipe, STEPS)
    with attach(pipe, "tea_cache", schedule_for(request.param)):
        cached = tiny.run(pipe, STEPS)
    assert not torch.equal(bare, cached), "the schedule skips nothing"
    return request.param, bare, cached


def schedule_for(name: str) -> dict[str, Any]:
    """Wan has two denoisers, each of which runs for a part of the steps only: a schedule is for all steps."""
    return SCHEDULE if name != "wan" else {"rel_l1_thresh": float("inf"), "max_skips": 1, "min_steps": 1}


def footprint(pipe: Any) -> list[tuple[int, type, frozenset[str]]]:
    """What the pipeline and every module in it are and have."""
    modules = [m for part in pipe.components.values() if isinstance(part, torch.nn.Module) for m in part.modules()]
    return [(id(part), type(part), frozenset(vars(part))) for part in (pipe, *modules)]


def hooks_on(pipe: Any) -> int:
    modules = [m for part in pipe.components.values() if isinstance(part, torch.nn.Module) for m in part.modules()]
    return sum(len(HookRegistry.get_or_create(module)._hooks) for module in modules)


@pytest.mark.parametrize("place", PLACES)
def test_a_cache_and_offload_together_give_the_bits_of_the_cache(
    known: tuple[str, torch.Tensor, torch.Tensor], place: Any
) -> None:
    name, bare, cached = known
    tiny, pipe = PIPELINES[name], PIPELINES[name].build(0)
    tiny.run(pipe, 1)  # A pipeline has attributes that its first run gives it.
    before = footprint(pipe)
    attached = attach(pipe, "tea_cache", schedule_for(name), offload=place, device="cpu")
    assert torch.equal(tiny.run(pipe, STEPS), cached)
    assert torch.equal(tiny.run(pipe, STEPS), cached), "and again"
    stats = attached.stats()
    assert stats.cache.skipped > 0
    assert stats.offload is not None
    assert (stats.offload.sent_bytes > 0, stats.num_ranks, stats.sharding) == (True, 1, {})
    attached.detach()
    attached.detach()
    assert footprint(pipe) == before
    assert hooks_on(pipe) == 0
    assert torch.equal(tiny.run(pipe, STEPS), bare)
    with attach(pipe, "tea_cache", schedule_for(name), offload=place, device="cpu"):
        assert torch.equal(tiny.run(pipe, STEPS), cached), "attached again"
    assert footprint(pipe) == before


def _by_hand(pipe: Any, order: tuple[str, ...], settings: Any, place: Any) -> dict[str, Callable[[], None]]:
    """The same without `attach`: how each is taken off."""
    off: dict[str, Callable[[], None]] = {}
    for feature in order:
        if feature == "cache":
            backend = TeaCacheBackend(settings)
            backend.enable(pipe)
            off[feature] = lambda backend=backend: backend.disable(pipe)
        else:
            off[feature] = apply_offload(pipe, OffloadConfig(place, device="cpu")).remove
    return off


ORDERS = [("cache", "offload"), ("offload", "cache")]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("off", ORDERS, ids="-".join)
@pytest.mark.parametrize("on", ORDERS, ids="-".join)
def test_any_order_of_attaching_and_detaching_gives_the_same(on: Any, off: Any, place: str) -> None:
    tiny = PIPELINES["flux"]
    pipe = tiny.build(0)
    bare = tiny.run(pipe, STEPS)
    before = footprint(pipe)
    with attach(pipe, "tea_cache", SCHEDULE):
        cached = tiny.run(pipe, STEPS)
    ways = _by_hand(pipe, on, SCHEDULE, place)
    assert torch.equal(tiny.run(pipe, STEPS), cached)
    ways[off[0]]()
    assert torch.equal(tiny.run(pipe, STEPS), bare if off[0] == "cache" else cached)
    ways[off[1]]()
    assert torch.equal(tiny.run(pipe, STEPS), bare)
    assert footprint(pipe) == before


@pytest.mark.parametrize("name", [name for name in NAMES if name != "wan"])
@pytest.mark.parametrize("on", ORDERS, ids="-".join)
def test_other_pipelines_are_indifferent_to_the_order_too(name: str, on: Any) -> None:
    tiny = PIPELINES[name]
    pipe = tiny.build(0)
    with attach(pipe, "tea_cache", SCHEDULE):
        cached = tiny.run(pipe, STEPS)
    _by_hand(pipe, on, SCHEDULE, "layerwise")
    assert torch.equal(tiny.run(pipe, STEPS), cached)


def test_a_skipped_step_moves_no_blocks() -> None:
    """With a schedule of half the steps, as many blocks are loaded as those steps have that are computed."""
    tiny = PIPELINES["sd3"]
    loads = {}
    for mask in ("######", MASK):
        pipe = tiny.build(0)
        with attach(pipe, "tea_cache", {"schedule": mask}, offload="layerwise", device="cpu") as attached:
            tiny.run(pipe, STEPS)
            first = attached.stats().offload
            tiny.run(pipe, STEPS)
            second = attached.stats().offload
            assert first is not None
            assert second is not None
            loads[mask] = second.block_loads - first.block_loads
    num_blocks = len(pipe.transformer.transformer_blocks)
    assert loads["######"] - loads[MASK] == MASK.count(".") * num_blocks


def test_a_budget_alone_is_an_offload() -> None:
    tiny = PIPELINES["flux"]
    pipe = tiny.build(0)
    bare = tiny.run(pipe, 2)
    with attach(pipe, gpu_memory="2GiB", device="cpu") as attached:
        assert attached.offloaded is not None
        assert attached.offloaded.plan.budget_bytes == 2**31
        assert not attached.offloaded.plan.offloads_anything
        assert torch.equal(tiny.run(pipe, 2), bare)


def test_a_lone_denoiser_is_enough() -> None:
    model = PIPELINES["sd3"].build(0).transformer
    before = type(model), set(vars(model))
    with attach(model, "tea_cache", offload="layerwise", device="cpu") as attached:
        assert attached.stats().cache.denoisers == {}
        assert type(model) is not before[0], "something is on it"
    assert (type(model), set(vars(model))) == before


def test_nothing_wished_for_is_nothing_done() -> None:
    pipe = PIPELINES["flux"].build(0)
    before = footprint(pipe)
    attached = attach(pipe)
    assert footprint(pipe) == before
    assert attached.stats() == type(attached.stats())()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cache": "tee_cache"}, r"cache_backend='tee_cache' is no cache backend. Did you mean 'tea_cache'\?"),
    ({"cache": "tea_cache", "cache_config": {"rel_l1": 1}}, "'rel_l1'"),
    ({"cache_config": {"rel_l1_thresh": 1}}, "but no cache"),
    ({"offload": "modl"}, r"offload is 'modl'. Did you mean 'model'\?"),
    ({"offload": "model", "gpu_memory": "12 apples"}, "gpu_memory is '12 apples'"),
    ({"device": "cpu"}, "device='cpu' is where an offloaded pipeline computes, and offload is None"),
    ({"parallel": 2}, "parallel is 2; a SequenceParallelConfig was expected"),
    ({"cfg_parallel": 0}, "cfg_parallel is 0"),
    ({"cfg_parallel": True}, "cfg_parallel is True"),
    ({"cfg_parallel": 2}, "need 2 ranks .* but 1 is running"),
    ({"parallel": SequenceParallelConfig(ring_degree=3)}, "need 3 ranks"),
    ({"offload": "model", "device": "tpu"}, "device is 'tpu'. Give cuda"),
    ({"offload": "model", "device": "mps"}, "device='mps' cannot be used for offload"),
    ({"offload": "layerwise", "device": "cpu", "gpu_memory": "1MiB"}, "is not enough: the least is"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_be_is_refused_and_nothing_is_changed(settings: dict[str, Any], message: str) -> None:
    pipe = PIPELINES["flux"].build(0)
    before = footprint(pipe)
    others = {"cache": "tea_cache"} if "cache" not in settings and "cache_config" not in settings else {}
    with pytest.raises(SamovarError, match=message):
        attach(pipe, **others, **settings)
    assert footprint(pipe) == before
    assert hooks_on(pipe) == 0


def test_a_cache_that_cannot_ask_other_ranks_is_refused_on_several() -> None:
    class Alone(TeaCacheBackend):
        pass

    register_cache_backend("alone", Alone)
    try:
        assert AttachConfig("alone").num_ranks == 1
        with pytest.raises(SettingError, match="Alone cannot be used on 2 ranks"):
            AttachConfig("alone", cfg_parallel=2)
        assert AttachConfig("forecast", cfg_parallel=2).num_ranks == 2
    finally:
        del CACHE_BACKENDS["alone"]


def test_twice_is_refused_and_the_first_stays() -> None:
    tiny = PIPELINES["flux"]
    pipe = tiny.build(0)
    first = attach(pipe, "tea_cache", SCHEDULE, offload="model", device="cpu")
    cached = tiny.run(pipe, STEPS)
    with pytest.raises(SettingError, match="has TeaCache already"):
        attach(pipe, "tea_cache")
    with pytest.raises(SettingError, match="is offloaded already"):
        attach(pipe, offload="layerwise", device="cpu")
    assert torch.equal(tiny.run(pipe, STEPS), cached)
    first.detach()


def test_a_late_failure_undoes_what_was_before() -> None:
    """Offload comes last: when it is refused, the cache is on already and must come off."""
    pipe = PIPELINES["flux"].build(0)
    before = footprint(pipe)
    with (
        attach(pipe, offload="model", device="cpu"),
        pytest.raises(SettingError, match="is offloaded already"),
    ):
        Attached(pipe, AttachConfig("tea_cache", offload="model", device="cpu"))
    assert footprint(pipe) == before


# ------------------------------------------------------------------------------------------------ on two ranks

MEASURED = {"rel_l1_thresh": 0.3, "min_steps": 1}
ON_RANKS: list[dict[str, Any]] = [
    {"parallel": SequenceParallelConfig(ulysses_degree=2), "cache": "tea_cache", "cache_config": MEASURED},
    {"parallel": SequenceParallelConfig(ring_degree=2), "cache": "tea_cache", "cache_config": SCHEDULE},
    {"parallel": SequenceParallelConfig(ulysses_degree=2), "offload": "layerwise", "device": "cpu"},
    {"cfg_parallel": 2, "cache": "forecast", "cache_config": MEASURED, "offload": "layerwise", "device": "cpu"},
    {"cfg_parallel": 2, "cache": "tea_cache", "cache_config": SCHEDULE, "offload": "model", "device": "cpu"},
]


def draw(name: str, settings: dict[str, Any]) -> tuple[torch.Tensor, list[str], bool]:
    """What this rank gets, which steps it computed, and whether the pipeline is bare again at the end."""
    tiny = PIPELINES[name]
    pipe = tiny.build(0)
    tiny.run(pipe, 1)
    before = footprint(pipe)
    with attach(pipe, **settings) as attached:
        output = tiny.run(pipe, STEPS)
        stats = attached.stats()
    masks = []
    if stats.cache is not None:
        masks = [branch.mask for found in stats.cache.denoisers.values() for branch in found.branches.values()]
    return output, masks, footprint(pipe) == before and hooks_on(pipe) == 0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, backend="gloo", timeout_s=60.0, num_threads=1) as started:
        yield started


@pytest.mark.parametrize("settings", ON_RANKS, ids=lambda settings: "-".join(settings))
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_two_ranks_give_what_one_gives_with_the_same_cache(name: str, settings: dict[str, Any], ranks: Ranks) -> None:
    alone = {key: value for key, value in settings.items() if key.startswith("cache")}
    expected, masks, _ = draw(name, alone)
    assert not masks or any("." in mask for mask in masks), "nothing was skipped"
    for output, own_masks, is_bare in ranks.call(draw, name, settings, limit_s=120.0):
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-4)
        # With branches on several ranks, a rank has all steps of its own branch only.
        assert not masks or max(own_masks, key=len) == masks[0], "all ranks decide as one would"
        assert is_bare


def test_a_pipeline_without_denoiser_is_refused() -> None:
    with pytest.raises(ModelError, match="No denoiser was found in object"):
        attach(object(), cfg_parallel=2)
