"""All methods are measured alike, failures are rows, the best are marked, and curves are drawn."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.caches import all_methods, bench, draw, mark_best
from lab.tiny import TASKS, MakeSession
from samovar.core.errors import ModelError, SettingError
from samovar.lab import Method, Task, cached, plain
from samovar.lab.methods import Report


@contextlib.contextmanager
def _fails(pipeline: Any) -> Iterator[Report]:
    raise TypeError("no such\n  model")
    yield dict


def test_rows_and_failures(make_session: MakeSession) -> None:
    session = make_session(steps=8)
    forecast = cached("tea_cache", {"rel_l1_thresh": 0.4})
    rows = bench(session, [plain(4), Method("a peer", "peers", attached=_fails), forecast])
    assert [row["method"] for row in rows] == ["exact", "plain 4 steps", "a peer", forecast.name]
    assert rows[2] == {"method": "a peer", "family": "peers", "problem": "TypeError: no such model"}


@contextlib.contextmanager
def _refuses(pipeline: Any) -> Iterator[Report]:
    raise ModelError("not this model")
    yield dict


@contextlib.contextmanager
def _gives_no_numbers(pipeline: Any) -> Iterator[Report]:
    handle = pipeline.vae.decoder.register_forward_hook(lambda module, args, output: output * float("nan"))
    try:
        yield dict
    finally:
        handle.remove()


def test_a_peer_that_fails_is_a_row_and_we_are_not(make_session: MakeSession) -> None:
    session = make_session(steps=2, tasks=TASKS[:1])
    peer = Method("a peer", "peers", attached=_refuses)
    nothing = Method("nothing", "peers", {"of": "numbers"}, _gives_no_numbers)
    rows = bench(session, [peer, nothing, plain(1)])
    assert rows[1]["problem"] == "ModelError: not this model"
    assert "1 images are not finite" in rows[2]["problem"]
    assert rows[3]["is_best_by_psnr"]
    json.dumps(rows, allow_nan=False)
    with pytest.raises(ModelError, match="not this model"):
        bench(session, [Method("ours", "samovar", attached=_refuses)])


def test_the_best_are_marked() -> None:
    rows: list[dict[str, Any]] = [
        {"family": "exact", "computed": 50, "psnr": 100, "lpips": 0},
        {"family": "a", "computed": 20, "psnr": 40, "lpips": 0.01},
        {"family": "b", "computed": 20, "psnr": 39, "lpips": 0.005},
        {"family": "c", "computed": 25, "psnr": 38, "lpips": 0.02},
        {"family": "d", "problem": "no"},
    ]
    mark_best(rows)
    assert [row.get("is_best_by_psnr") for row in rows] == [None, True, False, False, None]
    assert [row.get("is_best_by_lpips") for row in rows] == [None, False, True, False, None]


def test_schedules_are_planned_on_other_prompts_if_they_are_chosen(make_session: MakeSession) -> None:
    tuning = make_session(steps=10, tasks=[Task("a hat", 50)], name="tuning")
    methods = all_methods(tuning, only=["schedule", "plain"])
    assert [m.steps for m in methods if m.family == "plain steps"] == [7, 5, 4, 3, 2]
    schedules = [method for method in methods if "schedule" in method.settings]
    assert [method.name for method in schedules] == [f"schedule, {n} computed" for n in (2, 3, 4, 5)]
    assert not any(method.is_adaptive for method in schedules)
    row = tuning.measure(schedules[2])
    assert row.computed == 4
    with pytest.raises(SettingError, match=r"only='nosuch' matches no method\. Methods: plain 7 steps, "):
        all_methods(tuning, only=["nosuch"])


ROWS: list[dict[str, Any]] = [
    {"method": "exact", "family": "exact", "computed": 8.0, "psnr": 100, "lpips": 0.0},
    {"method": "plain 4", "family": "plain steps", "computed": 4.0, "psnr": 30, "lpips": 0.1},
    {"method": "a", "family": "samovar schedule", "computed": 2.7, "psnr": 35, "lpips": 0.0},
    {"method": "b", "family": "samovar schedule", "computed": 4.0, "psnr": 40, "lpips": 0.01},
    {"method": "c", "family": "peer", "problem": "TypeError: no"},
]


def test_a_image_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(ROWS, tmp_path / "bench.png", "a title with $\\frac$ in it")
    with Image.open(tmp_path / "bench.png") as image:
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 20, "there is something on it"
