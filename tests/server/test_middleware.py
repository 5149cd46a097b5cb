"""Who gets in, and what is written down about it."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from samovar.server.middleware import Middleware
from samovar.server.settings import ServerConfig

from .conftest import KEY
from .running import RunningServer

COUNTED: list[tuple[str, str, int]] = []


def guarded_by(config: ServerConfig) -> httpx.AsyncClient:
    guard = Middleware(
        PlainTextResponse("in"), config, lambda method, route, status, _: COUNTED.append((method, route, status))
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost:8091")


async def answers(config: ServerConfig, *requests: tuple[str, str, dict[str, str]]) -> list[int]:
    async with guarded_by(config) as http:
        return [(await http.request(method, path, headers=headers)).status_code for method, path, headers in requests]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("is_metrics_open", [False, True])
def test_the_key_opens_all_but_what_is_open(is_metrics_open: bool) -> None:
    config = ServerConfig(api_key=KEY, is_metrics_open=is_metrics_open)
    tries = [
        ("GET", "/v1/models", {}, 401),
        ("GET", "/v1/models", bearer("wrong"), 401),
        ("GET", "/v1/models", bearer(KEY + "x"), 401),
        ("GET", "/v1/models", bearer(KEY[:-1]), 401),
        ("GET", "/v1/models", bearer(""), 401),
        ("GET", "/v1/models", {"Authorization": KEY}, 401),
        ("GET", "/v1/models", {"Authorization": f"Basic {KEY}"}, 401),
        ("GET", f"/v1/models?api_key={KEY}", {}, 401),
        ("GET", "/openapi.json", {}, 401),
        ("GET", "/live/../v1/models", {}, 401),
        ("GET", "/v1/models", bearer(KEY), 200),
        ("GET", "/v1/models", {"Authorization": f"bearer  {KEY} "}, 200),
        ("GET", "/live", {}, 200),
        ("GET", "/health", {}, 200),
        ("GET", "/ready", {}, 200),
        ("GET", "/", {}, 200),
        ("GET", "/page/page.js", {}, 200),
        ("GET", "/metrics", {}, 200 if is_metrics_open else 401),
    ]
    found = asyncio.run(answers(config, *((method, path, headers) for method, path, headers, _ in tries)))
    assert found == [status for *_, status in tries]


def test_pages_of_other_sites_are_kept_out() -> None:
    config = ServerConfig(cors_origins=("https://friend.example",))
    tries = [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://localhost:9999", 403),
        ("http://localhost:8091", 200),
        ("http://[", 403),
        ("localhost:8091", 403),
        ("https://friend.example", 200),
        ("https://friend.example.evil.example", 403),
    ]
    found = asyncio.run(answers(config, *(("POST", "/v1/images/edits", {"Origin": origin}) for origin, _ in tries)))
    assert found == [status for _, status in tries]


@pytest.mark.parametrize(
    ("settings", "welcome", "refused"),
    [
        (
            {},
            ["localhost", "LOCALHOST:8091", "127.0.0.1:8091", "[::1]:8091", "[::1]"],
            ["evil.example", "evil:8091", ""],
        ),
        ({"host": "::1", "allowed_hosts": ("Friend.example",)}, ["friend.example:443", "[::1]:1"], ["example", "["]),
        ({"host": "127.0.0.2"}, ["127.0.0.2:8091"], ["127.0.0.3", "localhost.evil.example", "localhost@evil"]),
        ({"host": "0.0.0.0"}, ["anything", "10.0.0.1:8091"], []),
        ({"host": "0.0.0.0", "allowed_hosts": ("a.example",)}, ["a.example", "localhost"], ["b.example"]),
    ],
    ids=str,
)
def test_a_name_that_was_made_to_point_here_is_refused(
    settings: dict[str, Any], welcome: list[str], refused: list[str]
) -> None:
    requests = [("GET", "/", {"Host": host}) for host in [*welcome, *refused]]
    found = asyncio.run(answers(ServerConfig(**settings), *requests))
    assert found == [200] * len(welcome) + [403] * len(refused)


def test_a_friend_can_read_why_it_was_refused() -> None:
    async def asked() -> tuple[httpx.Response, httpx.Response]:
        async with guarded_by(ServerConfig(api_key=KEY, cors_origins=("https://friend.example",))) as http:
            origin = {"Origin": "https://friend.example"}
            preflight = origin | {"Access-Control-Request-Method": "POST"}
            wanted = {"Access-Control-Request-Headers": "authorization, x-stainless-os"}
            refused = await http.get("/v1/models", headers=origin)
            return refused, await http.options("/v1/models", headers=preflight | wanted)

    refused, preflight = asyncio.run(asked())
    assert (refused.status_code, preflight.status_code) == (401, 200)
    assert refused.headers["access-control-allow-origin"] == "https://friend.example"
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]


def test_nothing_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="samovar.server"):
        asyncio.run(answers(ServerConfig(api_key=KEY), ("GET", f"/v1/models?key={KEY}%0Ainjected", bearer(KEY))))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "samovar.server"]
    assert line.startswith("GET /v1/models 200 ")
    assert KEY not in line
    assert COUNTED[-1] == ("GET", "other", 200)


def test_a_real_server_keeps_its_key_to_itself(guarded: RunningServer) -> None:
    with guarded.client() as http:
        assert http.get("/live").status_code == http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 401
        assert http.get("/metrics", headers=bearer(KEY)).status_code == 200
        assert http.get(f"/v1/models?api_key={KEY}").status_code == 401
        refused = http.get("/v1/models", headers=bearer("wrong"))
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "invalid_api_key"
        friend = {"Origin": "https://friend.example", "Access-Control-Request-Method": "POST",
                  "Access-Control-Request-Headers": "authorization"}  # fmt: skip
        allowed = http.options("/v1/images/generations", headers=friend)
        assert allowed.headers["access-control-allow-origin"] == "https://friend.example"
        assert "access-control-allow-credentials" not in allowed.headers
        stranger = friend | {"Origin": "https://evil.example"}
        assert http.options("/v1/images/generations", headers=stranger).status_code == 403
    assert KEY not in guarded.text


def test_two_lengths_are_refused(server: RunningServer) -> None:
    """A proxy in front may believe the other one: what follows must not be taken for a request."""
    host, port = server.address.removeprefix("http://").split(":")
    body = b"0\r\n\r\nGET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = b""
        while chunk := raw.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"invalid_http" in answer
    assert answer.count(b"HTTP/1.1") == 1
