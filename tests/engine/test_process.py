"""Worker processes: heard, and stopped."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
from pathlib import Path
from typing import Any

import pytest
from asking import LIMIT_S, is_alive, wait_for

from samovar.core.errors import ModelError
from samovar.engine import OmniDiffusionConfig
from samovar.engine.messages import Cancel, Fatal
from samovar.engine.process import WorkerGroup, _environment, _open_store


def test_a_group_is_heard_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "vae": ["own", "Own"]}')
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "own.py").write_text("raise SystemExit('must not be run')")
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    group = WorkerGroup(OmniDiffusionConfig(str(tmp_path), device="cpu"), lambda *news: heard.put(news))
    (process_id,) = group.process_ids
    who, rank, message = heard.get(timeout=LIMIT_S)
    assert (who, rank) == (group, 0)
    assert isinstance(message, Fatal)
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
        assert os.environ["TRANSFORMERS_VERBOSITY"]
        assert os.environ["DIFFUSERS_DISABLE_REMOTE_CODE"]
    assert dict(os.environ) == before


def test_ranks_meet_where_no_other_machine_can_come() -> None:
    store = _open_store()
    bound = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table, encoding="ascii") as file:
            bound += [line.split()[1] for line in file if line.split()[3] == "0A"]
    assert [each for each in bound if each.endswith(f":{store.port:04X}")] == [f"0100007F:{store.port:04X}"]


def test_ranks_end_if_one_of_them_cannot_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = WorkerGroup._start
    started: list[int] = []

    def start_one(group: WorkerGroup, config: OmniDiffusionConfig, rank: int) -> None:
        if rank == 1:
            started.extend(group.process_ids)
            raise OSError("no more processes")
        start(group, config, rank)

    monkeypatch.setattr(WorkerGroup, "_start", start_one)
    with pytest.raises(OSError, match="no more processes"):
        WorkerGroup(OmniDiffusionConfig(str(folder), device="cpu", cfg_parallel_size=2), lambda *news: None)
    assert len(started) == 1
    wait_for(lambda: not is_alive(started[0]))


def test_a_rank_that_is_not_understood_or_cannot_be_told_is_lost() -> None:
    here, there = multiprocessing.Pipe()
    group = WorkerGroup.__new__(WorkerGroup)
    heard: list[Any] = []
    group._on_message = lambda *news: heard.append(news)
    group._pipes, group._processes = [here], [multiprocessing.current_process()]
    there.send_bytes(b"\0nonsense")
    with pytest.raises(pickle.UnpicklingError):
        group._read(0)
    group._outbox = queue.SimpleQueue()
    group._outbox.put(Cancel(lambda: None))  # type: ignore[arg-type]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        group._write()
    assert heard == [(group, 0, None)] * 2
