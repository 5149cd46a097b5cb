"""The models and the server that are fuzzed, and the counts below the run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines import tiny_flux_pipeline
from server.running import RunningServer

from .cases import Fuzz

DEFAULTS = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 8}


@pytest.fixture
def fuzz(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Fuzz]:
    fuzz = Fuzz(*request.param)
    yield fuzz
    record_property("count", fuzz.counts())


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline that makes images of 16x16 pixels, in shards of its weights."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path, max_shard_size="40KB")
    (path / "samovar.json").write_text(json.dumps(DEFAULTS))
    return path


@pytest.fixture(scope="package")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import FluxImg2ImgPipeline

    path = tmp_path_factory.mktemp("models") / "editor"
    FluxImg2ImgPipeline(**tiny_flux_pipeline().components).save_pretrained(path)
    (path / "samovar.json").write_text(json.dumps(DEFAULTS | {"strength": 0.5}))
    return path


@pytest.fixture(scope="package")
def servers(model: Path, editor: Path) -> Iterator[list[RunningServer]]:
    """One that makes images and one that edits them. They answer soon: few steps, few pixels, little patience."""
    limits = ("--max-steps", "4", "--max-pixels", "65536", "--max-images", "2", "--request-timeout", "5")
    started = [RunningServer(folder, *limits) for folder in (model, editor)]
    try:
        yield [server.wait_ready() for server in started]
    finally:
        for server in started:
            server.end(signal.SIGKILL)


@pytest.fixture
def server(servers: list[RunningServer]) -> RunningServer:
    """The one that makes images from text."""
    return servers[0]


@pytest.fixture
def editing(servers: list[RunningServer]) -> RunningServer:
    return servers[1]
