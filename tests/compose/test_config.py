"""What may be wished for, checked before there is a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from samovar import AttachConfig, SequenceParallelConfig
from samovar.cache import CACHE_BACKENDS, TeaCacheBackend, register_cache_backend
from samovar.compose.config import skipped_share
from samovar.errors import SamovarError, SettingError

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
    ({"offload": "model", "device": "tpu"}, "device is 'tpu'. Give cuda"),
    ({"offload": "model", "device": "mps"}, "device='mps' cannot be used for offload"),
    ({"compile": "indctor"}, r"compile='indctor' is no backend of torch.compile. Did you mean 'inductor'\?"),
    ({"compile": 2}, "compile is 2; True, False or a backend of torch.compile"),
    ({"compile": "cudagraphs", "offload": "layerwise"}, "keeps the addresses of weights, and offload changes them"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SamovarError, match=message):
        AttachConfig(**settings)


def test_ranks_are_multiplied() -> None:
    assert AttachConfig().num_ranks == 1
    parallel = SequenceParallelConfig(ulysses_degree=2, ring_degree=3)
    assert AttachConfig(parallel=parallel, cfg_parallel=2).num_ranks == 12


@pytest.mark.parametrize(
    ("settings", "offloads", "compiles"),
    [({}, False, False), ({"gpu_memory": "1GiB"}, True, False), ({"compile": True}, False, True)],
)
def test_what_is_on(settings: dict[str, Any], offloads: bool, compiles: bool) -> None:
    config = AttachConfig(**settings)
    assert (config.offloads, config.compiles) == (offloads, compiles)


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


def test_what_one_branch_tells_is_refused_where_another_rank_has_the_other_branch() -> None:
    both = {"cond": "##.#", "uncond": "##.#"}
    weights = {name: {"2": {"1": 1.0}} for name in both}
    fitted = {"forecast": "fitted", "forecast_of": "output", "schedule": both, "forecast_weights": weights}
    hard: dict[str, Any] = {"branch": "cond", "step": 1, "weights": {"0": 1.0}, "error": 0.1}
    hard |= {"schedule": dict.fromkeys(both, "####"), "forecast_weights": {name: {} for name in both}}
    assert AttachConfig("tea_cache", fitted, cfg_parallel=2).num_ranks == 2
    assert AttachConfig("tea_cache", fitted | {"hard": hard}, parallel=SequenceParallelConfig(2)).num_ranks == 2
    with pytest.raises(SettingError, match=r"'hard' looks at one branch .* cfg_parallel=2 .* Leave one of the two out"):
        AttachConfig("tea_cache", fitted | {"hard": hard}, cfg_parallel=2)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"cache": "none"}, 0.0),
        ({"cache": "tea_cache"}, None),
        ({"cache": "tea_cache", "cache_config": {"rel_l1_thresh": 0}}, 0.0),
        ({"cache": "forecast", "cache_config": {"schedule": "#..."}}, 0.75),
    ],
)
def test_what_the_planner_is_told_of_a_cache(settings: dict[str, Any], share: float | None) -> None:
    config = AttachConfig(**settings)
    assert skipped_share(config.make_cache(None)) == share
    assert config.offload_config(share).skipped == (share or 0.0)
