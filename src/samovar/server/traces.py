"""What happened to a request, for logs, and for OpenTelemetry if it is installed.

Spans go where the process sends them: `opentelemetry-instrument samovar serve ...` reads OTEL_EXPORTER_OTLP_ENDPOINT
and the other usual variables. Without that package, or without a provider, nothing is recorded.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from ..core.errors import EngineError
from ..engine import Done, Failed, Job, Progress, Started

ACCOUNT, _SINCE = "samovar.account", "samovar.since"


def keep_account(scope: Scope, job: Job) -> None:
    """Note in a request's scope what became of its job, and when it was submitted."""
    scope[ACCOUNT] = account_of(job)
    scope[_SINCE] = time.time() - (time.monotonic() - job.since)


def account_of(job: Job) -> dict[str, Any]:
    """What became of a job, in figures. Neither prompts nor images."""
    account: dict[str, Any] = {"job": job.id}
    steps = [event for event in job.events if isinstance(event, Progress)]
    for event in job.events:
        if isinstance(event, Started):
            account["queue_s"] = round(event.seconds_queued, 4)
        elif isinstance(event, Done):
            account |= {"generate_s": round(event.result.seconds, 4), "images": len(event.result.outputs)}
            if event.result.lora:
                account["lora"] = ",".join(adapter.name for adapter in event.result.lora)
        elif isinstance(event, Failed):
            account["error"] = event.error.code if isinstance(event.error, EngineError) else "bad_request"
    skipped = sum(step.is_computed is False for step in steps)
    return account | {"steps_computed": len(steps) - skipped, "steps_skipped": skipped}


class Traces:
    """A span for each request, with its time in the queue and its time in a worker below it."""

    def __init__(self) -> None:
        self._tracer: Any = None
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            return
        self._trace, self._extract = trace, propagate.extract
        self._tracer = trace.get_tracer("samovar")

    def start(self, method: str, headers: Headers) -> Any:
        """The span of a request, a child of the client's if it sent one; None if nothing is recorded."""
        if self._tracer is None:
            return None
        context = self._extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        return self._tracer.start_span(method, context=context, kind=self._trace.SpanKind.SERVER)

    def end(self, span: Any, name: str, status: int, request_id: str, scope: Scope) -> None:
        if span is None:
            return
        method, _, route = name.partition(" ")
        account = scope.get(ACCOUNT, {})
        span.update_name(name)
        span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
        span.set_attribute("samovar.request_id", request_id)
        for key, value in account.items():
            span.set_attribute(f"samovar.{key}", value)
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        self._add_parts(span, account, scope.get(_SINCE, 0.0))
        span.end()

    def _add_parts(self, span: Any, account: dict[str, Any], begins: float) -> None:
        context = self._trace.set_span_in_context(span)
        for name in ("queue", "generate"):
            if f"{name}_s" in account:
                part = self._tracer.start_span(name, context=context, start_time=int(begins * 1e9))
                begins += account[f"{name}_s"]
                part.end(end_time=int(begins * 1e9))
