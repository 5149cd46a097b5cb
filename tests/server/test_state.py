"""What is refused at the door, before an engine is asked. The engines here are real, and not started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samovar.core.errors import SettingError
from samovar.engine import OmniDiffusionSamplingParams, OutputKind, PipelineFacts
from samovar.engine.inputs import Inputs
from samovar.omni import AsyncOmni
from samovar.server.errors import ApiError
from samovar.server.settings import Limits, ServerConfig
from samovar.server.state import AppState


def state(max_tolerance: float | None = None, **settings: Any) -> AppState:
    return AppState(AsyncOmni("emoji", device="cpu", **settings), ServerConfig(max_tolerance=max_tolerance))


def test_nothing_is_taken_while_the_model_loads() -> None:
    one = state()
    assert one.problem() == "loading"
    with pytest.raises(ApiError) as refused:
        one.check_open()
    assert (refused.value.status, refused.value.code) == (503, "loading")
    assert refused.value.headers == {"Retry-After": "2"}
    one.phase = "serving"
    assert one.problem() == "dead"
    one.phase = "draining"
    assert one.problem() == "draining"


@pytest.mark.parametrize(
    ("cache", "tolerance", "quality", "found"),
    [
        ("auto", None, None, None),
        ("auto", None, "medium", None),
        ("auto", None, "high", "high"),
        ("auto", None, "low", "fast"),
        ("auto", 0.03, "auto", 0.03),
        ("none", None, "low", None),
        ("tea_cache", None, "high", None),
    ],
)
def test_what_a_quality_stands_for(cache: str, tolerance: Any, quality: str | None, found: Any) -> None:
    assert state(cache=cache).tolerance_of(tolerance, quality) == found


@pytest.mark.parametrize(
    ("tolerance", "quality", "words"),
    [
        (0.01, "high", "not both"),
        (0.05, None, "above the limit of this server, 0.02"),
        ("fast", None, "above"),
    ],
)
def test_a_quality_that_is_refused(tolerance: Any, quality: str | None, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        state(0.02, cache="auto").tolerance_of(tolerance, quality)
    assert (refused.value.status, refused.value.param) == (400, "tolerance")


def test_a_quality_of_clients_is_never_refused_for_the_settings_of_the_server() -> None:
    one = state(0.03, cache="auto")
    assert one.tolerance_of(None, "low") == 0.03, "as little quality as the server allows"
    assert [one.is_exact(None, quality) for quality in ("high", "low", "auto")] == [False] * 3
    tuned = state(cache="tea_cache")
    assert [tuned.is_exact(None, quality) for quality in ("high", "hd")] == [True] * 2, "it promises nothing else"
    assert [tuned.is_exact(None, quality) for quality in ("low", "auto", None)] == [False] * 3
    assert tuned.is_exact(False, "low")


def test_a_server_does_not_lose_more_by_default_than_it_allows() -> None:
    with pytest.raises(SettingError, match=r"max_tolerance=0.01 is less .*, 0.02. Give tolerance=0.01 too") as refused:
        state(0.01, cache="auto")
    assert refused.value.param == "max_tolerance"
    with pytest.raises(SettingError, match=r"0.02 cannot be kept by the cache .* Choose the cache 'auto'"):
        state(0.02, cache="tea_cache")
    state(0.01, tolerance=0.01)
    state(0.01)


@pytest.mark.parametrize("name", ["other", "../emoji", "/etc/passwd", "emoji/", "emoji\x00", "%2e%2e", "EMOJI"])
def test_only_the_model_that_is_served_is_known(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        state().check_model(name)
    assert (refused.value.status, refused.value.param, refused.value.code) == (404, "model", "model_not_found")
    state().check_model("emoji")
    state().check_model(None)


def test_a_folder_has_its_name_wherever_it_is_called_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flux" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "flux" / "inside")
    states = [AppState(SimpleNamespace(config=SimpleNamespace(model=model)), ServerConfig())  # type: ignore[arg-type]
              for model in (".", "..", "../inside", "org/name")]  # fmt: skip
    for folder in (tmp_path / "flux" / "inside", tmp_path):  # It keeps its name when the server goes elsewhere.
        monkeypatch.chdir(folder)
        assert [one.model_name for one in states] == ["inside", "flux", "inside", "name"]


def opened(facts: PipelineFacts, limits: Limits | None = None) -> AppState:
    config = AsyncOmni("emoji", device="cpu").config
    omni: Any = SimpleNamespace(defaults=facts.defaults, config=config, output=facts.output, facts=facts)
    one = AppState(omni, ServerConfig(limits=limits or Limits()), keeps_jobs=False)
    one.open()
    return one


def test_a_model_that_no_request_could_use_is_not_served() -> None:
    """It would say that it is ready, and refuse everything."""

    def needing(name: str, kind: Any) -> PipelineFacts:
        return PipelineFacts("Tiny", frozenset(), 1, inputs=Inputs((name,), (name,)), output=OutputKind(kind))

    for needed in ("video", "pose_video", "initial_audio_waveforms"):
        with pytest.raises(SettingError, match=f"Tiny needs {needed}, which requests to a server cannot send"):
            opened(needing(needed, "video"))
    with pytest.raises(SettingError, match="needs last_image"):
        opened(needing("last_image", "image"))
    for needed in ("image", "images", "mask_image", "control_image"):
        opened(needing(needed, "image"))


@pytest.mark.parametrize(
    ("limits", "multiple", "says"),
    [
        (Limits(max_pixels=1000), 1, "size 40x30 is 1,200 pixels; the limit is 1,000 .--max-pixels."),
        (Limits(max_steps=4), 1, "num_inference_steps is 5; the limit is 4 .--max-steps."),
        (Limits(max_images=1), 1, "num_outputs_per_prompt is 2; the limit is 1 .--max-images."),
        (Limits(), 16, "height must be a multiple of 16 .*, not 30: try 16"),
    ],
)
def test_limits_bind_the_models_own_defaults(limits: Limits, multiple: int, says: str) -> None:
    defaults = OmniDiffusionSamplingParams(width=40, height=30, num_inference_steps=5, num_outputs_per_prompt=2)
    with pytest.raises(SettingError, match=f"requests that leave them out would all be refused: {says}"):
        opened(PipelineFacts("Tiny", frozenset(), multiple, defaults), limits)
    one = opened(PipelineFacts("Tiny", frozenset(), 1, defaults))
    assert (one.phase, one.is_loaded) == ("serving", True)
