"""Images that a client names by URL: only sites that the operator named are asked, and no name leads inside."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import SplitResult, urlsplit

from .. import __version__
from .errors import refusal

_AT_ONCE = 4
_TIMEOUT_S = 10.0
"""For all of it."""
_PORTS = {"http": 80, "https": 443}
_refusal = functools.partial(refusal, code="unsupported_value")


class Fetcher:
    """Fetches files of up to `most` bytes. It follows no redirect, and sends on nothing of the client's request."""

    def __init__(self, origins: tuple[str, ...], most: int) -> None:
        self._origins = frozenset(origin.lower() for origin in origins)
        self._most = most

    async def fetch(self, name: str, url: str | None) -> bytes:
        """The file that the field `name` refers to; ApiError if it is not allowed or not to be had."""
        if url is None:
            expected = 'a file in a form, a data URL, or {"image_url": "data:image/png;base64,..."}'
            raise _refusal(name, f"{name} must be {expected}. Identifiers of files and paths are not known here.")
        parts = self._allowed(name, url)
        work = functools.partial(self._get, name, parts)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _allowed(self, name: str, url: str) -> SplitResult:
        with contextlib.suppress(ValueError):  # Such as of a port of letters.
            parts = urlsplit(url)
            port = "" if parts.port in (None, _PORTS.get(parts.scheme)) else f":{parts.port}"
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            is_plain = url.isascii() and url.isprintable() and " " not in url and "@" not in parts.netloc
            if is_plain and parts.scheme in _PORTS and f"{parts.scheme}://{host}{port}" in self._origins:
                return parts
        remedy = "Send the image as a file in a form, or as a data URL (data:image/png;base64,...)."
        allowed = f"images are fetched from {', '.join(sorted(self._origins))} alone" if self._origins else (
            "no URL of a client is opened")  # fmt: skip
        raise _refusal(name, f"{name} names {url[:80]!r}: {allowed}. {remedy}")

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """Their own, so that a slow site holds up nothing else."""
        return ThreadPoolExecutor(_AT_ONCE, "samovar fetcher")

    def _get(self, name: str, parts: SplitResult) -> bytes:
        host = parts.hostname or ""
        try:
            with _connected(parts, _address(name, host, parts.port or _PORTS[parts.scheme])) as connection:
                path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
                connection.request("GET", path, headers={"User-Agent": f"samovar/{__version__}", "Accept": "image/*"})
                with connection.getresponse() as answer:
                    return self._content(name, host, answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise _refusal(name, f"{name} cannot be fetched from {host} within {_TIMEOUT_S:g} s: {reason}.") from error

    def _content(self, name: str, host: str, answer: http.client.HTTPResponse) -> bytes:
        if answer.status != 200:
            raise _refusal(name, f"{name}: {host} answered {answer.status}; only 200 with the file is taken.")
        content = answer.read(self._most + 1)
        if len(content) > self._most:
            raise _refusal(name, f"{name} is longer than {self._most:,} bytes. Send a smaller image.")
        if answer.length:  # What was announced and has not come.
            raise http.client.IncompleteRead(content)
        return content


def _address(name: str, host: str, port: int) -> tuple[str, int]:
    """Where a host is. A name must lead to public addresses alone: whoever has it may point it anywhere. An address is
    what the operator wrote."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host)), port
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    addresses = [ipaddress.ip_address(each.partition("%")[0]) for each in found]
    if not all(each.is_global and not each.is_multicast for each in addresses):
        raise _refusal(name, f"{name}: {host} leads to an address that is not public. Nothing is fetched from there.")
    return found[0], port


@contextlib.contextmanager
def _connected(parts: SplitResult, address: tuple[str, int]) -> Iterator[http.client.HTTPConnection]:
    """A connection to the address that was checked, not to what the name leads to by then. It ends in time, whatever
    the other side does."""
    connection = http.client.HTTPConnection(parts.hostname or "", address[1])
    with contextlib.ExitStack() as opened:
        opened.callback(connection.close)
        line = opened.enter_context(socket.create_connection(address, _TIMEOUT_S))
        if parts.scheme == "https":
            secure = ssl.create_default_context()
            name = parts.hostname
            line = opened.enter_context(secure.wrap_socket(line, server_hostname=name, do_handshake_on_connect=False))
        timer = threading.Timer(_TIMEOUT_S, _end, (line,))
        timer.daemon = True
        opened.callback(timer.cancel)
        timer.start()
        if isinstance(line, ssl.SSLSocket):
            line.do_handshake()
        connection.sock = line
        yield connection


def _end(line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # It may have ended by itself.
        line.shutdown(socket.SHUT_RDWR)
