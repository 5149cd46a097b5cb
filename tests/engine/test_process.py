"""Worker processes: heard, and ended."""

from __future__ import annotations

import os
import queue
from pathlib import Path
from typing import Any

from asking import LIMIT_S, is_alive

from samovar.engine import OmniDiffusionConfig
from samovar.engine.messages import Refused
from samovar.engine.process import WorkerGroup, _environment
from samovar.errors import ModelError


def test_a_group_is_heard_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "vae": ["own", "Own"]}')
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "own.py").write_text("raise SystemExit('must not be run')")
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    group = WorkerGroup(OmniDiffusionConfig(str(tmp_path), device="cpu"), lambda *news: heard.put(news))
    (process_id,) = group.process_ids
    who, rank, message = heard.get(timeout=LIMIT_S)
    assert (who, rank) == (group, 0)
    assert isinstance(message, Refused)
    assert isinstance(message.error, ModelError)
    assert "own.py" in str(message.error)
    assert heard.get(timeout=LIMIT_S) == (group, 0, None)
    assert group.describe_end() == f"process {process_id}, exit code 0"
    group.end(1.0)
    group.end()
    assert not is_alive(process_id)


def test_the_environment_is_what_it_was() -> None:
    before = dict(os.environ)
    with _environment(OmniDiffusionConfig("emoji")):
        assert os.environ["GOMP_SPINCOUNT"]
        assert os.environ["DIFFUSERS_DISABLE_REMOTE_CODE"]
    assert dict(os.environ) == before
