"""Figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import EngineStatus

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAUGES = """
ready is_ready: Whether requests are taken now
requests_queued queued: Requests in the queue
requests_running running: Requests that run
memory_bytes memory_bytes: Memory of the workers
replica_ready is_ready: Whether this worker takes requests now
replica_requests_running running: Requests that it runs
replica_memory_bytes memory_bytes: Its memory
"""
"""Figures of the engine, and of each worker: the metric, the field, and what it means."""
_COUNTERS = """
worker_restarts restarts: Workers that were replaced
steps_computed steps_computed: Denoising steps that were computed
steps_skipped steps_skipped: Denoising steps that the cache skipped
step_seconds step_seconds: Time in denoising steps; divide by samovar_steps
steps step_count: Denoising steps
bytes_moved bytes_moved: Bytes of weights moved by offload
images images: Images, videos and sounds made
replica_restarts restarts: How often it was replaced
replica_images images: Images, videos and sounds that it made
"""
"""Likewise totals since the start."""


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
        for kind, lines in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for line in lines.strip().splitlines():
                names, _, text = line.partition(": ")
                name, field = names.split()
                of_each = name.startswith("replica_")
                family = kind(f"samovar_{name}", text, labels=["replica"] * of_each)
                for number, part in enumerate(status.replicas if of_each else [status]):
                    family.add_metric([str(number)] * of_each, float(getattr(part, field)))
                yield family
        failures = CounterMetricFamily("samovar_failures", "Failed requests by error code", labels=["code"])
        for code, number in status.failures.items():
            failures.add_metric([code], number)
        yield failures
