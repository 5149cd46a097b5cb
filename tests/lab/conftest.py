"""A tiny FluxPipeline, shared by the tests of a file: whatever is attached must come off again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.tiny import PARAMS, TASKS, MakeRunner, MakeSession
from pipelines import tiny_flux_pipeline
from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab import Journal, Runner, Session, Task


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return tiny_flux_pipeline()


@pytest.fixture
def make_runner(pipeline: Any) -> MakeRunner:
    def make(steps: int = 10, batch: int = 2) -> Runner:
        params = OmniDiffusionSamplingParams(num_inference_steps=steps, **PARAMS)
        return Runner(params=params, batch=batch, pipeline=pipeline)

    return make


@pytest.fixture
def make_session(make_runner: MakeRunner, tmp_path: Path) -> MakeSession:
    def make(
        steps: int = 10, batch: int = 2, tasks: list[Task] = TASKS, name: str = "", is_timed: bool = False
    ) -> Session:
        journal = Journal(tmp_path / f"state-{name}", {"steps": steps})
        return Session(make_runner(steps, batch), tasks, journal, name, is_timed=is_timed)

    return make
