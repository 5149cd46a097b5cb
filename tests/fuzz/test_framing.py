"""HTTP requests whose framing is wrong, on raw sockets, against a real server."""

from __future__ import annotations

import json
from random import Random

from server.running import RunningServer

from .asking import Watched
from .cases import Fuzz, fuzzed
from .changes import changed_bytes

BODY = json.dumps({"prompt": "a cat", "size": "16x16"}).encode()
FORM = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na cat\r\n--x--\r\n'
LENGTHS = [
    b"0",
    b"1",
    b"5",
    b"-1",
    b"+3",
    b"0x5",
    b" 7",
    b"1_0",
    b"99999999999999999999",
    b"",
    b"3, 3",
    b"1e3",
    b"\xb2",
]
HEADERS = [
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding:\tchunked", b"Transfer-Encoding : chunked", b"transfer-encoding: xchunked",
    b"Expect: 100-continue", b"Connection: close", b"Connection: upgrade", b"Upgrade: websocket", b"Upgrade: h2c",
    b"Content-Encoding: gzip", b"Host: evil.example", b"Host:", b"Authorization: Bearer x", b"Content-Type: text/plain",
    b"Content-Type: multipart/form-data", b"Content-Type: application/json; charset=utf-16", b" folded: header",
    b"No colon", b": no name", b"X: \x00", b"X: \r", b"X: " + b"a" * 70_000, b"Origin: null", b"Content-Length: 3",
    b"Range: bytes=0-1", b"Trailer: X",
]  # fmt: skip
METHODS = [b"PRI", b"CONNECT", b"GET GET", b"", b"p\xc3\xb6st", b"POST" * 3000, b"TRACE", b"PUT"]
PATHS = [b"*", b"//", b"/%00", b"/%", b"/..%2f..", b"http://x/live", b"/" + b"a" * 70_000, b"/\xff", b"?"]
SIZES = [b"", b"-1", b"0x9", b"fffffffffffffffff", b"zz", b"9;a=b", b"9" + b";a" * 20_000, b"0", b" 9"]


def request(random: Random) -> bytes:
    """A request that is right, or nearly."""
    path, kind, body = random.choice(
        [
            (b"/live", b"", b""),
            (b"/v1/models", b"", b""),
            (b"/v1/images/generations", b"application/json", BODY),
            (b"/v1/images/edits", b"multipart/form-data; boundary=x", FORM),
            (b"/v1/images/edits", b"application/x-www-form-urlencoded", b"prompt=a+cat"),
        ]
    )
    method = b"POST" if body else random.choice([b"GET", b"HEAD", b"OPTIONS"])
    if random.random() < 0.1:
        method = random.choice(METHODS)
    if random.random() < 0.1:
        path = random.choice(PATHS)
    version = random.choice([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 ", b"", b"HTTX/1.1"])
    headers = [b"Host: localhost"]
    if body:
        headers += [b"Content-Type: " + kind]
        if random.random() < 0.3:
            headers.append(random.choice(HEADERS[:3]))
            body = chunked(random, body)
        if random.random() < 0.7:
            exact = str(len(body)).encode()
            headers.append(b"Content-Length: " + (exact if random.random() < 0.6 else random.choice(LENGTHS)))
    for _ in range(random.choice([0, 0, 1, 1, 2, 200 if random.random() < 0.05 else 3])):
        headers.insert(random.randrange(len(headers) + 1), random.choice(HEADERS))
    end = b"\r\n" if random.random() < 0.9 else random.choice([b"\n", b"\r", b"\r\r\n", b"\n\r"])
    return end.join([b" ".join([method, path, version]), *headers, b"", b""]) + body


def chunked(random: Random, body: bytes) -> bytes:
    """A body in chunks, whose sizes may be wrong."""
    parts = []
    while body:
        part, body = body[:9], body[9:]
        size = b"%x" % len(part)
        if random.random() < 0.1:
            size = random.choice(SIZES)
        parts.append(size + b"\r\n" + part + random.choice([b"\r\n"] * 9 + [b"", b"\n"]))
    return b"".join([*parts, b"0\r\n", random.choice([b"", b"X: y\r\n", b"\x00\r\n"]), b"\r\n"])


@fuzzed("framing", 60)
def test_no_framing_takes_a_server_down(fuzz: Fuzz, servers: list[RunningServer]) -> None:
    watched = [Watched(server) for server in servers]
    for random in fuzz.cases():
        data = b"".join(request(random) for _ in range(random.choice([1, 1, 1, 2, 3])))
        if random.random() < 0.4:
            data = changed_bytes(random, data)
        with fuzz.trying(data, "http"):
            fuzz.ends[random.choice(watched).sent(data).partition("+")[0]] += 1
