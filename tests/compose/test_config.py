"""What may be wished for, checked before there is a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samovar import OffloadConfig, SequenceParallelConfig, TeaCacheConfig
from samovar.cache import CACHE_BACKENDS, AutoConfig, TeaCacheBackend, register_cache_backend
from samovar.compose.config import AttachConfig, skipped_share
from samovar.core.errors import SettingError
from samovar.trace.dry_run import RequestSize

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"cache": {"backend": "none", "rel_l1_thresh": 1}}, "settings .* were given for the cache 'none'", "cache"),
    (
        {"tolerance": 0.1, "cache": "tea_cache"},
        "tolerance=0.1 is for the cache 'auto', and cache='tea_cache' is another",
        "tolerance",
    ),
    ({"tolerance": 0.1, "cache": "none"}, "cache='none' is another or none", "tolerance"),
    ({"offload": {"gpu_memory": "3GiB"}, "gpu_memory": "4GiB"}, "Give one of them", "gpu_memory"),
    (
        {"compile": "indctor"},
        r"compile='indctor' is not a backend of torch.compile. Did you mean 'inductor'\?",
        "compile",
    ),
    ({"compile": "reduce-overhead"}, "is a mode of torch.compile.* Did you mean compile='graphs'", "compile"),
    ({"compile": "max-autotune"}, "is a mode of torch.compile.* Did you mean True", "compile"),
    ({"compile": {"backend": "graphs", "blocks": "indctor"}}, "'indctor' is not a backend", "compile"),
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
        assert AttachConfig.of(offload=wish).offload == offload
    monkeypatch.setenv("WORLD_SIZE", "2")
    for ranks in ("ring", parallel, {"ring_degree": 2}, saved, str(saved)):
        assert AttachConfig.of(parallel=ranks).parallel == parallel


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
    ("cache", "share"),
    [
        ("none", 0.0),
        ("tea_cache", None),
        ({"backend": "tea_cache", "rel_l1_thresh": 0}, 0.0),
        ({"backend": "tea_cache", "schedule": "#..."}, 0.75),
    ],
)
def test_the_planner_knows_what_a_cache_skips(cache: Any, share: float | None) -> None:
    config = AttachConfig.of(cache=cache, offload="model")
    assert skipped_share(config.cache) == share
    assert config.offload is not None
    assert config.offload.skipped == (share or 0.0)


def test_a_tolerance_alone_means_the_cache_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSION_CACHE_BACKEND", "tea_cache")  # What is said here counts more.
    for settings in ({}, {"cache": "auto"}, {"cache": True}, {"cache": {"tolerance": "high"}}):
        choice = AttachConfig.of(tolerance="fast", **settings).cache
        assert choice is not None
        assert (choice.backend, choice.settings) == ("auto", AutoConfig("fast"))


def test_settings_of_offload_may_stand_beside_it() -> None:
    size = {"height": 480, "width": 832, "num_frames": 81, "batch": 2}
    for exclude in ("vae, text_encoder", ["vae", "text_encoder"]):
        config = AttachConfig.of(host_memory="3GiB", exclude=exclude, **size).offload
        assert config is not None
        assert (config.mode, config.gpu_memory, config.host_memory) == ("auto", None, "3GiB")
        assert (config.size, config.exclude) == (RequestSize(480, 832, 81, 2), ("vae", "text_encoder"))
    twice = (
        ("host_memory", "3GiB", "4GiB", "'4GiB'"),
        ("width", 512, 256, "256"),
        ("exclude", "vae", "unet", r"\('un"),
    )
    for name, value, other, shown in twice:
        with pytest.raises(SettingError, match=rf"{name}=.* contradicts {name}={shown}.* in offload. Give one of t"):
            AttachConfig.of(offload={name: other}, **{name: value})
        if name != "host_memory":
            with pytest.raises(SettingError, match=rf"{name}='?{value}'? is for offload, and there is none"):
                AttachConfig.of(**{name: value})
