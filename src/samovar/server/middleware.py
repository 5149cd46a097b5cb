"""What is the same for every request: key, host and origin are checked, and it is logged and counted."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .settings import ServerConfig
from .traces import ACCOUNT, send_span

OPEN_PATHS = ("/live", "/health", "/ready", "/")
"""No key is needed for probes, and for the page, which asks for the key itself."""

_HEADERS = {
    # The page neither loads nor sends anything elsewhere; images come as data, videos and sounds as blobs.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

log = logging.getLogger("samovar.server")


class Middleware:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, config: ServerConfig, count: Callable[[str, str, int, float], None]) -> None:
        self._app, self._config, self._count = app, config, count
        self._digest = None if config.api_key is None else _digest(config.api_key)
        self._hosts = config.known_hosts()
        self._inner: ASGIApp = self._check_key
        if config.cors_origins:  # Around the key check, so that an allowed page can read why it was refused.
            self._inner = CORSMiddleware(
                self._check_key,
                allow_origins=list(config.cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],  # OpenAI's client sends a dozen of its own.
                expose_headers=["x-request-id", "retry-after"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, request_id = time.perf_counter(), 499, uuid.uuid4().hex
        headers = Headers(scope=scope)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = request_id
                for name, value in _HEADERS.items():
                    sent.setdefault(name, value)
            await send(message)

        try:
            error = _framing_error(headers) or self._host_or_origin_error(headers)
            inner = self._inner if error is None else error.response()
            await inner(scope, receive, send_with_headers)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "other")  # Set by the router if it found one.
            self._count(scope["method"], route, status, seconds)
            # The raw path in ASCII, without its query, where a careless client may have put the key.
            path = scope.get("raw_path", b"").decode("ascii", "replace")[:200]
            send_span(scope, route, status, request_id, seconds)
            fields = {"method": scope["method"][:10], "path": path, "status": status, "seconds": round(seconds, 4),
                      "request_id": request_id, **scope.get(ACCOUNT, {})}  # fmt: skip
            text = "%s %s %s %.0f ms %s"
            log.info(text, fields["method"], path, status, 1e3 * seconds, request_id, extra=fields)

    def _host_or_origin_error(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host"), headers.get("origin")
        # Browsers always send a host; some health probes do not.
        if self._hosts is not None and host is not None and _without_port(host) not in self._hosts:
            message = f"This server does not know the host {host[:80]!r}. Start it with --allowed-host to allow it."
            return ApiError(message, None, "host_not_allowed", 403)
        own = (f"http://{host}", f"https://{host}")
        if origin is not None and origin not in (*self._config.cors_origins, *own):
            message = "Pages of other sites may not use this server. Start it with --cors-origin to allow one."
            return ApiError(message, None, "origin_not_allowed", 403)
        return None

    async def _check_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Digests have one length, so comparing them takes the same time for every key.
        is_right = self._digest is None or hmac.compare_digest(_digest(key.strip()), self._digest)
        is_keyed = self._digest is None or (kind.lower() == "bearer" and is_right)
        if is_keyed or self._is_open(scope["path"]) or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        message = "The API key is missing or wrong. Send it as the header Authorization: Bearer KEY."
        error = ApiError(message, None, "invalid_api_key", 401, {"WWW-Authenticate": "Bearer"})
        await error.response()(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        is_open_metrics = path == "/metrics" and self._config.is_metrics_open
        return path in OPEN_PATHS or path.startswith("/page/") or is_open_metrics


def _framing_error(headers: Headers) -> ApiError | None:
    """Refuse two lengths: a proxy in front may believe the other one, and take a body for a request."""
    if "content-length" not in headers or "transfer-encoding" not in headers:
        return None
    message = "The request has both Content-Length and Transfer-Encoding. Send one of them."
    return ApiError(message, None, "invalid_http", 400, {"Connection": "close"})


def _without_port(host: str) -> str:
    """A Host without its port; an IPv6 address has colons of its own, within brackets."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
