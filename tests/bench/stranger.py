"""A server that is not ours, for the tests of what loads servers: it answers as its prompt says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWERS: dict[str, tuple[int, bytes]] = {
    "an image": (200, b'{"data": [{"b64_json": "aaaa"}]}'),
    "two by address": (200, b'{"data": [{"url": "http://a/1"}, {"url": "http://a/2"}]}'),
    "nothing": (200, b'{"data": []}'),
    "a list": (200, b"[1]"),
    "a page": (502, b"<html>Bad gateway</html>"),
    "ours": (429, b'{"error": {"message": "full", "type": "rate_limit_error", "param": null, "code": "queue_full"}}'),
    "vllm's": (400, b'{"error": {"message": "no", "type": "BadRequestError", "code": null}}'),
    "vllm's with a number": (404, b'{"error": {"message": "no", "type": "NotFoundError", "param": null, "code": 404}}'),
    "fastapi's": (422, b'{"detail": [{"msg": "no"}]}'),
    "vllm-omni's": (503, b'{"detail": "The engine\\n is busy"}'),
}


class Stranger(BaseHTTPRequestHandler):
    """A server that answers as its prompt says."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
        if body["prompt"] == "hang up":
            return
        status, content = ANSWERS[body["prompt"]]
        self._answer(status, content)

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "theirs"}]}')

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def stranger() -> Iterator[str]:
    Stranger.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
