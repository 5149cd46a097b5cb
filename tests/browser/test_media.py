"""The page of a server of videos, of sound, and of one that edits: what is made is played, what is given is sent."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from pipelines import PIPELINES, tiny_flux_pipeline
from pipelines.builder import build
from pipelines.recipes import RECIPES
from samovar.media import read_video
from server.conftest import DEFAULTS, VIDEO_DEFAULTS
from server.running import RunningServer, running

from .test_page import Visit, browser  # noqa: F401

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore")]

CACHE = {"backend": "tea_cache", "rel_l1_thresh": 100.0, "min_steps": 2}
SHOWN = """() => ["film", "film-exact"].map((id) => {
  const film = document.getElementById(id);
  const canvas = Object.assign(document.createElement("canvas"), { width: film.videoWidth, height: film.videoHeight });
  canvas.getContext("2d").drawImage(film, 0, 0);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return { paused: film.paused, seeking: film.seeking, time: film.currentTime, pixels: [...data] };
})"""
"""What both videos show now."""
DROPPED = """(bytes) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
  return transfer;
}"""
KEEP_MASK = """() => {
  const append = FormData.prototype.append;
  FormData.prototype.append = function (name, value) {
    if (name === "mask") window.sentMask = value;
    return append.apply(this, arguments);
  };
}"""
"""The browser does not tell what is in a form with files."""


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models") / "films"
    PIPELINES["wan"].build(0).save_pretrained(folder)
    (folder / "samovar.json").write_text(json.dumps(VIDEO_DEFAULTS))
    jobs = str(tmp_path_factory.mktemp("jobs"))
    with running(folder, "--jobs", jobs, "--max-steps", "5000", "--cache", json.dumps(CACHE)) as started:
        yield started


@pytest.fixture
def visit(browser: Any, films: RunningServer) -> Iterator[Visit]:  # noqa: F811
    visited = Visit(browser, films, viewport={"width": 1280, "height": 900})
    yield visited
    visited.context.close()


def ask(visit: Visit, prompt: str = "a cat", steps: int = 2, **fields: str) -> None:
    visit.page.fill("#prompt", prompt)
    visit.page.fill("#steps", str(steps))
    for name, value in fields.items():
        visit.page.fill(f"#{name}", value)
    visit.page.keyboard.press("Control+Enter")


def test_a_video_is_made_played_and_kept_by_the_server(visit: Visit) -> None:
    assert visit.page.inner_text("#compare-row") == "Compare with the exact video"
    assert visit.page.is_hidden("#upload")
    ask(visit, seconds="1", seed="7")
    visit.page.wait_for_selector("#film:not([hidden])")
    visit.wait_done()
    visit.page.wait_for_function("() => document.getElementById('film').readyState >= 2")
    size = visit.page.eval_on_selector("#film", "film => [film.videoWidth, film.videoHeight, film.duration]")
    assert size == [48, 32, pytest.approx(17 / 16, abs=0.05)]
    assert "17 at 16/s" in visit.page.inner_text("#figures")
    visit.shot("video")
    visit.page.reload()
    visit.page.click("#history button")
    visit.page.wait_for_selector("#film:not([hidden])")
    assert visit.page.input_value("#prompt") == "a cat"
    assert (visit.page.input_value("#seed"), visit.page.input_value("#seconds")) == ("7", "1")
    visit.page.click("#delete")
    visit.page.wait_for_selector("#history button", state="detached")
    assert visit.page.is_hidden("#film")
    assert visit.complaints == []


def shown(visit: Visit, index: int, of: list[list[Any]]) -> bool:
    """Whether both videos stand at a frame: by their clocks, and by their pixels among all frames of their files."""
    still = "() => ['film', 'film-exact'].every((id) => !document.getElementById(id).seeking)"
    visit.page.wait_for_function(still)
    states = visit.page.evaluate(SHOWN)
    nearest = []
    for state, frames in zip(states, of, strict=True):
        pixels = np.array(state["pixels"]).reshape(*frames[0].shape[:2], 4)[..., :3]
        nearest.append(int(np.argmin([np.abs(pixels - frame).mean() for frame in frames])))
        assert state["paused"]
        assert int(state["time"] * 16) == index
    assert visit.page.inner_text("#frame") == f"{index + 1} of {len(of[0])}"
    return nearest == [index, index]


def test_cached_and_exact_videos_are_moved_by_one_scrubber(visit: Visit, films: RunningServer, tmp_path: Path) -> None:
    visit.page.check("#compare")
    ask(visit, steps=8, seconds="1", seed="7")
    visit.page.wait_for_selector("#transport:not([hidden])")
    visit.wait_done()
    timelines = visit.page.locator(".timeline")
    assert [timelines.nth(row).locator(".skipped").count() > 0 for row in (0, 1)] == [True, False]
    visit.page.wait_for_function("() => /likeness/.test(document.getElementById('figures').textContent)")
    assert re.search(r"likeness\s+\d+\.\d dB", visit.page.inner_text("#figures"))
    with films.client() as http:
        exact, cached = http.get("/v1/videos").json()["data"]
        assert (cached["samovar"]["request"].get("cache"), exact["samovar"]["request"]["cache"]) == (None, False)
        frames = []
        for job in (cached, exact):
            (tmp_path / "video.mp4").write_bytes(http.get(f"/v1/videos/{job['id']}/content").content)
            frames.append([frame.astype(int) for frame in read_video(tmp_path / "video.mp4").frames])
    assert [len(each) for each in frames] == [17, 17]

    visit.page.wait_for_function("() => document.getElementById('play').textContent === 'Pause'")  # It begins to play.
    visit.page.wait_for_function(
        "() => ['film', 'film-exact'].every((id) => document.getElementById(id).currentTime > 0.3)"
    )
    visit.page.click("#play")
    assert visit.page.inner_text("#play") == "Play"
    assert shown(visit, int(visit.page.input_value("#scrub")), frames)

    visit.page.focus("#scrub")
    visit.page.keyboard.press("Home")
    assert shown(visit, 0, frames)
    visit.page.click("#forward")
    visit.page.click("#forward")
    visit.page.click("#forward")
    visit.page.click("#back")
    assert shown(visit, 2, frames)
    box = visit.page.locator("#scrub").bounding_box()
    assert box is not None
    visit.page.mouse.move(box["x"] + box["width"] * 2 / 16, box["y"] + box["height"] / 2)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2, steps=9)
    visit.page.mouse.up()
    dragged = int(visit.page.input_value("#scrub"))
    assert 9 <= dragged <= 13
    assert shown(visit, dragged, frames)
    visit.page.keyboard.press("End")
    assert shown(visit, 16, frames)
    visit.page.click("#play")  # From the last frame it begins anew.
    visit.page.wait_for_function("() => Number(document.getElementById('scrub').value) < 9")
    visit.page.click("#play")
    visit.shot("both-videos")

    visit.page.reload()
    assert visit.page.locator("#history button").count() == 1 or visit.page.wait_for_selector("#history button")
    visit.page.click("#history button")
    visit.page.wait_for_selector("#transport:not([hidden])")
    visit.page.click("#delete")
    visit.page.wait_for_selector("#history button", state="detached")
    assert visit.page.is_hidden("#film-exact")
    with films.client() as http:
        assert http.get("/v1/videos").json()["data"] == []
    assert visit.complaints == []


def test_a_job_of_another_visit_is_in_the_history_and_can_be_watched(visit: Visit, films: RunningServer) -> None:
    with films.client() as http:
        body = {"prompt": "a dog", "num_inference_steps": 4000, "partial_images": 3}
        sides = {"width": 64, "height": 32, "num_frames": 9}  # Said otherwise than the page would.
        job = http.post("/v1/videos", json=body | sides).json()
        visit.page.reload()
        visit.page.click("#history button")
        visit.page.wait_for_function("() => / %$/.test(document.getElementById('go').textContent)")
        shown = [visit.page.input_value(f"#{name}") for name in ("prompt", "width", "height", "seconds")]
        assert shown == ["a dog", "64", "32", "0.5625"]
        visit.page.wait_for_selector("#first:not([hidden])")
        visit.page.keyboard.press("Escape")
        visit.page.wait_for_selector("#history button", state="detached")
        assert http.get(f"/v1/videos/{job['id']}").status_code == 404
        assert visit.complaints == []


def test_a_long_video_shows_previews_and_can_be_cancelled(visit: Visit, films: RunningServer) -> None:
    ask(visit, steps=4000)
    visit.page.wait_for_function("() => / %$/.test(document.getElementById('go').textContent)")
    visit.page.wait_for_selector("#first:not([hidden])")
    visit.page.keyboard.press("Escape")
    visit.wait_done()
    assert visit.page.is_hidden("#problem")
    visit.page.wait_for_selector("#history button", state="detached")
    with films.client() as http:
        assert http.get("/v1/videos").json()["data"] == []


def test_sound_is_played_and_kept(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    import diffusers

    build(diffusers.StableAudioPipeline, RECIPES["StableAudioPipeline"]).save_pretrained(tmp_path)
    with running(tmp_path) as server:
        visit = Visit(browser, server)
        assert visit.page.is_hidden("#width")
        ask(visit, "rain", seconds="2")
        visit.page.wait_for_selector("#sound:not([hidden])")
        visit.wait_done()
        assert visit.page.inner_text("#history button") == "rain"
        visit.page.reload()
        visit.page.click("#history button")
        visit.page.wait_for_selector("#sound:not([hidden])")
        assert visit.page.get_attribute("#sound", "src")
        assert "audio_length" in visit.page.inner_text("#snippet")
        assert visit.complaints == []
        visit.context.close()


def test_an_image_and_its_mask_are_sent(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    from diffusers import FluxInpaintPipeline

    FluxInpaintPipeline(**tiny_flux_pipeline().components).save_pretrained(tmp_path)
    (tmp_path / "samovar.json").write_text(json.dumps(DEFAULTS))
    files = {}
    for name, colour in (("image", "teal"), ("mask", "white")):
        content = io.BytesIO()
        PIL.Image.new("RGB", (24, 16), colour).save(content, "PNG")
        files[name] = {"name": f"{name}.png", "mimeType": "image/png", "buffer": content.getvalue()}
    with running(tmp_path) as server:
        visit = Visit(browser, server)
        dropped = visit.page.evaluate_handle(DROPPED, list(files["image"]["buffer"]))
        visit.page.dispatch_event("#form", "dragover", {"dataTransfer": dropped})
        assert "is-over" in (visit.page.get_attribute("#upload", "class") or "")
        visit.page.dispatch_event("#form", "drop", {"dataTransfer": dropped})
        assert visit.page.evaluate("() => document.getElementById('image').files[0].name") == "dropped.png"
        assert "is-over" not in (visit.page.get_attribute("#upload", "class") or "")
        visit.page.set_input_files("#mask", files["mask"])
        assert visit.page.locator("#given img").count() == 2
        visit.ask("a door", steps=3)
        visit.page.wait_for_selector("#first:not([hidden])")
        visit.wait_done()
        assert visit.page.is_hidden("#problem"), visit.page.inner_text("#problem")
        assert visit.page.locator("#history button").count() == 1
        redrawn = visit.page.get_attribute("#first", "src")
        visit.page.set_input_files("#mask", [])
        visit.page.wait_for_selector("#paint:not([hidden])")
        box = visit.page.locator("#paint").bounding_box()
        assert box is not None
        visit.page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
        visit.page.mouse.down()
        visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=5)
        visit.page.mouse.up()
        assert all(part in visit.page.inner_text("#snippet") for part in ("/v1/images/edits", "image=@", "mask=@"))
        visit.page.evaluate(KEEP_MASK)
        visit.ask("a door", steps=3)
        visit.page.wait_for_selector("#history li:nth-child(2)")
        mask = visit.page.evaluate("async () => [...new Uint8Array(await window.sentMask.arrayBuffer())]")
        assert painted_part(bytes(mask)) == [True, False]
        assert visit.page.get_attribute("#first", "src") != redrawn
        assert visit.complaints == []
        visit.shot("edit")
        visit.context.close()


def painted_part(content: bytes) -> list[bool]:
    """Whether a mask is white left and right of the middle."""
    mask = PIL.Image.open(io.BytesIO(content)).convert("L")
    assert mask.size == (24, 16)
    return [mask.getpixel((x, 8)) > 200 for x in (4, 20)]
