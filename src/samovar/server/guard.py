"""Who may ask, and what is kept of it? Around every request: key, origin, headers, one line in the log, one count."""

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

from .failures import Refusal
from .settings import ServerConfig

OPEN_PATHS = ("/live", "/health", "/ready", "/")
"""What is answered without the key: whether the server is well, and the page, which asks for the key itself."""

_HEADERS = {
    # The page loads nothing from elsewhere and sends nothing elsewhere; pictures come as data.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

log = logging.getLogger("samovar.server")


class Guard:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp, config: ServerConfig, count: Callable[[str, str, int, float], None]) -> None:
        self._app, self._config, self._count = app, config, count
        self._digest = None if config.api_key is None else _digest(config.api_key)
        self._hosts = config.known_hosts()
        self._inner: ASGIApp = self._ask_key
        if config.cors_origins:  # Around the key, so that a page that may ask can read why it was refused.
            self._inner = CORSMiddleware(
                self._ask_key,
                allow_origins=list(config.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's client sends a dozen of its own.
                expose_headers=["x-request-id", "retry-after"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, request_id = time.perf_counter(), 499, uuid.uuid4().hex

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        scope["samovar_request_id"] = request_id
        try:
            refusal = self._refusal(scope)
            await (self._inner if refusal is None else refusal.response())(scope, receive, send_marked)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "other")  # Set by the router where it found one.
            self._count(scope["method"], route, status, seconds)
            # The path as it came, in ASCII, and without its query, where a careless client may have put the key.
            path = scope.get("raw_path", b"").decode("ascii", "replace")[:200]
            log.info("%s %s %s %.0f ms %s", scope["method"][:10], path, status, 1e3 * seconds, request_id)

    async def _ask_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._key_refusal(scope)
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        """Why nobody who asks like this is served, key or not."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        # No browser leaves the host out; programs that look after a server's health do.
        if self._hosts is not None and host is not None and _name_of(host) not in self._hosts:
            message = f"{host[:80]!r} is no name of this server. Start it with --allowed-host to be reached by another."
            return Refusal(403, message, code="host_not_allowed")
        if origin is not None and not self._is_welcome(origin, host or ""):
            message = "Pages of other sites may not use this server. Start it with --cors-origin to allow one."
            return Refusal(403, message, code="origin_not_allowed")
        return None

    def _key_refusal(self, scope: Scope) -> Refusal | None:
        if self._digest is None or self._is_open(scope["path"]) or scope["method"] == "OPTIONS":
            return None
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Digests are of one length, so that the comparison takes one time for all keys.
        if kind.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), self._digest):
            return None
        message = "The API key is missing or wrong. Send it as the header Authorization: Bearer KEY."
        return Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_welcome(self, origin: str, host: str) -> bool:
        return origin in self._config.cors_origins or origin in (f"http://{host}", f"https://{host}")

    def _is_open(self, path: str) -> bool:
        is_open_metrics = path == "/metrics" and self._config.is_metrics_open
        return path in OPEN_PATHS or path.startswith("/page/") or is_open_metrics


def _name_of(host: str) -> str:
    """A Host without its port; an address of IPv6 has colons of its own, within brackets."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
