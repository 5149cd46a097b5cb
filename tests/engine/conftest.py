"""A tiny model on disk, and one running engine that the tests of this room share: starting one takes seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines import tiny_flux_pipeline
from samovar.engine import OmniDiffusionConfig, Supervisor

DEFAULTS = {"height": 16, "width": 32, "num_inference_steps": 2, "max_sequence_length": 8}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FluxPipeline with defaults of its own. Not to be changed: copy it."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path)
    (path / "samovar.json").write_text(json.dumps(DEFAULTS))
    return path


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[Supervisor]:
    """A supervisor with its worker process."""
    supervisor = Supervisor(OmniDiffusionConfig(str(folder), device="cpu", progress=False, max_queue=6))
    supervisor.start()
    yield supervisor
    supervisor.close()
