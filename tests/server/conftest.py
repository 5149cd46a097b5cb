"""Servers for all tests of this room: one open, one with a key that edits images, one that makes videos."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines import PIPELINES, tiny_flux_pipeline
from pipelines.adapters import save_adapters

from .running import RunningServer, running

KEY = "correct-horse-battery"
VIDEO_DEFAULTS = {"num_inference_steps": 2, "height": 32, "width": 48, "num_frames": 9, "max_sequence_length": 16}
DEFAULTS = {"num_inference_steps": 3, "height": 16, "width": 24, "max_sequence_length": 8}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 16x24 pixels, with its defaults."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path)
    (path / "samovar.json").write_text(json.dumps(DEFAULTS))
    return path


@pytest.fixture(scope="session")
def editing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, in a pipeline that starts from a image."""
    from diffusers import FluxImg2ImgPipeline

    path = tmp_path_factory.mktemp("models") / "editor"
    FluxImg2ImgPipeline(**tiny_flux_pipeline().components).save_pretrained(path)
    (path / "samovar.json").write_text(json.dumps(DEFAULTS))
    return path


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of the open server."""
    return save_adapters(tiny_flux_pipeline(), tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session")
def server(folder: Path, lora: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With a cache and adapters, and steps without end, so that a request can last."""
    options = ("--max-steps", "100000", "--cache-backend", "tea_cache", "--max-queue", "16")
    options += ("--jobs", str(tmp_path_factory.mktemp("no jobs")))
    options += tuple(f"--lora={name}={source}" for name, source in lora.items())
    with running(folder, *options) as started:
        yield started


@pytest.fixture(scope="session")
def guarded(editing_folder: Path) -> Iterator[RunningServer]:
    """With a key, one origin, and little patience for slow senders."""
    options = ("--max-steps", "100000", "--cors-origin", "https://friend.example", "--request-timeout", "4")
    with running(editing_folder, *options, environment={"SAMOVAR_API_KEY": KEY}) as started:
        yield started


@pytest.fixture(scope="session")
def video_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Wan pipeline that makes nine frames of 48x32 pixels."""
    path = tmp_path_factory.mktemp("models") / "films"
    PIPELINES["wan"].build(0).save_pretrained(path)
    (path / "samovar.json").write_text(json.dumps(VIDEO_DEFAULTS))
    return path


@pytest.fixture(scope="session")
def films(video_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of videos."""
    options = ("--max-steps", "100000", "--jobs", str(tmp_path_factory.mktemp("jobs")), "--max-video-pixels", "100000")
    with running(video_folder, *options, "--max-frames", "65", "--max-queue", "4") as started:
        yield started
