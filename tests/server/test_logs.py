"""The log for people and for programs."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import httpx
import pytest

from samovar.server.logs import JsonFormatter

from .running import PATIENCE_S, PROMPT, running


def test_a_record_is_one_line_of_json_with_what_was_added() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        how = {"exc_info": sys.exc_info(), "extra": {"status": 200, "path": Path("/a")}}
        record = logging.getLogger("x").makeRecord("x", logging.ERROR, "f", 1, "no %s", ("way\n",), **how)  # type: ignore[arg-type]
    line = JsonFormatter().format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert (said["level"], said["logger"], said["message"]) == ("error", "x", "no way\n")
    assert (said["status"], said["path"]) == (200, "/a")
    assert said["exception"].endswith("ValueError: two\nlines")
    assert said["time"].endswith("+00:00")
    assert set(said) == {"time", "level", "logger", "message", "status", "path", "exception"}


@pytest.mark.slow
def test_every_line_of_a_server_is_json(folder: Path, lora: dict[str, str]) -> None:
    """From loading to the figures of each request; a prompt is nobody's business."""
    with running(folder, "--log-format", "json", f"--lora=ink={lora['ink']}") as server:
        body = {"prompt": PROMPT, "lora": "ink"}
        made = httpx.post(f"{server.address}/v1/images/generations", json=body, timeout=PATIENCE_S)
        assert httpx.post(f"{server.address}/v1/images/generations", json={}, timeout=PATIENCE_S).status_code == 400
        assert server.end() == 0
    lines = [json.loads(line) for line in server.log]
    assert [line["message"] for line in lines[:2]] == ["loading", "ready"]
    assert lines[1]["address"] == server.address
    good, bad = lines[2:4]
    assert (good["status"], good["method"], good["images"], good["steps_computed"], good["lora"]) == (
        200, "POST", 1, 3, "ink"
    )  # fmt: skip
    assert good["request_id"] == made.headers["x-request-id"]
    assert 0.0 <= good["queue_s"] <= good["seconds"]
    assert (bad["status"], "images" in bad) == (400, False)
    assert PROMPT not in server.text
