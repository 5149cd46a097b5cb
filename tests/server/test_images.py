"""Images over HTTP, asked for by OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import PIL.Image
import pytest
import torch
from starlette.requests import ClientDisconnect, Request

from pipelines import PIPELINES, tiny_flux_pipeline
from samovar.engine import Job, OmniDiffusionSamplingParams
from samovar.omni import AsyncOmni
from samovar.server.app import create_app
from samovar.server.errors import ApiError
from samovar.server.request import unless_gone
from samovar.server.settings import ServerConfig
from samovar.server.state import AppState

from .attacks import png_of
from .conftest import KEY
from .running import PATIENCE_S, PROMPT, RunningServer, running, until

GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"
LONG = 50_000
"""Steps that nobody waits for."""


def client(server: RunningServer, key: str = "none", retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=retries, timeout=PATIENCE_S)


def picture(b64: str | None) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(base64.b64decode(b64 or "")))


@contextmanager
def long_request(server: RunningServer, **values: Any) -> Iterator[Iterator[str]]:
    """A stream that would last for minutes, entered when it has begun, and left by going away."""
    body = {"prompt": PROMPT, "num_inference_steps": LONG, "stream": True, "progress": True, **values}
    with server.client() as http, http.stream("POST", GENERATE, json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(line for line in lines if "samovar.progress" in line)
        yield lines


def counter(server: RunningServer, name: str) -> float:
    text = httpx.get(f"{server.address}/metrics", timeout=PATIENCE_S).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def is_idle(server: RunningServer) -> bool:
    status = server.status()
    return bool(status["running"] == status["queued"] == 0)


def test_the_client_gets_images(server: RunningServer) -> None:
    extra = {"seed": 7, "num_inference_steps": 4, "guidance_scale": 3.5}
    answer = client(server).images.generate(prompt=PROMPT, n=2, size="24x16", model="tiny", extra_body=extra)
    assert answer.data is not None
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2 + 4
    assert [picture(item.b64_json).size for item in answer.data] == [(24, 16)] * 2
    assert [item.seed for item in answer.data] == [7, 8]  # type: ignore[attr-defined]
    alone = client(server).images.generate(prompt=PROMPT, size="24x16", extra_body={**extra, "seed": 8})
    assert alone.data is not None
    assert alone.data[0].b64_json == answer.data[1].b64_json
    for kind in ("jpeg", "webp"):
        other = client(server).images.generate(prompt=PROMPT, output_format=kind, output_compression=50)  # type: ignore[call-overload]
        assert picture(other.data[0].b64_json).format == kind.upper()


def test_a_image_without_the_cache_is_the_exact_one(server: RunningServer, folder: Path) -> None:
    import torch
    from diffusers import FluxPipeline

    body = {"prompt": PROMPT, "seed": 3, "num_inference_steps": 12, "cache": False}
    with server.client() as http:
        exact = http.post(GENERATE, json=body).json()
        cached = http.post(GENERATE, json=body | {"cache": True}).json()
    assert exact["samovar"]["cache"] == []
    assert cached["samovar"]["cache"] != []
    pipe = FluxPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    bare = pipe(PROMPT, num_inference_steps=12, height=16, width=24, max_sequence_length=8,
                generator=torch.Generator("cpu").manual_seed(3)).images[0]  # fmt: skip
    assert picture(exact["data"][0]["b64_json"]).tobytes() == bare.tobytes()


def test_a_request_uses_the_adapters_that_it_names(server: RunningServer, folder: Path, lora: dict[str, str]) -> None:
    """The bits of diffusers, whatever was asked for before; no path of a client is opened."""
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    expected = {}
    for name in (*lora, None):
        if name is not None:
            pipe.load_lora_weights(lora[name])
        settings = {"height": 16, "width": 24, "num_inference_steps": 3, "max_sequence_length": 8}
        expected[name] = pipe(PROMPT, generator=torch.Generator().manual_seed(7), **settings).images[0].tobytes()
        pipe.unload_lora_weights()
    assert len(set(expected.values())) == 3
    models = httpx.get(f"{server.address}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert [(model["id"], model.get("parent")) for model in models] == [
        ("tiny", None),
        ("pixel", "tiny"),
        ("ink", "tiny"),
    ]
    orders: list[tuple[str | None, dict[str, Any]]] = [
        ("pixel", {"lora": "pixel"}), ("ink", {"lora": {"name": "ink", "scale": 1}}), (None, {}),
        ("ink", {"lora": ["ink"]}), ("pixel", {"model": "pixel"}), (None, {"model": "tiny"}),
    ]  # fmt: skip
    for name, how in orders:
        body = {"prompt": PROMPT, "seed": 7, "cache": False, **how}
        answer = httpx.post(f"{server.address}{GENERATE}", json=body, timeout=PATIENCE_S).json()
        assert picture(answer["data"][0]["b64_json"]).tobytes() == expected[name], how
        assert answer["samovar"]["lora"] == ([] if name is None else [{"name": name, "scale": 1.0}])
    assert server.status()["adapters"] == ["pixel", "ink"]
    with pytest.raises(openai.BadRequestError, match=r"'pixle' is not a registered adapter. Did you mean 'pixel'"):
        client(server).images.generate(prompt=PROMPT, extra_body={"lora": "pixle"})
    with pytest.raises(openai.BadRequestError, match="model names the adapter 'pixel', and lora names others"):
        client(server).images.generate(prompt=PROMPT, model="pixel", extra_body={"lora": "ink"})


def test_the_client_reads_a_stream(server: RunningServer) -> None:
    extra = {"num_inference_steps": 6, "seed": 1}
    stream = client(server).images.generate(prompt=PROMPT, stream=True, partial_images=2, extra_body=extra)
    events = list(stream)
    assert [event.type for event in events] == [*["image_generation.partial_image"] * 2, "image_generation.completed"]
    assert [getattr(event, "partial_image_index", None) for event in events] == [0, 1, None]
    whole = client(server).images.generate(prompt=PROMPT, extra_body=extra)
    assert whole.data is not None
    assert events[-1].b64_json == whole.data[0].b64_json


def test_a_stream_tells_every_step_to_those_who_ask(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "num_inference_steps": 12, "stream": True, "progress": True}
    with server.client() as http, http.stream("POST", GENERATE, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    steps = [event for event in events if event["type"] == "samovar.progress"]
    assert events[0]["type"] == "samovar.started"
    assert [event["step"] for event in steps] == list(range(1, 13))
    assert all(isinstance(event["is_computed"], bool) for event in steps)
    assert events[-1]["type"] == "image_generation.completed"
    assert events[-1]["samovar"]["memory_bytes"] > 0


def test_errors_have_their_types(server: RunningServer, guarded: RunningServer) -> None:
    images = client(server).images
    with pytest.raises(openai.BadRequestError) as bad:
        images.generate(prompt=PROMPT, extra_body={"sed": 4})
    assert (bad.value.param, bad.value.code) == ("sed", "unknown_field")
    with pytest.raises(openai.BadRequestError, match="must be a multiple of 4") as bad:
        images.generate(prompt=PROMPT, size="1023x1023")
    assert bad.value.param == "size"
    with pytest.raises(openai.BadRequestError, match="is not a known field"):
        images.generate(prompt=PROMPT, extra_body={"strength": 0.5})
    with pytest.raises(openai.NotFoundError) as missing:
        images.generate(prompt=PROMPT, model="../../etc/passwd")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client(guarded, "wrong").images.generate(prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="only makes images from text"):
        images.edit(image=png(), prompt=PROMPT)


def test_a_late_request_is_given_up(server: RunningServer) -> None:
    with long_request(server), pytest.raises(openai.InternalServerError) as late:
        client(server).images.generate(prompt=PROMPT, extra_body={"deadline": 0.3})
    assert (late.value.status_code, late.value.code) == (503, "queue_timeout")
    until(lambda: is_idle(server), "the long request ends with its client")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_goes_away_frees_its_place(server: RunningServer, is_streamed: bool) -> None:
    before = counter(server, "samovar_steps_total")
    if is_streamed:
        with long_request(server):
            pass
    else:
        body = {"prompt": PROMPT, "num_inference_steps": LONG}
        with server.client() as http, pytest.raises(httpx.ReadTimeout):
            http.post(GENERATE, json=body, timeout=httpx.Timeout(PATIENCE_S, read=1.0))
    until(lambda: is_idle(server), "nothing is running")
    made = counter(server, "samovar_steps_total") - before
    assert 0 < made < LONG / 5
    assert counter(server, 'samovar_failures_total{code="cancelled"}') >= 1
    assert client(server).images.generate(prompt=PROMPT).data


def test_the_queue_has_an_end_and_the_client_tries_again(server: RunningServer) -> None:
    """200 at once on a queue of 16: one runs, 16 wait, the others are told when to come back."""
    refused = 'samovar_requests_total{method="POST",route="/v1/images/generations",status="429"}'
    before = counter(server, refused)
    limits = httpx.Limits(max_connections=300)
    with ThreadPoolExecutor(200) as pool, server.client(limits=limits) as http:
        with long_request(server):
            answers = [pool.submit(http.post, GENERATE, json={"prompt": PROMPT}) for _ in range(199)]
            until(lambda: counter(server, refused) - before >= 183, "183 are refused")
            assert (server.status()["queued"], server.status()["running"]) == (16, 1)
            patient = pool.submit(client(server, retries=5).images.generate, prompt=PROMPT)
            until(lambda: counter(server, refused) - before >= 184, "one more is refused, and tries again")
            long = http.post(GENERATE, json={"prompt": "a" * 400_000})  # Refused before it is read: it is no prompt.
            assert (long.status_code, http.get("/live").status_code) == (429, 200)
        done = [answer.result(PATIENCE_S) for answer in answers]
        assert sorted(answer.status_code for answer in done) == [200] * 16 + [429] * 183
        for answer in done:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "queue_full"
        assert patient.result(PATIENCE_S).data


def test_a_worker_that_dies_costs_one_answer_and_the_client_tries_again(server: RunningServer) -> None:
    restarts = server.status()["restarts"]
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(
            client(server, retries=6).images.generate, prompt=PROMPT, extra_body={"num_inference_steps": 300, "seed": 5}
        )
        until(lambda: server.status()["running"] == 1, "it runs")
        before = counter(server, "samovar_requests_total")
        busiest = max(server.workers(), key=lambda worker: sum(worker.cpu_times()[:2]))
        busiest.kill()
        answer = patient.result(PATIENCE_S)
    assert counter(server, "samovar_requests_total") > before
    again = client(server, retries=6).images.generate(prompt=PROMPT, extra_body={"num_inference_steps": 300, "seed": 5})
    assert answer.data is not None
    assert again.data is not None
    assert answer.data[0].b64_json == again.data[0].b64_json
    until(lambda: httpx.get(f"{server.address}/ready", timeout=PATIENCE_S).status_code == 200, "it is ready again")
    assert server.status()["restarts"] >= restarts


# ------------------------------------------------------------------------------------------------ edits


def png(size: tuple[int, int] = (24, 16), colour: str = "teal") -> tuple[str, bytes, str]:
    file = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(file, "PNG")
    return "../../etc/passwd", file.getvalue(), "image/png"


def test_the_client_edits_a_image(guarded: RunningServer) -> None:
    images = client(guarded, KEY).images
    extra = {"seed": 3, "num_inference_steps": 4, "strength": 0.6}
    answer = images.edit(image=png((32, 16)), prompt=PROMPT, n=1, extra_body=extra)
    assert answer.data is not None
    assert picture(answer.data[0].b64_json).size == (32, 16)
    other = images.edit(image=png((32, 16), "red"), prompt=PROMPT, extra_body=extra)
    assert other.data is not None
    assert other.data[0].b64_json != answer.data[0].b64_json
    events = list(images.edit(image=png(), prompt=PROMPT, stream=True, partial_images=1, extra_body=extra))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


def test_bad_forms_are_refused(guarded: RunningServer) -> None:
    good = {"image": png()}
    with guarded.client(headers={"Authorization": f"Bearer {KEY}"}) as http:
        for fields, files, param in (
            ({"prompt": PROMPT}, {"image": ("a.png", b"no picture", "image/png")}, "image"),
            ({"prompt": PROMPT}, {"image": ("a.png", png_of(50_000, 50_000, bytes(1000)), "image/png")}, "image"),
            ({"prompt": PROMPT, "n": "1_0"}, good, "n"),
            ({"prompt": PROMPT, "url": "http://169.254.169.254/"}, good, "url"),
            ({"prompt": PROMPT, "image": "file:///etc/passwd"}, {"mask": png()}, "image"),
            ({"prompt": PROMPT}, {"mask": png()}, "image"),
            ({"prompt": PROMPT}, {"pose": png()}, "pose"),
            ({"prompt": PROMPT, "mask": "file:///etc/passwd"}, good, "mask"),
            ({"prompt": PROMPT}, {**good, "mask": png()}, "mask"),
            ({}, good, "prompt"),
        ):
            answer = http.post(EDIT, data=fields, files=files)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert http.post(EDIT, json={"prompt": PROMPT}).status_code == 415
        broken = {"Content-Type": "multipart/form-data; boundary=x"}
        assert http.post(EDIT, content=b"--y\r\nnonsense", headers=broken).status_code == 400


@pytest.mark.slow
def test_a_mask_says_what_is_redrawn(tmp_path: Path) -> None:
    """Given as a file, it is the same as the transparent part of the image, and as what diffusers makes with it."""
    from diffusers import FluxInpaintPipeline

    pipe = FluxInpaintPipeline(**tiny_flux_pipeline().components)
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(tmp_path / "painter")
    size, settings = (32, 16), {"num_inference_steps": 2, "max_sequence_length": 8, "strength": 1.0}
    image, mask = PIL.Image.linear_gradient("L").resize(size).convert("RGB"), PIL.Image.new("L", size)
    mask.paste(255, (0, 0, 16, 16))
    see_through = image.copy()
    see_through.putalpha(mask.point(lambda level: 255 - level))
    generator = torch.Generator().manual_seed(3)
    call = {"image": image, "mask_image": mask, "width": 32, "height": 16, "generator": generator, **settings}
    expected = pipe(PROMPT, **call).images[0].tobytes()
    with running(tmp_path / "painter") as server:
        images = client(server).images
        plain = as_file(image)
        openais = PIL.Image.new("RGBA", size, "white")  # Transparent where the image is redrawn, as OpenAI has it.
        openais.putalpha(see_through.getchannel("A"))
        masks = (as_file(mask), as_file(openais), as_file(mask.convert("RGBA")))
        for given in (*({"image": plain, "mask": each} for each in masks), {"image": as_file(see_through)}):
            made = images.edit(prompt=PROMPT, extra_body={"seed": 3, **settings}, **given)
            assert made.data is not None
            assert picture(made.data[0].b64_json).tobytes() == expected
        with pytest.raises(openai.BadRequestError, match="needs a mask, or an image with an alpha channel"):
            images.edit(prompt=PROMPT, image=as_file(image))
        with pytest.raises(openai.BadRequestError, match="FluxInpaintPipeline redraws one image, not several"):
            images.edit(prompt=PROMPT, image=[as_file(image)] * 2, mask=as_file(mask))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_several_images_are_edited_together(tmp_path: Path) -> None:
    """By a tiny FLUX.2: which layers of its text encoder are used is a default of the model."""
    klein = PIPELINES["flux2-klein"]
    klein.build(0).save_pretrained(tmp_path)
    options = {"text_encoder_out_layers": klein.settings["text_encoder_out_layers"]}
    (tmp_path / "samovar.json").write_text(json.dumps({"options": options}))
    one, two = (as_file(PIL.Image.new("RGB", (64, 64), colour)) for colour in ("red", "blue"))
    extra = {"seed": 3, "num_inference_steps": 2, "max_sequence_length": 16}
    with running(tmp_path) as server:
        made = [
            client(server).images.edit(prompt=PROMPT, image=given, size="64x64", extra_body=extra)  # type: ignore[call-overload]
            for given in ([one, two], [one], one, [two, one], [one, two])
        ]
    contents = [each.data[0].b64_json for each in made]
    assert contents[0] == contents[4]
    assert contents[1] == contents[2]
    assert len(set(contents)) == 3


def as_file(image: PIL.Image.Image) -> tuple[str, bytes, str]:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "a.png", file.getvalue(), "image/png"


def test_other_arguments_of_the_pipeline_can_be_set(server: RunningServer) -> None:
    """Within limits: what says how much is computed has names of its own."""
    body = {"prompt": PROMPT, "seed": 3, "cache": False}
    with server.client() as http:
        plain, other, steps = (
            http.post(GENERATE, json={**body, **more})
            for more in ({}, {"prompt_2": "a dog"}, {"sigmas": [1.0, 0.5], "num_inference_steps": 2})
        )
        assert [answer.status_code for answer in (plain, other, steps)] == [200] * 3, steps.text
        assert len({answer.json()["data"][0]["b64_json"] for answer in (plain, other, steps)}) == 3
        for more, message in (
            ({"prompt_3": "a"}, "Did you mean 'prompt_2'?"),
            ({"num_frames": 5}, "'num_frames' is not a known field"),
            ({"num_images_per_prompt": 100}, "is an argument of the pipeline that requests cannot set"),
        ):
            refused = http.post(GENERATE, json={**body, **more})
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"]


def test_nothing_is_left_of_requests_that_are_over(folder: Path) -> None:
    """Not even for the collector, which may come hundreds of images later: made, streamed, refused, or given up."""
    made: dict[str, Any] = {"num_inference_steps": 2}
    streamed, refused, given_up = (
        made | {"stream": True, "partial_images": 1},
        made | {"size": "17x16"},
        {"deadline": 0.001},
    )

    async def main() -> None:
        async with AsyncOmni(str(folder), device="cpu") as omni:
            state = AppState(omni, ServerConfig())
            state.open()
            transport = httpx.ASGITransport(create_app(state))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE_S) as http:

                async def ask(status: int, values: dict[str, Any], others: list[Job]) -> None:
                    answer = await http.post(GENERATE, json={"prompt": PROMPT, **values})
                    assert answer.status_code == status, answer.text
                    async with asyncio.timeout(PATIENCE_S):  # What was cancelled, and threads, end a moment later.
                        while [job for job in all_jobs() if job not in before] != others:
                            await asyncio.sleep(0.02)

                for status, values in ((200, made), (200, streamed), (400, refused), (200, made)):
                    await ask(status, values, [])
                running = omni.submit(PROMPT, OmniDiffusionSamplingParams(num_inference_steps=LONG))
                await ask(503, given_up, [running])
                running.cancel()

    def all_jobs() -> list[Job]:
        return [item for item in gc.get_objects() if type(item) is Job]

    gc.collect()
    before = all_jobs()  # Of other tests in this process.
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_work_that_fails_when_its_client_has_left_is_not_logged() -> None:
    """Otherwise a client could fill the log with tracebacks."""

    async def fail() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ApiError("too late") from None

    async def left() -> Any:
        return {"type": "http.disconnect"}

    async def leave() -> list[Any]:
        said: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        with pytest.raises(ClientDisconnect):
            await unless_gone(Request({"type": "http"}, left), fail())
        await asyncio.sleep(0)
        gc.collect()
        return said

    assert asyncio.run(leave()) == []
