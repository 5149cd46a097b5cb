"""The addresses, and what is answered to requests that are wrong in many ways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from samovar.omni import AsyncOmni
from samovar.server.app import create_app
from samovar.server.settings import ServerConfig
from samovar.server.state import AppState

from .running import PROMPT, RunningServer, running

GENERATE = "/v1/images/generations"


def ask(*requests: tuple[str, str], state: AppState | None = None, **more: Any) -> list[httpx.Response]:
    """Answers of a server whose engine was never started."""
    app = create_app(state or AppState(AsyncOmni("emoji", device="cpu"), ServerConfig()))

    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return [await http.request(method, path, **more) for method, path in requests]

    return asyncio.run(all_of_them())


def test_a_server_that_loads_says_so() -> None:
    live, ready, health, models, status = ask(
        ("GET", "/live"), ("GET", "/ready"), ("GET", "/health"), ("GET", "/v1/models"), ("GET", "/v1/samovar/status")
    )
    assert [live.status_code, ready.status_code, health.status_code] == [200, 503, 200]
    assert ready.json()["status"] == health.json()["status"] == "loading"
    assert (ready.json()["replicas"], ready.json()["replicas_ready"]) == (1, 0)
    assert models.json()["data"][0]["id"] == "emoji"
    assert status.json()["problem"] == "loading"


def test_a_server_that_ends_before_it_has_loaded_says_so() -> None:
    state = AppState(AsyncOmni("emoji", device="cpu"), ServerConfig(), phase="draining")
    body = {"prompt": PROMPT}
    for answer in ask(("GET", "/v1/samovar/status"), ("POST", GENERATE), state=state, json=body):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


def test_what_can_be_asked_for_is_a_page_without_scripts() -> None:
    (page,) = ask(("GET", "/docs"))
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/images/generations" in page.text
    assert "<script" not in page.text


def test_health_may_be_asked_without_a_body() -> None:
    assert [(answer.status_code, answer.content) for answer in ask(("HEAD", "/live"), ("HEAD", "/health"))] == [
        (200, b""),
        (200, b""),
    ]
    assert ask(("HEAD", "/ready"))[0].status_code == 503


def test_the_page_is_whole_and_loads_nothing_from_elsewhere() -> None:
    (page,) = ask(("GET", "/"))
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    names = [part.split('"')[0] for part in page.text.split('="/')[1:]]
    assert {"page/page.css", "page/page.js", "page/icon.svg"} <= set(names)
    scripts = [f"/page/{name}.js" for name in ("api", "compare", "figures", "history", "in_step", "timeline")]
    files = ask(*(("GET", path) for path in [*(f"/{name}" for name in names), *scripts]))
    assert {file.status_code for file in files} == {200}
    for file in [page, *files]:
        outside = [word for word in ("https://", "//cdn", "@import", "eval(", "innerHTML") if word in file.text]
        assert not outside, file.url


def test_every_error_has_openais_body() -> None:
    tries = [
        ("GET", "/nowhere", 404), ("GET", "/v1/images/generations", 405), ("POST", "/live", 405),
        ("BREW", "/", 405), ("GET", "/page/../app.py", 404), ("GET", "/page/%2e%2e/app.py", 404),
        ("GET", "/page//etc/passwd", 404), ("GET", "/v1/models/other", 404), ("GET", "/v1/models/..%2f..%2fetc", 404),
        ("GET", "/redoc", 404), ("GET", "/docs/x", 404), ("POST", "/v1/images/generations", 415),
        ("GET", "/%00", 404), ("GET", "/page/page.js%00.html", 404), ("GET", "/v1/images/../../etc/passwd", 404),
    ]  # fmt: skip
    for (method, path, status), answer in zip(tries, ask(*((m, p) for m, p, _ in tries)), strict=True):
        assert answer.status_code == status, (method, path)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.headers["x-request-id"]) == 32


# ------------------------------------------------------------------------------------------------ a real server


def malformed() -> list[bytes]:
    """Bodies of which none must be taken."""
    raw = [
        b'{"prompt": "a", "lora": {"name": "b", "name": "b"}}', json.dumps(dict.fromkeys(map(str, range(41)))).encode(),
        b"", b" ", b"{", b"}", b"{]", b"null", b"true", b"3", b'"a"', b"[]", b"[{}]", b"{}", b"\x00", b"\xff\xfe",
        b'{"prompt": "a"', b'{"prompt": "a}', b'{"prompt" "a"}', b"{'prompt': 'a'}", b'{"prompt": "a",}', b"prompt=a",
        b'{"prompt": "a"}{"prompt": "a"}', b'{"prompt": "a"} x', b'{"prompt": "\xff"}', b'{"prompt": "\xc3"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "\\x41"}', b'{"prompt": "a\n"}', b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"), '{"prompt": "a"}'.encode("utf-32"), b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "n": 1, "n": 1}', b'{"prompt": "a", "\\u006e": 1, "n": 1}', b"[" * 10_000, b'{"a":' * 10_000,
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "guidance_scale": NaN}', b'{"prompt": "a", "guidance_scale": Infinity}',
        b'{"prompt": "a", "guidance_scale": -Infinity}', b'{"prompt": "a", "guidance_scale": 1e309}',
        b'{"prompt": "a", "guidance_scale": 1e}', b'{"prompt": "a", "n": 01}', b'{"prompt": "a", "n": +1}',
        b'{"prompt": "a", "n": 0x1}', b'{"prompt": "a", "n": 1_0}', b"<xml/>", b"--boundary\r\n",
    ]  # fmt: skip
    wrong_values: dict[str, list[Any]] = {
        "prompt": ["", " ", None, 1, [], {}, "x" * 32_001],
        "n": [0, 11, 1.5, "1", True, 2**63],
        "size": ["", "512", "0x0", "1x1", "1023x1023", "99999x99999", "8192x8192", "1_000x512", "\uff15x5", "0512x512",
                 "512X512", "512x512 ", "512x512\n", "-5x5", "16x16x16", "5.0x5", 512, [16, 16], "x" * 10**6],
        "seed": [-1, 2**63, 1.0, "7", True],
        "num_inference_steps": [0, 100_001, 1.5, "4", False],
        "guidance_scale": [-1, 101, "3", True],
        "true_cfg_scale": [-0.5, 1000, {}],
        "negative_prompt": [1, True, "x" * 32_001],
        "response_format": ["url", 1],
        "output_format": ["gif", "PNG", "../png"],
        "output_compression": [50, -1, "9"],
        "stream": ["true", 1],
        "partial_images": [1, 4, "2", True],
        "progress": [True, 1],
        "quality": ["best", 1],
        "tolerance": ["fats", -1, 2, True, 0.05],
        "background": ["red"],
        "moderation": [1],
        "style": ["vivd"],
        "input_fidelity": ["medium"],
        "model": ["../emoji", "/etc", "x" * 600, 1, "tiny\x00"],
        "deadline": [0, "5", True, 1e9],
        "priority": [101, 1.5, "high"],
        "cache": ["false", 0],
        "max_sequence_length": [0, 5000, 8.0],
        "user": [1, "x" * 600],
        "lora": ["pixle", "", "/etc/passwd", 1, {}, {"name": "pixel", "path": "/etc/passwd"}, ["pixel"] * 9,
                 {"name": "pixel", "scale": 1e9}, ["pixel", "pixel"], [1]],
    }  # fmt: skip
    for name, values in wrong_values.items():
        raw += [json.dumps({"prompt": PROMPT, name: value}).encode() for value in values]
    unknown = ["sed", "steps", "path", "url", "callback", "__proto__", "", "Prompt", "prompt ", "extra_body", "image",
               "trust_remote_code"]  # fmt: skip
    return raw + [json.dumps({"prompt": PROMPT, name: "x"}).encode() for name in unknown]


def test_malformed_bodies_get_an_error_and_nothing_else(server: RunningServer, record_property: Any) -> None:
    bodies = malformed()
    assert len(bodies) >= 130
    made = server.status()["images"]
    with server.client(headers={"Content-Type": "application/json"}) as http:
        for body in bodies:
            answer = http.post(GENERATE, content=body)
            assert 400 <= answer.status_code < 500, (body[:200], answer.text[:300])
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            assert "Traceback" not in answer.text
            assert len(answer.content) < 2000
    assert server.status()["images"] == made
    assert "Traceback" not in server.text
    record_property("count", f"malformed bodies refused: {len(bodies)}")


def test_sizes_out_of_bounds_take_no_memory(server: RunningServer) -> None:
    with server.client() as http:
        http.post(GENERATE, json={"prompt": PROMPT})
        before = server.resident_bytes()
        for size in ("1x1", "1023x1023", "99999x99999", "65537x16", "7680x4320"):
            for number in (1, 10):
                answer = http.post(GENERATE, json={"prompt": PROMPT, "size": size, "n": number})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "size"), size
    assert server.resident_bytes() - before < 20e6


def test_long_bodies_are_not_taken_in(server: RunningServer) -> None:
    def endless() -> Any:
        for _ in range(50):
            yield bytes(2**20)

    headers = {"Content-Type": "application/json"}
    with server.client(headers=headers) as http:
        http.get("/live")
        before = server.resident_bytes()
        megabyte = json.dumps({"prompt": "x" * 1_000_000}).encode()
        answer = http.post(GENERATE, content=megabyte)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        told = http.post(GENERATE, content=bytes(50 * 2**20))
        assert (told.status_code, told.json()["error"]["code"]) == (413, "body_too_large")
    with server.client(headers=headers) as http:
        untold = http.post(GENERATE, content=endless())
        assert (untold.status_code, untold.json()["error"]["code"]) == (413, "body_too_large")
    assert server.resident_bytes() - before < 20e6


def test_no_path_of_a_client_is_opened(server: RunningServer) -> None:
    """By raw sockets, as clients tidy paths up before they send them."""
    host, port = server.address.removeprefix("http://").split(":")
    paths = ["/../../../etc/passwd", "/page/../../etc/passwd", "/page/%2e%2e%2f%2e%2e%2fetc/passwd", "/page/..\\x",
             "/page//etc/passwd", "/page/page.js/../../app.py", "/v1/models/../../etc", "/page/%00", "//etc/passwd",
             "/page/....//etc/passwd", "/v1/images/generations/../edits", "/page/%252e%252e/app.py"]  # fmt: skip
    for path in paths:
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while chunk := raw.recv(65536):
                answer += chunk
        assert answer.split(b" ")[1] in (b"400", b"404"), path
        assert b"root:" not in answer
        assert b'"error"' in answer


def test_what_is_not_http_is_refused(server: RunningServer) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    behind_head = b"HEAD /live HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n"
    for junk in (
        behind_head,
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET  /\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(junk)
            answer = b""
            while chunk := raw.recv(65536):
                answer += chunk
        assert answer.startswith(b"HTTP/1.1 400"), junk
    assert "Traceback" not in server.text


@pytest.mark.slow
def test_schemathesis_finds_nothing(folder: Path) -> None:
    """Requests made up from /openapi.json, good ones and bad ones, NUL and all."""
    import schemathesis

    with running(folder, "--max-steps", "4", "--max-images", "2", "--max-pixels", "4096", "--quiet") as server:
        schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
        for operation in schema.get_all_operations():
            for mode in schemathesis.GenerationMode:
                made_up_requests_hold(operation.ok(), mode)
        assert "Traceback" not in server.text


def made_up_requests_hold(operation: Any, mode: Any, examples: int = 200) -> None:
    """Answers have the status, type and body that are described; what is wrong is refused; nothing is a 5xx."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis.specs.openapi import checks as kinds

    def nothing_failed(context: Any, response: Any, case: Any) -> None:
        """A deadline of a millisecond may pass, and that is a 503 as it should be."""
        assert response.status_code < 500 or response.json()["error"]["code"] == "queue_timeout", response.text

    checks = [
        nothing_failed,
        kinds.content_type_conformance,
        kinds.response_schema_conformance,
        kinds.status_code_conformance,
        *([kinds.negative_data_rejection] if mode.is_negative else []),
    ]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def holds(case: Any) -> None:
        case.call_and_validate(checks=checks, timeout=120)

    # A body can be wrong. Without one there is nothing to send, or a name, and no text is no name.
    may_have_none = mode.is_negative and not operation.body
    with contextlib.suppress(Unsatisfiable) if may_have_none else contextlib.nullcontext():
        try:
            holds()
        except ValueError as error:  # schemathesis 4.32 cannot check the files in bad forms that it has made.
            if not mode.is_negative or "Unsupported type: 'Binary'" not in str(error):
                raise


@pytest.mark.parametrize("warms_up", ["warm_up: true", pytest.param("compile: eager", marks=pytest.mark.slow)])
def test_a_tuned_setting_serves_ordinary_clients(folder: Path, tmp_path: Path, warms_up: str) -> None:
    """The steps of its schedule and its size are the defaults; the server is warm before it says that it is ready."""
    tuned, config = tmp_path / "setting.json", tmp_path / "samovar.yaml"
    schedule = "##" + ".#" * 4
    tuned.write_text(json.dumps({"cache": {"schedule": schedule, "backend": "tea_cache"}, "num_inference_steps": 10,
                                 "height": 32}))  # fmt: skip
    config.write_text(f"{warms_up}\nserver: {{served_model_name: [flux, flux-small]}}\n")
    options = ("--cache-config", str(tuned), "--config", str(config), "--default-size", "16x16", "--step-timeout", "7")
    with running(folder, *options) as server, server.client() as http:
        status = server.status()
        assert status["steps_computed"] == 0, "the warm-up is no request"
        assert (status["defaults"]["num_inference_steps"], status["defaults"]["height"]) == (10, 16)
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["flux", "flux-small"]
        assert http.get("/v1/models/flux-small").json()["id"] == "flux-small"
        made = http.post(GENERATE, json={"prompt": PROMPT, "model": "flux-small"})
        assert (made.status_code, made.json()["size"]) == (200, "16x16")
        status = server.status()
        assert (status["steps_computed"], status["steps_skipped"]) == (6, 4), "as in the schedule"
        refused = http.post(GENERATE, json={"prompt": PROMPT, "num_inference_steps": 4})
        assert refused.status_code == 400
        assert 'schedule for 10 steps. Leave it out, or compute every step with "cache": false' in refused.text.replace(
            "\\", ""
        )
        exact = http.post(GENERATE, json={"prompt": PROMPT, "num_inference_steps": 4, "cache": False})
        assert exact.status_code == 200
        assert http.post(GENERATE, json={"prompt": PROMPT, "model": "tiny"}).status_code == 404
