"""Which URLs of clients are opened: real sites on this machine, asked as a request would."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from samovar.server import fetch as fetching
from samovar.server.errors import ApiError
from samovar.server.fetch import Fetcher

FILE = b"x" * 5000


class Site(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        Site.asked.append(self.path)
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/file")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/missing" else 200)
        if self.path != "/endless":
            self.send_header("Content-Length", str(len(FILE) + (self.path == "/short")))
        self.end_headers()
        self.wfile.write(FILE)
        with contextlib.suppress(OSError):  # Whoever asks leaves.
            while self.path == "/endless":
                self.wfile.write(FILE)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


@pytest.fixture
def site() -> Iterator[str]:
    Site.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def fetch(url: str | None, *origins: str, most: int = 10_000) -> bytes:
    return asyncio.run(Fetcher(origins, most).fetch("input_reference", url))


def refusal(url: str | None, *origins: str) -> str:
    with pytest.raises(ApiError) as caught:
        fetch(url, *origins)
    assert (caught.value.status, caught.value.param) == (400, "input_reference")
    return caught.value.message


def test_a_file_comes_from_a_site_that_the_operator_named(site: str) -> None:
    assert fetch(f"{site}/file?size=1", site, "https://example.com") == FILE
    assert Site.asked == ["/file?size=1"]


def test_no_other_is_asked(site: str) -> None:
    assert "no URL of a client is opened. Send the image as a file in a form" in refusal(f"{site}/file")
    other = "https://images.example.com"
    for url in (
        f"{site}/file", "https://images.example.com:444/a", "http://images.example.com/a", "file:///etc/passwd",
        "https://a@images.example.com/", "https://images.example.com/a b", "https://images.example.com:x/",
        "https://images.example.com\r\n/", "https://images.example.com.evil.org/", "//images.example.com/", "a.png",
    ):  # fmt: skip
        assert "images are fetched from https://images.example.com alone" in refusal(url, other), url
    assert "Identifiers of files" in refusal(None, site)
    assert Site.asked == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "answered 404"),
        ("moved", "answered 302"),
        ("endless", "is longer than 10,000 bytes"),
        ("short", "cannot be fetched"),
    ],
)
def test_what_is_not_a_file_is_refused(site: str, path: str, message: str) -> None:
    assert message in refusal(f"{site}/{path}", site)
    assert Site.asked == [f"/{path}"]


def test_a_name_does_not_lead_inside(site: str) -> None:
    named = site.replace("127.0.0.1", "localhost")
    assert "leads to an address that is not public" in refusal(f"{named}/file", named)
    assert Site.asked == []


def test_a_site_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "cannot be fetched from 127.0.0.1 within 0.2 s" in refusal(address, address)
