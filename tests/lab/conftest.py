"""A tiny FluxPipeline in a studio, shared by the tests of a file: what is put on it must come off again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.tiny import PARAMS, TASKS, MakeSession, MakeStudio
from pipelines import tiny_flux_pipeline
from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab.journal import Journal
from samovar.lab.session import Session
from samovar.lab.studio import Studio, StudioConfig, Task


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return tiny_flux_pipeline()


@pytest.fixture
def make_studio(pipeline: Any) -> MakeStudio:
    def make(steps: int = 10, batch: int = 2) -> Studio:
        params = OmniDiffusionSamplingParams(num_inference_steps=steps, **PARAMS)
        return Studio(StudioConfig(params=params, batch=batch), pipeline)

    return make


@pytest.fixture
def make_session(make_studio: MakeStudio, tmp_path: Path) -> MakeSession:
    def make(steps: int = 10, batch: int = 2, tasks: list[Task] | None = None, name: str = "") -> Session:
        journal = Journal(tmp_path / f"state-{name}", {"steps": steps})
        return Session(make_studio(steps, batch), TASKS if tasks is None else tasks, journal, name, progress=False)

    return make
