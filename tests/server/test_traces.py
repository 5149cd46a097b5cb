"""Spans of requests, by OpenTelemetry's own interface."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from samovar.core.errors import QueueFullError, SettingError
from samovar.engine import Done, Failed, GenerationResult, OmniDiffusionSamplingParams, Progress, Started
from samovar.engine.lora import Adapter
from samovar.omni import AsyncOmni
from samovar.server import AppState, ServerConfig, create_app
from samovar.server.middleware import Middleware
from samovar.server.traces import Traces, account_of, keep_account

trace = pytest.importorskip("opentelemetry.trace")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Span(trace.NonRecordingSpan):  # type: ignore[misc, name-defined]
    """Keeps what it is told."""

    def __init__(self, name: str, parent: Any, kind: Any, start_time: int | None) -> None:
        super().__init__(trace.SpanContext(7, 8, is_remote=False))
        self.name, self.parent, self.kind, self.times = name, parent, kind, (start_time, None)
        self.attributes: dict[str, Any] = {}
        self.status: Any = None

    def update_name(self, name: str) -> None:
        self.name = name

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def set_attributes(self, attributes: Any) -> None:
        self.attributes |= attributes

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status

    def end(self, end_time: int | None = None) -> None:
        self.times = self.times[0], end_time or -1


class Recorder:
    """A tracer that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start_span(self, name: str, context: Any = None, kind: Any = None, start_time: int | None = None) -> Span:
        self.spans.append(Span(name, trace.get_current_span(context), kind, start_time))
        return self.spans[-1]


def job(*events: Any) -> Any:
    return SimpleNamespace(id="request-1", since=0.0, events=events)


RESULT = GenerationResult("a secret", (), (3,), OmniDiffusionSamplingParams(), 2.0, lora=(Adapter("ink"),))
STEPS = [Progress(step, 3, 0, 1, 0.1, is_computed) for step, is_computed in ((1, True), (2, False), (3, None))]


def test_an_account_has_figures_and_no_prompt() -> None:
    assert account_of(job(Started(0.5), *STEPS, Done(RESULT))) == {
        "job": "request-1", "queue_s": 0.5, "generate_s": 2.0, "images": 0, "lora": "ink", "steps_computed": 2,
        "steps_skipped": 1,
    }  # fmt: skip
    assert account_of(job(Failed(QueueFullError("full", 1.0))))["error"] == "queue_full"
    assert account_of(job(Failed(SettingError("no"))))["error"] == "bad_request"


def test_a_request_is_a_span_below_the_clients_with_its_parts() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        keep_account(scope, job(Started(0.5), *STEPS, Done(RESULT)))
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard, recorder = Middleware(app, ServerConfig(), lambda *_: None), Recorder()
    guard._traces._tracer = recorder

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost") as http:
            return await http.post("/x", headers={"traceparent": PARENT})

    answer = asyncio.run(ask())
    request, queue, generate = recorder.spans
    assert (request.name, request.kind) == ("POST other", trace.SpanKind.SERVER)
    assert f"{request.parent.get_span_context().trace_id:032x}" == PARENT.split("-")[1]
    assert request.attributes["samovar.request_id"] == answer.headers["x-request-id"]
    assert request.attributes["http.response.status_code"] == 503
    assert request.attributes["samovar.generate_s"] == 2.0
    assert request.status == trace.StatusCode.ERROR
    assert [(part.name, part.parent) for part in (queue, generate)] == [("queue", request), ("generate", request)]
    assert queue.times[1] == generate.times[0]
    assert generate.times[1] - generate.times[0] == pytest.approx(2e9)  # type: ignore[operator]
    assert request.times[1] is not None, "it ended"
    assert "secret" not in str([span.attributes for span in recorder.spans])


class Everything(trace.TracerProvider, trace.Tracer):  # type: ignore[misc, name-defined]
    """Keeps the names of all spans, whoever starts them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def get_tracer(self, *given: Any, **named: Any) -> Any:
        return self

    def start_span(self, name: str, *given: Any, **named: Any) -> Any:
        self.names.append(name)
        return trace.NonRecordingSpan(trace.SpanContext(7, 8, is_remote=False))

    def start_as_current_span(self, name: str, *given: Any, **named: Any) -> Any:
        return trace.use_span(self.start_span(name))


def test_a_request_is_one_span_of_the_whole_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI has spans of its own."""
    provider = Everything()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    app = create_app(AppState(AsyncOmni("emoji", device="cpu"), ServerConfig()))

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            wrong = await http.post("/v1/images/generations", json={"prompt": 3})
            return [(await http.get("/live")).status_code, wrong.status_code]

    assert asyncio.run(ask()) == [200, 400]
    assert provider.names == ["POST", "GET"]


def test_the_sdk_gets_one_tree_for_a_request() -> None:
    """With OpenTelemetry's own SDK, if it is installed."""
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        keep_account(scope, job(Started(0.5), *STEPS, Done(RESULT)))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Middleware(app, ServerConfig(), lambda *_: None)
    guard._traces._tracer = provider.get_tracer("samovar")

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost") as http:
            await http.post("/x", headers={"traceparent": PARENT})

    asyncio.run(ask())
    queue, generate, request = exporter.get_finished_spans()
    assert [span.name for span in (queue, generate, request)] == ["queue", "generate", "POST other"]
    assert {span.parent.span_id for span in (queue, generate)} == {request.context.span_id}
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    assert {f"{span.context.trace_id:032x}" for span in (queue, generate, request)} == {PARENT.split("-")[1]}
    assert generate.end_time - generate.start_time == pytest.approx(2e9)
    assert request.attributes["samovar.lora"] == "ink"


def test_without_the_package_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    traces = Traces()
    assert traces.start("GET", httpx.Headers()) is None  # type: ignore[arg-type]
    traces.end(None, "GET /", 200, "id", {})
