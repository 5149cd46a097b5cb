"""Behind the nginx of deploy/nginx.conf: what is left to a proxy is done, and nothing else is lost."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .running import PATIENCE_S, PROMPT, RunningServer, until

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
GENERATE = "/v1/images/generations"


@pytest.fixture(scope="module")
def proxy(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an nginx with our configuration, but for its ports and folders."""
    folder = tmp_path_factory.mktemp("nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = CONFIG.read_text()
    for before, after in (
        ("127.0.0.1:8091", server.address.removeprefix("http://")),
        ("listen 8080", f"listen 127.0.0.1:{port}"),
        ("/run/nginx-samovar.pid", f"{folder}/pid"),
        ("/var/log/nginx/samovar.log", f"{folder}/log"),
        ("/tmp/nginx-samovar", f"{folder}/bodies"),
    ):
        assert before in text, before
        text = text.replace(before, after)
    (folder / "nginx.conf").write_text(text)
    command = ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder), "-g", "daemon off;"]
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (folder / "out").read_text()
        try:
            return httpx.get(f"{address}/live").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(answers, "nginx answers")
        yield address
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def test_images_come_through_and_events_as_they_are_made(proxy: str) -> None:
    body = {"prompt": PROMPT, "num_inference_steps": 3, "seed": 1}
    with httpx.Client(base_url=proxy, timeout=PATIENCE_S) as http:
        assert http.post(GENERATE, json=body).json()["data"][0]["seed"] == 1
        with http.stream("POST", GENERATE, json=body | {"stream": True, "progress": True}) as answer:
            kinds = re.findall(r"event: (\S+)", "".join(answer.iter_text()))
    assert kinds[0] == "samovar.started"
    assert kinds[-1] == "image_generation.completed"


def test_who_leaves_frees_the_worker(proxy: str, server: RunningServer) -> None:
    body = {"prompt": PROMPT, "num_inference_steps": 50_000}
    with httpx.Client(base_url=proxy) as http, pytest.raises(httpx.ReadTimeout):
        http.post(GENERATE, json=body, timeout=httpx.Timeout(PATIENCE_S, read=1.0))
    until(lambda: server.status()["running"] == 0, "nothing runs")


def test_chunks_of_a_byte_reach_the_server_as_one_body(proxy: str) -> None:
    body = b'{"prompt": "a cat", "num_inference_steps": 2, "user": "%s"}' % (b"x" * 400)
    with connect(proxy) as one:
        one.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % GENERATE.encode())
        one.sendall(b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        one.sendall(b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n")
        answer = b""
        while part := one.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200")


def test_bodies_and_headers_have_limits(proxy: str) -> None:
    with httpx.Client(base_url=proxy, timeout=PATIENCE_S) as http:
        assert http.get("/live", headers={"X": "a" * 20_000}).status_code == 400
    with connect(proxy) as one:
        one.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")
        assert one.recv(65536).startswith(b"HTTP/1.1 413")


def test_one_client_has_few_connections_and_requests(proxy: str, server: RunningServer) -> None:
    """The last test: it uses up what this address may ask for."""
    slow = [connect(proxy) for _ in range(70)]
    for one in slow:
        one.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1" % GENERATE.encode())
    refused = [one for one in slow[64:] if one.recv(65536).startswith(b"HTTP/1.1 429")]
    assert refused
    assert httpx.get(f"{server.address}/live", timeout=PATIENCE_S).status_code == 200
    for one in slow:
        one.close()
    with httpx.Client(base_url=proxy, timeout=PATIENCE_S) as http:
        assert 429 in {http.get("/live").status_code for _ in range(200)}
