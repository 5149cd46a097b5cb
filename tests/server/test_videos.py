"""Videos over HTTP, asked for by OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import json
import threading
import warnings
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import PIL.Image
import pytest
import torch

from pipelines import PIPELINES
from samovar.engine import OutputKind
from samovar.media import read_video
from samovar.server.errors import ApiError
from samovar.server.settings import ServerConfig
from samovar.server.state import AppState
from samovar.server.videos import Videos

from .conftest import VIDEO_DEFAULTS
from .running import PATIENCE_S, PROMPT, RunningServer, running, until

VIDEOS = "/v1/videos"
CLOSED = "is an argument of the pipeline that requests cannot set"
LONG = {"num_inference_steps": 50_000}
"""Steps that nobody waits for."""


@pytest.fixture
def client(films: RunningServer) -> Iterator[openai.OpenAI]:
    with warnings.catch_warnings():  # OpenAI's own service of this name has ended.
        warnings.simplefilter("ignore", DeprecationWarning)
        with openai.OpenAI(base_url=f"{films.address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            yield client


def made(client: openai.OpenAI, **settings: Any) -> Any:
    created = client.videos.create(prompt=PROMPT, **settings)
    assert (created.status, created.progress, created.object) == ("queued", 0, "video")
    return client.videos.poll(created.id)


def film(content: bytes, folder: Path) -> Any:
    file = folder / "film.mp4"
    file.write_bytes(content)
    return read_video(file)


def test_the_client_makes_a_video(client: openai.OpenAI, video_folder: Path, tmp_path: Path) -> None:
    """The frames are those of the bare pipeline, as near as H.264 keeps noise: nearer than those of another seed."""
    video = made(client, seconds="1", size="48x32", model="films", extra_body={"seed": 5, "guidance_scale": 2.0})
    assert (video.status, video.progress, video.seconds, video.size) == ("completed", 100, "1.0625", "48x32")
    assert video.completed_at is not None
    assert video.expires_at is not None
    assert video.expires_at - video.completed_at == 86_400
    assert video.samovar["num_frames"] == 17, "a second at 16 frames, in groups of four and one"
    shown = film(client.videos.download_content(video.id).read(), tmp_path)
    assert (len(shown), shown.fps) == (17, 16.0)
    pipe = PIPELINES["wan"].build(0)
    pipe.set_progress_bar_config(disable=True)
    call = VIDEO_DEFAULTS | {"num_frames": 17, "guidance_scale": 2.0, "output_type": "np"}
    right, wrong = (pipe(PROMPT, generator=torch.Generator().manual_seed(seed), **call).frames[0] for seed in (5, 6))
    grey = np.array([0.299, 0.587, 0.114])  # Colours have a quarter of the pixels.
    errors = [float(np.abs((shown.frames - 255 * frames) @ grey).mean()) for frames in (right, wrong)]
    assert errors[0] < errors[1] / 2


def test_a_video_has_images(client: openai.OpenAI) -> None:
    video = made(client)
    sizes = {}
    for variant in ("thumbnail", "spritesheet"):
        content = client.videos.download_content(video.id, variant=variant).read()  # type: ignore[arg-type]
        image = PIL.Image.open(io.BytesIO(content))
        sizes[variant] = image.format, image.size
    assert sizes == {"thumbnail": ("WEBP", (48, 32)), "spritesheet": ("JPEG", (5 * 48, 2 * 32))}


def test_parts_of_a_video_can_be_asked_for(films: RunningServer, client: openai.OpenAI) -> None:
    """Players do, to jump."""
    id = made(client).id
    with films.client() as http:
        whole = http.get(f"{VIDEOS}/{id}/content")
        part = http.get(f"{VIDEOS}/{id}/content", headers={"Range": "bytes=10-19"})
    assert (whole.status_code, whole.headers["content-type"]) == (200, "video/mp4")
    assert (part.status_code, part.content) == (206, whole.content[10:20])


def test_a_file_that_is_gone_is_told(films: RunningServer, client: openai.OpenAI) -> None:
    video = made(client)
    (folder,) = Path(films.process.args[films.process.args.index("--jobs") + 1]).glob(video.id)  # type: ignore[index, union-attr]
    (folder / "video.mp4").unlink()
    with pytest.raises(openai.NotFoundError, match="was removed from the server's folder"):
        client.videos.download_content(video.id)


def test_videos_are_listed_by_age(client: openai.OpenAI) -> None:
    for old in client.videos.list(limit=100):
        client.videos.delete(old.id)
    ids = [made(client).id for _ in range(3)]
    assert [video.id for video in client.videos.list(order="asc", limit=2)] == ids, "the client asks for further pages"
    page = client.videos.list(limit=2)
    assert ([video.id for video in page.data], page.has_more, page.last_id) == (ids[:0:-1], True, ids[1])
    rest = client.videos.list(limit=2, after=ids[1])
    assert ([video.id for video in rest.data], rest.has_more) == (ids[:1], False)
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "0001000"}, {"limit": "\u0665"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            client.videos.list(**query)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match=r"'limt' is not a known field. Did you mean 'limit'"):
        client.videos.list(extra_query={"limt": 3})
    with pytest.raises(openai.BadRequestError, match="'limit' is given more than once"):
        client.get("/videos?limit=2&limit=3", cast_to=object)
    with pytest.raises(openai.NotFoundError) as missing:
        client.videos.list(after="video_0")
    assert missing.value.param == "after"


def test_a_remix_is_the_same_with_another_prompt(client: openai.OpenAI, tmp_path: Path) -> None:
    first = made(client, extra_body={"num_frames": 5, "fps": 8, "guidance_scale_2": 1.5})
    remixed = client.videos.poll(client.videos.remix(first.id, prompt="a dog").id)
    assert (remixed.remixed_from_video_id, remixed.prompt, remixed.status) == (first.id, "a dog", "completed")
    assert remixed.samovar["request"] == first.samovar["request"]  # type: ignore[attr-defined]
    same = client.videos.poll(client.videos.remix(first.id, prompt=PROMPT).id)
    one, two = (film(client.videos.download_content(each.id).read(), tmp_path) for each in (first, same))
    assert np.array_equal(one.frames, two.frames)
    assert (len(one), one.fps) == (5, 8.0)


def test_a_running_video_shows_its_progress_and_is_aborted_by_delete(
    films: RunningServer, client: openai.OpenAI
) -> None:
    long = client.videos.create(prompt=PROMPT, extra_body={**LONG, "num_inference_steps": 400, "partial_images": 3})
    waits = [client.videos.create(prompt=PROMPT, extra_body=LONG).id for _ in range(3)]
    until(lambda: client.videos.retrieve(long.id).progress > 30, "a third is done")
    assert client.videos.retrieve(long.id).status == "in_progress"
    preview = client.videos.download_content(long.id, variant="thumbnail").read()
    assert PIL.Image.open(io.BytesIO(preview)).size == (48, 32)
    with pytest.raises(openai.NotFoundError, match=r"The video is in progress. Ask again when it is completed"):
        client.videos.download_content(long.id)
    with pytest.raises(openai.BadRequestError, match="Only a completed one can be remixed"):
        client.videos.remix(long.id, prompt="x")
    for id in (*waits, long.id):
        assert client.videos.delete(id).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(id)
    until(lambda: films.status()["running"] == films.status()["queued"] == 0, "nothing runs")
    assert made(client).status == "completed"


def test_the_queue_has_an_end(films: RunningServer, client: openai.OpenAI) -> None:
    ids = [client.videos.create(prompt=PROMPT, extra_body=LONG).id]
    until(lambda: client.videos.retrieve(ids[0]).status == "in_progress", "the first runs")
    ids += [client.videos.create(prompt=PROMPT, extra_body=LONG).id for _ in range(4)]
    with pytest.raises(openai.RateLimitError, match="4 videos are already waiting"):
        client.videos.create(prompt=PROMPT)
    late = client.videos.delete(ids.pop()) and client.videos.create(prompt=PROMPT, extra_body={"deadline": 0.2})
    failed = client.videos.poll(late.id)
    assert failed.error is not None
    assert (failed.status, failed.error.code) == ("failed", "queue_timeout")
    for id in ids:
        client.videos.delete(id)


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"size": "50x32"}, "size", "width must be a multiple of 16 for this model, not 50: try 48 or 64"),
        ({"num_frames": 66}, "num_frames", "num_frames should be less than or equal to 65, not 66"),
        ({"seconds": "5"}, "seconds", "This model makes at most 61 frames, not 81. Ask for fewer"),
        ({"seconds": "601", "fps": 0.1}, "seconds", "seconds; the limit is 300 (--max-seconds)"),
        ({"seconds": "four"}, "seconds", "seconds should be a valid number, not 'four'"),
        ({"num_frames": 61, "size": "64x64"}, "size", "61 frames of 64x64 are 249,856 pixels; the limit is 100,000 ("),
        ({"num_frames": 9, "seconds": 1}, "seconds", "num_frames=9 and seconds=1.0 are mutually exclusive"),
        ({"size": "48x32", "width": 48}, "size", "size says the same as width and height"),
        ({"guidance_scale_2": "3"}, "guidance_scale_2", "guidance_scale_2 should be a valid number, not '3'"),
        ({"num_videos_per_prompt": 9}, "num_videos_per_prompt", CLOSED),
        ({"input_reference": {"image_url": "http://169.254.169.254/"}}, "input_reference", "no URL of a client"),
        ({"input_reference": {"file_id": "file-1"}}, "input_reference", "must be a file in a form, a data URL, or {"),
        ({"input_reference": {"image_url": "data:image/png;base64,%%"}}, "input_reference", "is no data URL"),
        ({"input_reference": "data:text/plain;base64,aGVsbG8="}, "input_reference", "is not a readable PNG"),
        ({"strength": 0.5}, "strength", "WanPipeline does not take strength"),
        ({"model": "film"}, "model", "Did you mean 'films'?"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_the_limit(
    films: RunningServer, values: dict[str, Any], param: str, message: str
) -> None:
    with films.client() as http:
        answer = http.post(VIDEOS, json={"prompt": PROMPT, **values})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param), answer.text
    assert message in error["message"]


def test_forms_say_the_same(films: RunningServer) -> None:
    texts = {"prompt": PROMPT, "seconds": "0.5", "seed": "7", "guidance_scale_2": "1.5", "negative_prompt": "7"}
    with films.client() as http:
        video = http.post(VIDEOS, files={name: (None, text) for name, text in texts.items()}).json()
        sent = video["samovar"]["request"]
        assert sent == {"seed": 7, "seconds": 0.5, "guidance_scale_2": 1.5, "negative_prompt": "7"}
        http.delete(f"{VIDEOS}/{video['id']}")
        image = {"prompt": (None, PROMPT), "input_reference": ("a.png", png(), "image/png")}
        refused = http.post(VIDEOS, files=image)
        assert refused.json()["error"]["message"].startswith("WanPipeline takes no image. It starts from text alone.")
        assert refused.json()["error"]["param"] == "input_reference"
        for url in (data_url(png()), data_url(noise())):  # The second one is longer than any prompt.
            for body in (
                {"json": {"prompt": PROMPT, "input_reference": {"image_url": url}}},
                {"json": {"prompt": PROMPT, "input_reference": url}},
                {"files": {"prompt": (None, PROMPT), "input_reference[image_url]": (None, url)}},
            ):
                again = http.post(VIDEOS, **body)
                assert again.json()["error"]["message"] == refused.json()["error"]["message"]
        twice = http.post(VIDEOS, files=image | {"input_reference[image_url]": (None, data_url(png()))})
        assert twice.json()["error"]["message"] == "The field 'input_reference' is given twice."
        assert http.post(VIDEOS, content=b"prompt=a", headers={"Content-Type": "text/plain"}).status_code == 415


def png(size: tuple[int, int] = (48, 32)) -> bytes:
    file = io.BytesIO()
    PIL.Image.linear_gradient("L").resize(size).convert("RGB").save(file, "PNG")
    return file.getvalue()


def noise() -> bytes:
    file = io.BytesIO()
    PIL.Image.effect_noise((1200, 1000), 90).save(file, "PNG")
    assert len(file.getvalue()) > 2**20
    return file.getvalue()


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def test_a_video_model_says_so(films: RunningServer, client: openai.OpenAI, server: RunningServer) -> None:
    with films.client() as http:
        assert http.get("/ready").json()["output"] == "video"
        assert http.get("/v1/models").json()["data"][0]["output"] == "video"
        for path, body in (("/v1/images/generations", {"prompt": "a"}), ("/v1/audio/speech", {"input": "a"})):
            error = http.post(path, json=body).json()["error"]
            assert error["message"] == "The model 'films' makes video. Ask for it at /v1/videos."
        assert (
            http.post("/v1/images/edits", files={"prompt": (None, "a")}).json()["error"]["code"] == "unsupported_model"
        )
    with server.client() as http:
        assert http.get("/ready").json()["output"] == "images"
        for answer in (http.post(VIDEOS, json={"prompt": "a"}), http.get(VIDEOS), http.delete(f"{VIDEOS}/video_1")):
            assert answer.status_code == 400
            assert "makes images. Ask for it at /v1/images/generations" in answer.json()["error"]["message"]


def test_a_video_comes_at_once_to_who_waits(films: RunningServer, client: openai.OpenAI, tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "seed": 3, "num_frames": 5}
    with films.client() as http:
        answer = http.post(f"{VIDEOS}/sync", json=body)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
        assert http.post(f"{VIDEOS}/sync", json=body | {"num_frames": 6}).status_code == 200
        assert http.post(f"{VIDEOS}/sync", json=body | {"num_frames": 66}).status_code == 400
    shown = film(answer.content, tmp_path)
    job = made(client, extra_body={"seed": 3, "num_frames": 5})
    later = film(client.videos.download_content(job.id).read(), tmp_path)
    assert np.array_equal(shown.frames, later.frames)


def test_replicas_keep_no_jobs() -> None:
    """The next request of a client may reach another one."""
    omni: Any = SimpleNamespace(output=OutputKind("video"), config=SimpleNamespace(model="films"))
    state = AppState(omni, ServerConfig(), "serving", is_loaded=True, keeps_jobs=False)
    with pytest.raises(ApiError, match=r"several replicas, which keep no jobs. Ask at /v1/videos/sync"):
        asyncio.run(Videos(state).retrieve("video_1"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_video_begins_with_an_image(tmp_path: Path) -> None:
    """The image is kept with the request, and a remix has it too."""
    import diffusers

    from pipelines.builder import build
    from pipelines.recipes import RECIPES

    name = "WanImageToVideoPipeline"
    build(getattr(diffusers, name), RECIPES[name]).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "samovar.json").write_text(json.dumps({"num_frames": 9}))
    extra = {**VIDEO_DEFAULTS, "seed": 1}
    size = f"{extra.pop('width')}x{extra.pop('height')}"
    with (
        file_site(tmp_path) as site,
        running(tmp_path / "model", "--jobs", str(tmp_path / "jobs"), "--fetch-origin", site) as server,
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="needs image"):
            client.videos.create(prompt=PROMPT, size=size, extra_body=extra)  # type: ignore[arg-type]
        films = []
        for shade in ("black", "white"):
            file = io.BytesIO()
            PIL.Image.new("RGB", (48, 32), shade).save(file, "PNG")
            (tmp_path / f"{shade}.png").write_bytes(file.getvalue())
            video = made(client, size=size, extra_body=extra, input_reference=("a.png", file.getvalue(), "image/png"))
            urls = (
                data_url(file.getvalue()),
                f"{site}/{shade}.png",
            )  # Its own name takes files only.
            named = [extra | {"input_reference": {"image_url": url}} for url in urls]
            videos = [video, *(made(client, size=size, extra_body=each) for each in named)]
            assert {video.status for video in videos} == {"completed"}
            assert len({client.videos.download_content(video.id).read() for video in videos}) == 1
            again = client.videos.poll(client.videos.remix(video.id, prompt=PROMPT).id)
            films += [client.videos.download_content(each.id).read() for each in (video, again)]
        assert films[0] == films[1] != films[2] == films[3]


@contextlib.contextmanager
def file_site(folder: Path) -> Iterator[str]:
    """The address of a site with the files of a folder."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()
