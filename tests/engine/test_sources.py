"""Where settings come from, who wins, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samovar.core.errors import ModelError, SettingError
from samovar.engine import OmniDiffusionConfig


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("SAMOVAR_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_arguments_win_over_the_file_and_the_file_over_the_environment(
    tmp_path: Path, bare_environment: pytest.MonkeyPatch
) -> None:
    bare_environment.setenv("SAMOVAR_DTYPE", "float16")
    bare_environment.setenv("SAMOVAR_DEVICE", "cpu")
    bare_environment.setenv("SAMOVAR_MAX_BATCH", "7")
    bare_environment.setenv("SAMOVAR_STEP_TIMEOUT_S", "2.5")
    bare_environment.setenv("SAMOVAR_ENABLE_CPU_OFFLOAD", "on")
    bare_environment.setenv("SAMOVAR_API_KEY", "not a setting of the engine")
    assert OmniDiffusionConfig.read({}) == OmniDiffusionConfig(
        dtype="float16", device="cpu", max_batch=7, step_timeout_s=2.5, offload="model"
    )
    file = tmp_path / "settings.yaml"
    file.write_text("dtype: bfloat16\nmax_batch: 3\ncache_backend: tea_cache\ncache_config: {rel_l1_thresh: 0.3}\n")
    config = OmniDiffusionConfig.read({"max_batch": 2}, file)
    assert (config.dtype, config.device, config.max_batch) == ("bfloat16", "cpu", 2)
    assert config.cache == {"backend": "tea_cache", "rel_l1_thresh": 0.3}
    same = tmp_path / "settings.json"
    same.write_text('{"dtype": "bfloat16", "cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.3}}')
    assert OmniDiffusionConfig.read({"max_batch": 2}, str(same)) == config


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "dtyp: float32", r"'dtyp' is not a setting of Omni, in '.*a.yaml'. Did you mean 'dtype'\?"),
        ("a.json", '{"max_bach": 2}', r"Did you mean 'max_batch'\?"),
        ("a.json", "{", "cannot be read: Expecting"),
        ("a.yaml", "a: [", "cannot be read: while parsing"),
        ("a.yaml", "- 1", r"must hold settings by name, such as `model: emoji`"),
        ("a.toml", "", "must end in .json, .yaml or .yml"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "cannot be read: could not"),
        ("a.yaml", "enable_cpu_offload: 'yes'", "enable_cpu_offload must be true or false, not 'yes'"),
        ("a.yaml", "max_queue: 0", "max_queue=0; expected a whole number, 1 or more"),
        ("a.yaml", "max_batch: 1.5", "max_batch=1.5; expected a whole number, 1 or more"),
        ("a.yaml", "step_timeout_s: .inf", "step_timeout_s=inf; expected a number above 0"),
        ("a.yaml", "model: emojy", r"Did you mean 'emoji'\?"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises((SettingError, ModelError), match=message):
        OmniDiffusionConfig.read({}, file)


def test_an_empty_file_says_nothing_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("")
    assert OmniDiffusionConfig.read({}, tmp_path / "a.yaml") == OmniDiffusionConfig()
    with pytest.raises(SettingError, match="cannot be read"):
        OmniDiffusionConfig.read({}, tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SAMOVAR_DTYP", "float32", r"'SAMOVAR_DTYP' is not .* Did you mean 'SAMOVAR_DTYPE'\?"),
        ("SAMOVAR_MAX_BATCH", "two", "max_batch='two'; expected a whole number, 1 or more"),
        ("SAMOVAR_TRUST_REMOTE_CODE", "maybe", "expected True or False"),
        ("SAMOVAR_CACHE_CONFIG", "rel_l1_thresh", "is not a cache backend"),
        ("SAMOVAR_CACHE", "[1]", "expected a JSON object"),
    ],
)
def test_a_variable_with_a_mistake_is_refused(
    bare_environment: pytest.MonkeyPatch, variable: str, text: str, message: str
) -> None:
    bare_environment.setenv(variable, text)
    with pytest.raises(SettingError, match=message):
        OmniDiffusionConfig.read({})


def test_a_compiler_is_switched_on_or_named(bare_environment: pytest.MonkeyPatch) -> None:
    for text, expected in (("1", True), ("off", False), ("eager", "eager")):
        bare_environment.setenv("SAMOVAR_COMPILE", text)
        assert OmniDiffusionConfig.read({}).compile == expected
    bare_environment.setenv("SAMOVAR_COMPILE", "inductr")
    with pytest.raises(SettingError, match="'inductr' is not a backend"):
        OmniDiffusionConfig.read({})


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(SettingError, match=r"'cache_bakend' is not a setting of Omni. Did you mean 'cache_backend'\?"):
        OmniDiffusionConfig.read({"cache_bakend": "tea_cache"})


def test_the_first_source_that_mentions_a_setting_decides_it_whatever_the_spelling(
    tmp_path: Path, bare_environment: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("cache_backend: tea_cache\ncache_config: {rel_l1_thresh: 0.3}\nenable_cpu_offload: true\n")
    assert OmniDiffusionConfig.read({}, file).cache == {"backend": "tea_cache", "rel_l1_thresh": 0.3}
    for other in ("none", None, "auto"):
        assert OmniDiffusionConfig.read({"cache_backend": other}, file).cache == other
        assert OmniDiffusionConfig.read({"cache": other}, file).cache == other
    assert OmniDiffusionConfig.read({"enable_layerwise_offload": True}, file).offload == "layerwise"
    assert OmniDiffusionConfig.read({"enable_layerwise_offload": False}, file).offload is None
    bare_environment.setenv("SAMOVAR_OFFLOAD", "layerwise")
    assert OmniDiffusionConfig.read({}, file).offload == "model"
    assert OmniDiffusionConfig.read({}).offload == "layerwise"
    with pytest.raises(SettingError, match="exclude each other"):
        OmniDiffusionConfig.read({"enable_layerwise_offload": True, "enable_cpu_offload": True})


def test_aliases_that_go_together_may_come_from_two_sources(
    tmp_path: Path, bare_environment: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("cache_backend: tea_cache\nulysses_degree: 2\ndevice: cpu\n")
    config = OmniDiffusionConfig.read({"cache_config": {"rel_l1_thresh": 0.3}, "cfg_parallel_size": 2}, file)
    assert config.cache == {"backend": "tea_cache", "rel_l1_thresh": 0.3}
    assert config.parallel == {"ulysses_degree": 2, "cfg_parallel_size": 2}
    assert OmniDiffusionConfig.read({"parallel": {"ring_degree": 2}}, file).parallel == {"ring_degree": 2}
    bare_environment.setenv("SAMOVAR_CACHE_CONFIG", '{"rel_l1_thresh": 0.3}')
    assert OmniDiffusionConfig.read({}, file).cache == "tea_cache"
    bare_environment.setenv("SAMOVAR_CACHE_BACKEND", "tea_cache")
    assert OmniDiffusionConfig.read({}, file).cache == {"backend": "tea_cache", "rel_l1_thresh": 0.3}


def test_what_kubernetes_says_of_a_service_is_no_setting(bare_environment: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SERVICE_HOST": "10.0.0.7",
        "SERVICE_PORT": "8091",
        "SERVICE_PORT_HTTP": "8091",
        "PORT": "tcp://10.0.0.7:8091",
        "PORT_8091_TCP": "tcp://10.0.0.7:8091",
        "PORT_8091_TCP_PROTO": "tcp",
        "PORT_8091_TCP_PORT": "8091",
        "PORT_8091_TCP_ADDR": "10.0.0.7",
        "WEB_SERVICE_HOST": "10.0.0.8",
        "WEB_PORT": "tcp://10.0.0.8:80",
    }.items():
        bare_environment.setenv(f"SAMOVAR_{name}", value)
    assert OmniDiffusionConfig.read({}) == OmniDiffusionConfig()
    bare_environment.setenv("SAMOVAR_PORT", "8000")
    with pytest.raises(SettingError, match="'SAMOVAR_PORT' is not a setting of Omni"):
        OmniDiffusionConfig.read({})


def test_defaults_of_one_source_complete_those_of_another(tmp_path: Path, bare_environment: pytest.MonkeyPatch) -> None:
    bare_environment.setenv("SAMOVAR_DEFAULTS", '{"height": 16, "width": 16, "seed": 1}')
    bare_environment.setenv("SAMOVAR_WARM_UP", "no")
    file = tmp_path / "settings.yaml"
    file.write_text("defaults: {height: 32, num_inference_steps: 4}\nserver: {port: 1}\n")
    config = OmniDiffusionConfig.read({"defaults": {"num_inference_steps": 8}}, file)
    assert config.sampling_defaults(None).given() == {"num_inference_steps": 8, "seed": 1, "height": 32, "width": 16}
    assert config.warm_up is False
