"""What may be wished for, checked before there is a pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samovar import OffloadConfig, SequenceParallelConfig, TeaCacheConfig
from samovar.cache import CACHE_BACKENDS, AutoConfig, TeaCacheBackend, register_cache_backend
from samovar.compose.config import AttachConfig, skipped_share
from samovar.core.errors import SettingError
from samovar.trace.dry_run import RequestSize

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"cache": "tee_cache"}, r"cache='tee_cache' is not a cache backend. Did you mean 'tea_cache'\?", "cache"),
    ({"cache": {"rel_l1": 1}}, "'rel_l1'", "rel_l1"),
    ({"cache": {"backend": "none", "rel_l1_thresh": 1}}, "settings .* were given for the cache 'none'", "cache"),
    ({"cache": 3}, "cache=3; expected a name such as 'tea_cache'", "cache"),
    ({"cache": "nowhere.json"}, "cache: 'nowhere.json' cannot be read", "cache"),
    ({"tolerance": "fats"}, r"tolerance='fats'; .* Did you mean 'fast'\?", "tolerance"),
    (
        {"tolerance": 0.1, "cache": "tea_cache"},
        "tolerance=0.1 is for the cache 'auto', and cache='tea_cache' is another",
        "tolerance",
    ),
    ({"tolerance": 0.1, "cache": "none"}, "cache='none' is another or none", "tolerance"),
    ({"offload": "modl"}, r"offload='modl'. Did you mean 'model'\?", "offload"),
    ({"offload": {"mod": "model"}}, r"'mod' is not a setting of offload. Did you mean 'mode'\?", "mod"),
    ({"offload": 3}, "offload=3; expected the settings of OffloadConfig", "offload"),
    ({"offload": "model", "gpu_memory": "12 apples"}, "gpu_memory", "gpu_memory"),
    ({"offload": {"gpu_memory": "3GiB"}, "gpu_memory": "4GiB"}, "Give one of them", "gpu_memory"),
    ({"offload": {"device": "tpu"}}, "device", "device"),
    ({"offload": {"device": "mps"}}, "device", "device"),
    ({"parallel": 2}, "parallel=2; expected the settings of SequenceParallelConfig", "parallel"),
    ({"parallel": "ulises"}, r"Did you mean 'ulysses'\?", "parallel"),
    ({"parallel": {"cfg_parallel_size": 0}}, "cfg_parallel_size", "cfg_parallel_size"),
    ({"parallel": {"cfg_parallel_size": True}}, "cfg_parallel_size", "cfg_parallel_size"),
    (
        {"compile": "indctor"},
        r"compile='indctor' is not a backend of torch.compile. Did you mean 'inductor'\?",
        "compile",
    ),
    ({"compile": "reduce-overhead"}, "is a mode of torch.compile.* Did you mean compile='graphs'", "compile"),
    ({"compile": "max-autotune"}, "is a mode of torch.compile.* Did you mean True", "compile"),
    ({"compile": {"backend": "graphs", "blocks": "indctor"}}, "'indctor' is not a backend", "compile"),
    ({"vae_tiling": "yes"}, "vae_tiling='yes'; expected True or False", "vae_tiling"),
    ({"compile": 2}, "compile=2; expected True, False, 'graphs', or a backend of torch.compile", "compile"),
    ({"compile": "cudagraphs", "offload": "layerwise"}, "records the addresses of weights", "compile"),
]


@pytest.mark.parametrize(("settings", "message", "param"), REFUSED)
def test_unusable_settings_are_refused_and_name_their_parameter(
    settings: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        AttachConfig.of(**settings)
    assert caught.value.param == param


def test_every_setting_is_a_name_an_object_a_mapping_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(
        '{"cache": {"backend": "tea_cache", "rel_l1_thresh": 0.3}, "offload": {"mode": "model"}, '
        '"parallel": {"ring_degree": 2}, "num_inference_steps": 8}'
    )
    cache, offload, parallel = TeaCacheConfig(0.3), OffloadConfig("model"), SequenceParallelConfig(ring_degree=2)
    for choice in (cache, {"rel_l1_thresh": 0.3}, {"backend": "tea_cache", "rel_l1_thresh": 0.3}, saved, str(saved)):
        found = AttachConfig.of(cache=choice).cache
        assert found is not None
        assert (found.backend, found.settings) == ("tea_cache", cache)
    for wish in ("model", offload, {"mode": "model"}, saved, str(saved)):
        assert AttachConfig.of(offload=wish).offload == replace(offload, share=False)  # There is one rank.
    monkeypatch.setenv("WORLD_SIZE", "2")
    for ranks in ("ring", parallel, {"ring_degree": 2}, saved, str(saved)):
        assert AttachConfig.of(parallel=ranks).parallel == parallel


def test_ranks_are_multiplied() -> None:
    assert AttachConfig.of().num_ranks == 1
    parallel = SequenceParallelConfig(ulysses_degree=2, ring_degree=3, cfg_parallel_size=2)
    assert AttachConfig.of(parallel=parallel).num_ranks == 12


@pytest.mark.parametrize(
    ("settings", "offloads", "compiles"),
    [({}, False, False), ({"gpu_memory": "1GiB"}, True, False), ({"compile": True}, False, True)],
)
def test_what_is_on(settings: dict[str, Any], offloads: bool, compiles: bool) -> None:
    config = AttachConfig.of(**settings)
    assert (config.offload is not None, config.compiles) == (offloads, compiles)


def test_a_cache_that_cannot_ask_other_ranks_is_refused_on_several() -> None:
    class Alone(TeaCacheBackend):
        pass

    register_cache_backend("alone", Alone)
    try:
        assert AttachConfig.of("alone").num_ranks == 1
        with pytest.raises(SettingError, match="'alone' cannot be used on 2 ranks"):
            AttachConfig.of("alone", parallel={"cfg_parallel_size": 2})
        assert AttachConfig.of("tea_cache", parallel={"cfg_parallel_size": 2}).num_ranks == 2
    finally:
        del CACHE_BACKENDS["alone"]


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"cache": "none"}, 0.0),
        ({"cache": "tea_cache"}, None),
        ({"cache": {"backend": "tea_cache", "rel_l1_thresh": 0}}, 0.0),
        ({"cache": {"backend": "tea_cache", "schedule": "#..."}}, 0.75),
    ],
)
def test_what_the_planner_is_told_of_a_cache(settings: dict[str, Any], share: float | None) -> None:
    config = AttachConfig.of(**settings, offload="model")
    assert skipped_share(config.cache) == share
    assert config.offload is not None
    assert config.offload.skipped == (share or 0.0)


def test_either_budget_alone_means_auto_and_both_are_passed_on() -> None:
    for budgets in ({"host_memory": "3GiB"}, {"gpu_memory": "2GiB", "host_memory": "3GiB"}):
        config = AttachConfig.of(**budgets).offload
        assert config is not None
        assert (config.mode, config.gpu_memory, config.host_memory) == ("auto", budgets.get("gpu_memory"), "3GiB")
    with pytest.raises(SettingError, match=r"host_memory='3GiB' contradicts host_memory='4GiB' in offload"):
        AttachConfig.of(offload={"host_memory": "4GiB"}, host_memory="3GiB")


def test_a_tolerance_alone_means_the_cache_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSION_CACHE_BACKEND", "tea_cache")  # What is said here counts more.
    for settings in ({}, {"cache": "auto"}, {"cache": True}, {"cache": {"tolerance": "high"}}):
        choice = AttachConfig.of(tolerance="fast", **settings).cache
        assert choice is not None
        assert (choice.backend, choice.settings) == ("auto", AutoConfig("fast"))


def test_the_size_that_a_budget_is_planned_for() -> None:
    config = AttachConfig.of(gpu_memory="2GiB", height=480, width=832, num_frames=81, batch=2).offload
    assert config is not None
    assert config.size == RequestSize(480, 832, 81, 2)
    with pytest.raises(SettingError, match=r"height=512 is for offload, and there is none"):
        AttachConfig.of(height=512)
    with pytest.raises(SettingError, match=r"width=512 contradicts width=256 in offload"):
        AttachConfig.of(offload={"width": 256}, width=512)


def test_components_that_are_left_out() -> None:
    for exclude in ("vae, text_encoder", ["vae", "text_encoder"], ("vae", "text_encoder")):
        config = AttachConfig.of(gpu_memory="2GiB", exclude=exclude).offload
        assert config is not None
        assert (config.gpu_memory, config.exclude) == ("2GiB", ("vae", "text_encoder"))
    with pytest.raises(SettingError, match=r"exclude='vae' is for offload, and there is none"):
        AttachConfig.of(exclude="vae")
    with pytest.raises(SettingError, match=r"exclude=\('vae',\) contradicts exclude=\('unet',\) in offload"):
        AttachConfig.of(offload={"exclude": "unet"}, exclude="vae")
