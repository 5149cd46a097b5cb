"""Whatever is asked, a server answers below 500, and is still there afterwards."""

from __future__ import annotations

import re
import socket
from contextlib import suppress

import httpx

from server.running import RunningServer

ALLOWED = (503, 507)
"""What a client may cause beside its own errors: a server that is full, or an image that does not fit into memory."""


class Watched:
    """A server, and what of its log was read."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self._seen, self._asked = len(server.log), 0
        host, port = server.address.removeprefix("http://").split(":")
        self._place = (host, int(port))

    def sent(self, data: bytes, patience_s: float = 1.0) -> str:
        """Bytes on a connection of their own; returns what the server made of them."""
        with socket.create_connection(self._place, timeout=30) as connection:
            answer = b""
            with suppress(OSError):  # It may refuse before it has read everything.
                connection.sendall(data)
            connection.settimeout(patience_s)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(65536):
                    answer += part
        codes = [int(code) for code in re.findall(rb"HTTP/1\.[01] (\d{3})[ \r]", answer)]
        assert not answer or answer.startswith(b"HTTP/1."), answer[:200]
        assert all(code < 500 or code in ALLOWED for code in codes), answer[:500]
        self.check()
        return "+".join(map(str, codes)) or "closed"

    def answered(self, answer: httpx.Response) -> str:
        """The status of a well-formed answer."""
        assert answer.status_code < 500 or answer.status_code in ALLOWED, f"{answer.status_code} {answer.text[:500]}"
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], answer.text
        self.check()
        return str(answer.status_code)

    def check(self) -> None:
        """Nothing was logged that only a programmer could read, and from time to time: others are served."""
        lines = self.server.log[self._seen :]
        self._seen += len(lines)
        assert not any("Traceback" in line or "Exception" in line for line in lines), "".join(lines)
        assert self.server.process.poll() is None, self.server.text[-2000:]
        self._asked += 1
        if self._asked % 50 == 0:
            for name in ("live", "ready"):
                assert httpx.get(f"{self.server.address}/{name}", timeout=30).status_code == 200, name
