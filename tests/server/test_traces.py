"""Spans of requests, by OpenTelemetry's own interface."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from samovar.engine import Done, GenerationResult, OmniDiffusionSamplingParams, Progress, Started
from samovar.engine.request import Adapter
from samovar.omni import AsyncOmni
from samovar.server.app import create_app
from samovar.server.middleware import Middleware
from samovar.server.settings import ServerConfig
from samovar.server.state import AppState
from samovar.server.traces import keep_account

trace = pytest.importorskip("opentelemetry.trace")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
RESULT = GenerationResult("a secret", (), (3,), OmniDiffusionSamplingParams(), 2.0, lora=(Adapter("ink"),))
STEPS = [Progress(step, 3, 0, 1, 0.1, is_computed) for step, is_computed in ((1, True), (2, False), (3, None))]


class Span(trace.NonRecordingSpan):  # type: ignore[misc, name-defined]
    """Keeps what it is told."""

    def __init__(self, name: str, context: Any, kind: Any, attributes: Any, start_time: int | None) -> None:
        super().__init__(trace.SpanContext(7, 8, is_remote=False))
        self.name, self.parent, self.kind = name, trace.get_current_span(context), kind
        self.attributes, self.times, self.status = attributes or {}, [start_time], None

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status

    def end(self, end_time: int | None = None) -> None:
        self.times.append(end_time)


class Provider(trace.TracerProvider, trace.Tracer):  # type: ignore[misc, name-defined]
    """Keeps all spans, whoever starts them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def get_tracer(self, *given: Any, **named: Any) -> Any:
        return self

    def start_span(
        self, name: str, context: Any = None, kind: Any = None, attributes: Any = None, start_time: Any = None, **_: Any
    ) -> Span:
        self.spans.append(Span(name, context, kind, attributes, start_time))
        return self.spans[-1]

    def start_as_current_span(self, name: str, *given: Any, **named: Any) -> Any:
        return trace.use_span(self.start_span(name))


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    provider = Provider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return provider


def job(*events: Any) -> Any:
    return SimpleNamespace(id="request-1", since=0.0, events=events)


async def answers_503(scope: Any, receive: Any, send: Any) -> None:
    keep_account(scope, job(Started(0.5), *STEPS, Done(RESULT)))
    await send({"type": "http.response.start", "status": 503, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_a_request_is_a_span_below_the_clients_with_its_parts(
    provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    guard = Middleware(answers_503, ServerConfig(), lambda *_: None)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost") as http:
            return await http.post("/x", headers={"traceparent": PARENT})

    with caplog.at_level(logging.INFO, logger="samovar.server"):
        answer = asyncio.run(ask())
    request, queue, generate = provider.spans
    assert (request.name, request.kind, request.status) == ("POST other", trace.SpanKind.SERVER, trace.StatusCode.ERROR)
    assert f"{request.parent.get_span_context().trace_id:032x}" == PARENT.split("-")[1]
    assert request.attributes["samovar.request_id"] == answer.headers["x-request-id"]
    assert request.attributes["http.response.status_code"] == 503
    assert request.attributes["samovar.generate_s"] == 2.0
    assert [(part.name, part.parent) for part in (queue, generate)] == [("queue", request), ("generate", request)]
    assert queue.times[1] == generate.times[0]
    assert generate.times[1] - generate.times[0] == pytest.approx(2e9)
    assert len(request.times) == 2, "it ended"
    assert "secret" not in str([span.attributes for span in provider.spans])
    (line,) = [vars(record) for record in caplog.records if record.name == "samovar.server"]
    assert (line["status"], line["queue_s"], line["lora"]) == (503, 0.5, "ink")


def test_a_request_is_one_span_of_the_whole_application(provider: Provider) -> None:
    """FastAPI has spans of its own."""
    app = create_app(AppState(AsyncOmni("emoji", device="cpu"), ServerConfig()))

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            wrong = await http.post("/v1/images/generations", json={"prompt": 3})
            return [(await http.get("/live")).status_code, wrong.status_code]

    assert asyncio.run(ask()) == [200, 503]
    assert [span.name for span in provider.spans] == ["POST /v1/images/generations", "GET /live"]


def test_without_the_package_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch, provider: Provider) -> None:
    monkeypatch.setattr("samovar.server.traces.trace", None)
    guard = Middleware(answers_503, ServerConfig(), lambda *_: None)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost") as http:
            return (await http.get("/x")).status_code

    assert asyncio.run(ask()) == 503
    assert provider.spans == []
