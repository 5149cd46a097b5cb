"""What does the server do, in numbers? For Prometheus, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import EngineStatus

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counts of requests, and the engine's own figures."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(status))
        labels = ("method", "route", "status")
        self._requests = Counter("samovar_requests", "Answers, by status code", labels, registry=self._registry)
        self._seconds = Histogram(
            "samovar_request_seconds", "Time to the end of an answer", ("route",), buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """One answer. Methods and routes are those we know, so that nobody can make up labels without end."""
        known = method if method in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineFigures(Collector):
    """The engine's figures at the time of the question."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        gauges = {
            "samovar_ready": ("Whether pictures can be made now", float(status.is_ready)),
            "samovar_requests_queued": ("Requests that wait", status.queued),
            "samovar_requests_running": ("Requests at work", status.running),
            "samovar_memory_bytes": ("Memory of the workers", status.memory_bytes),
        }
        counters = {
            "samovar_worker_restarts": ("Workers that were replaced", status.restarts),
            "samovar_steps_computed": ("Denoising steps that were computed", status.steps_computed),
            "samovar_steps_skipped": ("Denoising steps that the cache skipped", status.steps_skipped),
            "samovar_step_seconds": ("Time in denoising steps, over samovar_steps: the mean", status.step_seconds),
            "samovar_steps": ("Denoising steps", status.step_count),
            "samovar_bytes_moved": ("Bytes of weights moved by offload", status.bytes_moved),
            "samovar_pictures": ("Pictures made", status.pictures),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        failures = CounterMetricFamily("samovar_failures", "Requests that failed, by code", labels=["code"])
        for code, number in status.failures.items():
            failures.add_metric([code], number)
        yield failures
