"""Figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import EngineStatus

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_OF_ALL = (
    (GaugeMetricFamily, "samovar_ready", "Whether requests are taken now", "is_ready"),
    (GaugeMetricFamily, "samovar_requests_queued", "Requests in the queue", "queued"),
    (GaugeMetricFamily, "samovar_requests_running", "Requests that run", "running"),
    (GaugeMetricFamily, "samovar_memory_bytes", "Memory of the workers", "memory_bytes"),
    (CounterMetricFamily, "samovar_worker_restarts", "Workers that were replaced", "restarts"),
    (CounterMetricFamily, "samovar_steps_computed", "Denoising steps that were computed", "steps_computed"),
    (CounterMetricFamily, "samovar_steps_skipped", "Denoising steps that the cache skipped", "steps_skipped"),
    (CounterMetricFamily, "samovar_step_seconds", "Time in denoising steps; divide by samovar_steps", "step_seconds"),
    (CounterMetricFamily, "samovar_steps", "Denoising steps", "step_count"),
    (CounterMetricFamily, "samovar_bytes_moved", "Bytes of weights moved by offload", "bytes_moved"),
    (CounterMetricFamily, "samovar_images", "Images, videos and sounds made", "images"),
)
"""What is shown of the engine, and its field."""
_OF_REPLICAS = (
    (GaugeMetricFamily, "samovar_replica_ready", "Whether this worker takes requests now", "is_ready"),
    (GaugeMetricFamily, "samovar_replica_requests_running", "Requests that it runs", "running"),
    (GaugeMetricFamily, "samovar_replica_memory_bytes", "Its memory", "memory_bytes"),
    (CounterMetricFamily, "samovar_replica_restarts", "How often it was replaced", "restarts"),
    (CounterMetricFamily, "samovar_replica_images", "Images, videos and sounds that it made", "images"),
)
"""Likewise of each worker."""


class Metrics(Collector):
    """Counts of requests, and the engine's status when it is asked for."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        labels = ("method", "route", "status")
        self._requests = Counter("samovar_requests", "Responses by status code", labels, registry=registry)
        self._seconds = Histogram(
            "samovar_request_seconds", "Time to the end of a response", ("route",), buckets=_SECONDS, registry=registry
        )

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a response. Only known methods and routes become labels, so clients cannot invent them without end."""
        known = method if method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS") else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for kind, name, text, field in _OF_ALL:
            yield kind(name, text, value=float(getattr(status, field)))
        for kind, name, text, field in _OF_REPLICAS:
            family = kind(name, text, labels=["replica"])
            for number, replica in enumerate(status.replicas):
                family.add_metric([str(number)], float(getattr(replica, field)))
            yield family
        failures = CounterMetricFamily("samovar_failures", "Failed requests by error code", labels=["code"])
        for code, number in status.failures.items():
            failures.add_metric([code], number)
        yield failures
