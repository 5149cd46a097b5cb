"""The figures that Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from samovar.engine import EngineStatus, ReplicaStatus
from samovar.server.metrics import Metrics

from .running import RunningServer

STATUS = EngineStatus(
    model="/models/tiny", is_ready=True, is_alive=True, queued=3, running=1, restarts=2, steps_computed=10,
    steps_skipped=5, bytes_moved=1000, memory_bytes=2000, step_seconds=1.5, images=4,
    failures={"cancelled": 6}, worker_ids=(1, 2),
    replicas=(ReplicaStatus((0,), True, 1, 0, 3, 400, 1500, (1,)), ReplicaStatus((1,), False, 0, 2, 1, 600, 500, (2,))),
)  # fmt: skip


def values(text: str) -> dict[str, float]:
    return {
        "".join([sample.name, *(f" {value}" for value in sample.labels.values())]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_all_figures_are_told() -> None:
    metrics = Metrics(lambda: STATUS)
    metrics.count("POST", "/v1/images/generations", 200, 0.25)
    metrics.count("POST", "/v1/images/generations", 429, 0.001)
    metrics.count("BREW", "other", 405, 0.001)
    found = values(metrics.text().decode())
    expected = {
        "samovar_ready": 1, "samovar_requests_queued": 3, "samovar_requests_running": 1, "samovar_memory_bytes": 2000,
        "samovar_worker_restarts_total": 2, "samovar_steps_computed_total": 10, "samovar_steps_skipped_total": 5,
        "samovar_step_seconds_total": 1.5, "samovar_steps_total": 15, "samovar_bytes_moved_total": 1000,
        "samovar_replica_ready 0": 1, "samovar_replica_ready 1": 0,
        "samovar_replica_requests_running 0": 1, "samovar_replica_requests_running 1": 0,
        "samovar_replica_memory_bytes 0": 1500, "samovar_replica_memory_bytes 1": 500,
        "samovar_replica_restarts_total 0": 0, "samovar_replica_restarts_total 1": 2,
        "samovar_replica_images_total 0": 3, "samovar_replica_images_total 1": 1,
        "samovar_images_total": 4, "samovar_failures_total cancelled": 6,
        "samovar_requests_total POST /v1/images/generations 200": 1,
        "samovar_requests_total POST /v1/images/generations 429": 1,
        "samovar_requests_total other other 405": 1,
        "samovar_request_seconds_count /v1/images/generations": 2,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_a_real_server_tells_what_it_does(server: RunningServer) -> None:
    with server.client() as http:
        before = values(http.get("/metrics").text)
        assert http.post("/v1/images/generations", json={"prompt": "a cat", "n": 2}).status_code == 200
        after = values(http.get("/metrics").text)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["samovar_images_total"] == 2
    assert grown["samovar_steps_total"] == 6
    assert grown["samovar_steps_computed_total"] + grown["samovar_steps_skipped_total"] == 6
    assert grown["samovar_step_seconds_total"] > 0
    assert grown["samovar_requests_total POST /v1/images/generations 200"] == 1
    assert after["samovar_memory_bytes"] > 1e6
