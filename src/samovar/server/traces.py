"""What happened to a request, for logs, and as a span for OpenTelemetry if it is installed.

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

try:
    from opentelemetry import propagate, trace
except ImportError:
    propagate = trace = None  # type: ignore[assignment]

ACCOUNT, _SINCE = "samovar.account", "samovar.since"


def keep_account(scope: Scope, job: Job) -> None:
    """Note in a request's scope what became of its job, in figures, and when it was submitted."""
    account: dict[str, Any] = {"job": job.id, "steps_computed": 0, "steps_skipped": 0}
    for event in job.events:
        match event:
            case Progress():
                account["steps_skipped" if event.is_computed is False else "steps_computed"] += 1
            case Started():
                account["queue_s"] = round(event.seconds_queued, 4)
            case Done(result=result):
                account |= {"generate_s": round(result.seconds, 4), "images": len(result.outputs)}
                if result.lora:
                    account["lora"] = ",".join(adapter.name for adapter in result.lora)
            case Failed(error=error):
                account["error"] = error.code if isinstance(error, EngineError) else "bad_request"
    scope[ACCOUNT], scope[_SINCE] = account, time.time() - (time.monotonic() - job.since)


def send_span(scope: Scope, route: str, status: int, request_id: str, seconds: float) -> None:
    """Send a request that is over as a span, a child of the client's if it sent one, with its time in the queue and its
    time in a worker below it."""
    if trace is None:
        return
    headers, method, tracer = Headers(scope=scope), scope["method"][:10], trace.get_tracer("samovar")
    parent = propagate.extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
    begun, account = time.time() - seconds, scope.get(ACCOUNT, {})
    attributes = {"http.request.method": method, "http.route": route, "http.response.status_code": status}
    attributes |= {f"samovar.{name}": value for name, value in {"request_id": request_id, **account}.items()}
    span = tracer.start_span(
        f"{method} {route}", parent, trace.SpanKind.SERVER, attributes=attributes, start_time=int(begun * 1e9)
    )
    if status >= 500:
        span.set_status(trace.StatusCode.ERROR)
    begins, context = scope.get(_SINCE, 0.0), trace.set_span_in_context(span)
    for name in ("queue", "generate"):
        if f"{name}_s" in account:
            part = tracer.start_span(name, context, start_time=int(begins * 1e9))
            begins += account[f"{name}_s"]
            part.end(int(begins * 1e9))
    span.end()
