"""Images that a client names by URL: only sites that the operator named are asked, and no name leads inside."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from typing import Any
from urllib.parse import SplitResult, urlsplit

import h11

from .. import __version__
from .errors import ApiError

_AT_ONCE = 4
_TIMEOUT_S = 10.0
"""For all of it."""
_PORTS = {"http": 80, "https": 443}


class Fetcher:
    """Fetches files of up to `most` bytes. It follows no redirect, and sends on nothing of the client's request."""

    def __init__(self, origins: tuple[str, ...], most: int) -> None:
        self._origins = frozenset(origin.lower() for origin in origins)
        self._most = most
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def fetch(self, name: str, url: str | None) -> bytes:
        """The file that the field `name` refers to; ApiError if it is not allowed or not to be had."""
        if url is None:
            expected = 'a file in a form, a data URL, or {"image_url": "data:image/png;base64,..."}'
            raise _refusal(name, f" must be {expected}. Identifiers of files and paths are not known here.")
        parts = self._allowed(name, url)
        try:
            async with self._places, asyncio.timeout(_TIMEOUT_S):
                return await self._get(name, parts)
        except (OSError, h11.RemoteProtocolError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise _refusal(
                name, f" cannot be fetched from {parts.hostname} within {_TIMEOUT_S:g} s: {reason}."
            ) from error

    def _allowed(self, name: str, url: str) -> SplitResult:
        with contextlib.suppress(ValueError):  # Such as of a bracket that does not close.
            parts, is_plain = urlsplit(url), url.isascii() and url.isprintable() and " " not in url
            if is_plain and f"{parts.scheme}://{parts.netloc.lower()}" in self._origins and parts.scheme in _PORTS:
                return parts
        remedy = "Send the image as a file in a form, or as a data URL (data:image/png;base64,...)."
        known = f"images are fetched from {', '.join(sorted(self._origins))} alone"
        allowed = known if self._origins else "no URL of a client is opened"
        raise _refusal(name, f" names {url[:80]!r}: {allowed}. {remedy}")

    async def _get(self, name: str, parts: SplitResult) -> bytes:
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        # To the address that was checked, not to what the name leads to by then.
        secure: Any = {"ssl": ssl.create_default_context(), "server_hostname": host} if parts.scheme == "https" else {}
        reader, writer = await asyncio.open_connection(await _address(name, host, port), port, **secure)
        try:
            headers = {"Host": parts.netloc, "User-Agent": f"samovar/{__version__}", "Accept": "image/*"}
            target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
            request = h11.Request(method="GET", target=target, headers=list({**headers, "Connection": "close"}.items()))
            connection, content = h11.Connection(h11.CLIENT), bytearray()
            writer.write(connection.send(request) or b"")
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(2**16))
                elif isinstance(event, h11.Response) and event.status_code != 200:
                    only = "only 200 with the file is taken"
                    raise _refusal(name, f": {host} answered {event.status_code}; {only}.")
                elif isinstance(event, h11.Data):
                    content += event.data
                    if len(content) > self._most:
                        raise _refusal(name, f" is longer than {self._most:,} bytes. Send a smaller image.")
            return bytes(content)
        finally:
            writer.transport.abort()


async def _address(name: str, host: str, port: int) -> str:
    """Where a host is. A name must lead to public addresses alone: whoever has it may point it anywhere. An address is
    what the operator wrote."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    if not all(each.is_global and not each.is_multicast for each in addresses):
        raise _refusal(name, f": {host} leads to an address that is not public. Nothing is fetched from there.")
    return str(found[0][4][0])


def _refusal(name: str, what: str) -> ApiError:
    return ApiError(f"{name}{what}", name, "unsupported_value")
